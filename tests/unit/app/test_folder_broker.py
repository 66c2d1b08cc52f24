"""The broker in a folder: whole messages, one reader each, nobody else's eyes."""

import stat
import threading
from pathlib import Path

import pytest
from celery import Celery
from kombu import Connection, Exchange, Producer, Queue

from app.adapters.resources import QueueUnavailable
from app.folder_broker import Transport
from app.settings import Settings
from app.task_queue import FOLDER_TRANSPORT, QUEUE, CeleryQueue, create_celery


@pytest.fixture
def celery(settings: Settings) -> Celery:
    return create_celery(settings)


def receive(celery: Celery) -> list[dict[str, object]]:
    """Takes every message off the queue."""
    found = []
    with celery.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue:
        while True:
            try:
                message = queue.get(block=False)
            except queue.Empty:
                return found
            found.append(dict(message.headers))
            message.ack()


async def test_messages_arrive_in_order_and_once(celery: Celery) -> None:
    queue = CeleryQueue(celery)
    for number in range(5):
        await queue.send("adapters.validate", f"ver_{number}")
    arguments = [message["argsrepr"] for message in receive(celery)]
    assert arguments == [f"('ver_{number}',)" for number in range(5)]
    assert receive(celery) == []


async def test_its_folders_are_the_owners_alone(celery: Celery, settings: Settings) -> None:
    await CeleryQueue(celery).send("adapters.validate", "ver_1")
    root = settings.data_dir / "broker"
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    messages = list((root / "messages").iterdir())
    assert len(messages) == 1
    assert stat.S_IMODE(messages[0].stat().st_mode) == 0o600


async def test_a_message_has_ids_and_no_content(celery: Celery, settings: Settings) -> None:
    await CeleryQueue(celery).send("adapters.validate", "ver_1")
    message = next((settings.data_dir / "broker" / "messages").iterdir()).read_text()
    assert "ver_1" in message
    assert str(settings.data_dir) not in message


def test_many_readers_get_each_message_once(celery: Celery, settings: Settings) -> None:
    root = settings.data_dir / "broker"
    options = {
        "data_folder_in": str(root / "messages"),
        "data_folder_out": str(root / "messages"),
        "control_folder": str(root / "control"),
    }
    got: list[int] = []

    def connection() -> Connection:
        return Connection(
            "filesystem://localhost", transport=FOLDER_TRANSPORT, transport_options=options
        )

    def read() -> None:
        with connection() as opened, opened.SimpleQueue("numbers") as queue:
            while True:
                try:
                    message = queue.get(block=True, timeout=0.5)
                except queue.Empty:
                    return
                got.append(message.payload)
                message.ack()

    readers = [threading.Thread(target=read) for _ in range(3)]
    with connection() as opened, opened.SimpleQueue("numbers") as queue:
        for reader in readers:
            reader.start()
        for number in range(60):
            queue.put(number)
    for reader in readers:
        reader.join()
    assert sorted(got) == list(range(60))


async def test_a_folder_that_cannot_be_written_is_a_queue_that_is_away(
    celery: Celery, settings: Settings
) -> None:
    messages = settings.data_dir / "broker" / "messages"
    messages.rmdir()
    messages.write_text("in the way")
    with pytest.raises(QueueUnavailable):
        await CeleryQueue(celery).send("adapters.validate", "ver_1")


async def test_a_redis_that_is_away_is_too(settings: Settings) -> None:
    elsewhere = settings.model_copy(update={"broker_url": "redis://127.0.0.1:9/0"})
    with pytest.raises(QueueUnavailable):
        await CeleryQueue(create_celery(elsewhere)).send("adapters.validate", "ver_1")


def test_nothing_but_json_is_accepted(celery: Celery, tmp_path: Path) -> None:
    assert celery.conf.accept_content == ["json"]
    assert celery.conf.task_serializer == "json"
    assert celery.conf.task_acks_late is True


# --------------------------------------------------------------------------- bindings

BOUND = Queue("jobs", Exchange("jobs.direct"), routing_key="a/b&c")


@pytest.fixture
def bindings(tmp_path: Path) -> Connection:
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


def test_a_message_goes_to_the_queue_that_its_key_is_bound_to(bindings: Connection) -> None:
    with bindings, bindings.channel() as channel:
        bound = BOUND(channel)
        bound.declare()
        bound.declare()  # again, as each process does at its start
        other = Queue("others", BOUND.exchange, routing_key="other")(channel)
        other.declare()
        Producer(channel).publish("hello", exchange=BOUND.exchange, routing_key="a/b&c")
        assert channel.get_table("jobs.direct") != []
        message = bound.get(no_ack=True)
        assert message is not None
        assert message.payload == "hello"
        assert bound.get(no_ack=True) is None
        assert other.get(no_ack=True) is None


def test_a_deleted_queue_gets_nothing_more(bindings: Connection) -> None:
    with bindings, bindings.channel() as channel:
        bound = BOUND(channel)
        bound.declare()
        bound.delete()
        assert channel.get_table("jobs.direct") == []


def test_what_a_kill_left_behind_in_the_control_folder_stops_nobody(
    bindings: Connection, tmp_path: Path
) -> None:
    (tmp_path / "control" / "jobs.direct.exchange").write_bytes(b"")
    (tmp_path / "control" / "jobs.direct.bindings").mkdir()
    with bindings, bindings.channel() as channel:
        bound = BOUND(channel)
        bound.declare()
        Producer(channel).publish("hello", exchange=BOUND.exchange, routing_key="a/b&c")
        assert bound.get(no_ack=True) is not None
