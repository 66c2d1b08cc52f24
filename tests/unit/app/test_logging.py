"""No key, password, token or body reaches a log line."""

import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
import structlog

from app.keys import token
from app.logging import STRUCK, configure_logging
from app.platform import Platform
from app.settings import Settings
from tests.factories import PASSWORD, bearer, make_key, make_tenant, make_user, sign_in

CANARY = "canary-91cd"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the process writes, while everything is configured as in production."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("debug", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(log: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def test_a_days_work_leaves_no_secret_in_the_log(
    client: httpx.AsyncClient, platform: Platform, log: io.StringIO
) -> None:
    operator = await make_key(platform, None)
    tenant = await make_tenant(platform)
    user = await make_user(platform, tenant)
    cookies = await sign_in(platform, user)
    headers = bearer(operator)
    made = await client.post("/admin/v1/keys", headers=headers, json={"tenant_id": tenant.id})
    invited = await client.post(
        "/admin/v1/users", headers=headers, json={"email": "a@b.c", "role": "operator"}
    )
    await client.post("/admin/v1/tenants", headers=headers, json={"name": CANARY, "x": CANARY})
    await client.get(f"/v1/{CANARY}?q={CANARY}", headers={"authorization": f"Bearer {CANARY}"})
    await client.post("/v1/chat/completions", headers=headers, content=CANARY)
    await client.get(f"/console/invitation/{invited.json()['url'].rpartition('/')[2]}")
    await client.get("/admin/v1/tenants", headers={"cookie": f"loramux_session={CANARY}"})
    text = log.getvalue()
    assert len(lines(log)) >= 7
    for secret in (
        operator.secret.text,
        made.json()["key"],
        invited.json()["url"].rpartition("/")[2],
        PASSWORD,
        *cookies.values(),
        CANARY,
    ):
        assert secret not in text


async def test_the_access_log_tells_route_status_and_caller(
    client: httpx.AsyncClient, platform: Platform, log: io.StringIO
) -> None:
    key = await make_key(platform, None)
    answer = await client.get("/admin/v1/tenants", headers=bearer(key))
    (line,) = [line for line in lines(log) if line["event"] == "request"]
    assert (line["route"], line["status"], line["caller"]) == ("/admin/v1/tenants", 200, key.row.id)
    assert line["request_id"] == answer.headers["x-request-id"]


def test_a_key_that_slips_into_a_line_is_struck_out(log: io.StringIO) -> None:
    text = token.mint().text
    structlog.get_logger().info("oops", value=f"got {text}", password="hunter2")
    logging.getLogger("some.library").warning("got %s", text)
    assert text not in log.getvalue()
    assert lines(log)[0]["password"] == STRUCK
    assert "hunter2" not in log.getvalue()


def test_a_librarys_traceback_becomes_places_alone(log: io.StringIO) -> None:
    try:
        raise ValueError(CANARY)
    except ValueError:
        logging.getLogger("some.library").exception("it failed")
    assert CANARY not in log.getvalue()
    assert "test_logging.py" in str(lines(log)[0]["where"])


def test_every_line_of_a_task_carries_its_id(log: io.StringIO, settings: Settings) -> None:
    from app.worker import create_worker

    celery = create_worker(settings)

    @celery.task(name="tests.says")
    def says() -> None:
        structlog.get_logger().info("working")
        logging.getLogger("a.library").warning("as well")

    says.apply(task_id="task-7")
    structlog.get_logger().info("afterwards")
    told = {line["event"]: line.get("task_id") for line in lines(log)}
    assert told["working"] == told["as well"] == "task-7"
    assert told["afterwards"] is None
