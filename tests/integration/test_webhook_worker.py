"""A webhook from the api over the real broker and a real Celery worker to a receiver's socket."""

import secrets
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI

from app.clock import SystemClock
from app.crypto import Passwords
from app.main import create_app
from app.platform import Platform, open_platform
from app.processes import worker_command
from app.settings import Settings
from tests.conftest import CHEAP_HASHER
from tests.factories import bearer, make_key, make_tenant
from tests.unit.app.webhooks.receiver import Receiver, receive
from tests.worker_process import Process, environment, until

REDIS = "redis://127.0.0.1:6379/10"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(
    params=["filesystem", pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.wide])]
)
def settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "engines": [f"ipc:///tmp/loramux-test-{secrets.token_hex(4)}/e.sock"],
            "broker_url": "filesystem://" if request.param == "filesystem" else REDIS,
            "webhook_allow_loopback": True,
        }
    )


@pytest.fixture
async def platform(settings: Settings) -> AsyncIterator[Platform]:
    opened = open_platform(settings, clock=SystemClock(), passwords=Passwords(CHEAP_HASHER))
    yield opened
    await opened.close()


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    return create_app(platform=platform)


@pytest.fixture
def worker(settings: Settings, platform: Platform) -> Iterator[Process]:
    """`platform` has made the data folder and the root secret by then."""
    started = Process(
        list(worker_command(settings).argv),
        settings.data_dir / "worker.log",
        **environment(settings, LORAMUX_WEBHOOK_ALLOW_LOOPBACK="true"),
    )
    yield started
    started.kill()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receive() as opened:
        yield opened


async def test_a_test_event_arrives_signed_and_its_delivery_says_so(
    client: httpx.AsyncClient, platform: Platform, worker: Process, receiver: Receiver
) -> None:
    headers = bearer(await make_key(platform, await make_tenant(platform)))
    body = {"url": receiver.url(), "events": ["version.ready"]}
    made = (await client.post("/v1/webhooks", json=body, headers=headers)).json()
    path = f"/v1/webhooks/{made['webhook']['id']}"
    sent = await client.post(f"{path}/test", headers=headers)
    assert sent.status_code == 202

    async def delivered() -> bool:
        found = (await client.get(f"{path}/deliveries", headers=headers)).json()["data"]
        return [entry["state"] for entry in found] == ["delivered"]

    await until(delivered, what=worker.log.read_text()[-3000:])
    [message] = receiver.received
    verified = message.verify(made["secret"])
    assert isinstance(verified, dict)
    assert verified["type"] == "webhook.test"
    assert message.headers["webhook-id"] == sent.json()["event_id"]
    log = worker.log.read_text()
    assert made["secret"] not in log
    assert receiver.url() not in log
