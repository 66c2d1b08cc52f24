"""The folder broker: nothing half written, whoever is killed when."""

from pathlib import Path

import pytest
from kombu import Connection, Exchange, Producer, Queue

from app.folder_broker import Transport

QUEUE = Queue("jobs", Exchange("jobs.direct"), routing_key="a/b&c")


@pytest.fixture
def broker(tmp_path: Path) -> Connection:
    for name in ("messages", "control"):
        (tmp_path / name).mkdir()
    return Connection(
        transport=Transport,
        transport_options={
            "data_folder_in": str(tmp_path / "messages"),
            "data_folder_out": str(tmp_path / "messages"),
            "control_folder": str(tmp_path / "control"),
        },
    )


def test_a_message_goes_to_the_queue_that_its_key_is_bound_to(broker: Connection) -> None:
    with broker, broker.channel() as channel:
        bound = QUEUE(channel)
        bound.declare()
        bound.declare()  # again, as each process does at its start
        other = Queue("others", QUEUE.exchange, routing_key="other")(channel)
        other.declare()
        Producer(channel).publish("hello", exchange=QUEUE.exchange, routing_key="a/b&c")
        assert channel.get_table("jobs.direct") != []
        message = bound.get(no_ack=True)
        assert message is not None
        assert message.payload == "hello"
        assert bound.get(no_ack=True) is None
        assert other.get(no_ack=True) is None


def test_a_deleted_queue_gets_nothing_more(broker: Connection) -> None:
    with broker, broker.channel() as channel:
        bound = QUEUE(channel)
        bound.declare()
        bound.delete()
        assert channel.get_table("jobs.direct") == []


def test_what_a_kill_left_behind_in_the_control_folder_stops_nobody(
    broker: Connection, tmp_path: Path
) -> None:
    (tmp_path / "control" / "jobs.direct.exchange").write_bytes(b"")
    (tmp_path / "control" / "jobs.direct.bindings").mkdir()
    with broker, broker.channel() as channel:
        bound = QUEUE(channel)
        bound.declare()
        Producer(channel).publish("hello", exchange=QUEUE.exchange, routing_key="a/b&c")
        assert bound.get(no_ack=True) is not None
