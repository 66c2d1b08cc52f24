"""`loramux webhooks` against a served api and a receiver on a socket."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs
from typer.testing import CliRunner

from app.cli import app as cli
from app.cli import webhooks
from app.platform import Platform
from app.settings import Settings
from app.webhooks import delivery
from app.webhooks.sender import Sender
from tests.factories import make_key, make_tenant
from tests.serving import serve
from tests.unit.app.webhooks.receiver import Receiver, receive, status
from tests.validation_bench import make_bench


class Loramux:
    """The command line, signed in."""

    def __init__(self, url: str, key: str) -> None:
        self._environment = {"LORAMUX_URL": url, "LORAMUX_API_KEY": key, "COLUMNS": "200"}

    async def run(self, *arguments: str, fails: bool = False) -> str:
        """What it printed."""
        result = await asyncio.to_thread(
            CliRunner().invoke, cli, ["webhooks", *arguments], env=self._environment
        )
        assert (result.exit_code != 0) is fails, result.output
        return result.output


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_allow_loopback": True, "webhook_timeout_s": 0.5})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receive() as opened:
        yield opened


@pytest.fixture
async def loramux(app: FastAPI, platform: Platform) -> AsyncIterator[Loramux]:
    await make_bench(app)
    key = await make_key(platform, await make_tenant(platform))
    with capture_logs():  # the api's lines would mix with what the command prints
        async with serve(app) as url:
            yield Loramux(url, key.secret.text)


async def test_an_endpoint_is_made_tested_watched_and_deleted(
    loramux: Loramux, receiver: Receiver, platform: Platform
) -> None:
    receiver.answers = [status(500), status(204)]
    made = json.loads(
        await loramux.run("create", receiver.url(), "--event", "version.ready", "--json")
    )
    id_, secret = made["id"], made["secret"]
    assert secret.startswith("whsec_")
    assert id_ in await loramux.run("list")
    assert secret not in await loramux.run("list", "--json")
    assert "is queued" in await loramux.run("test", id_, "--wait", "0")
    sender = Sender(platform.settings, platform.clock)
    assert await delivery.sweep(platform, sender) == 1
    assert "http_error 500 in" in await loramux.run("deliveries", id_, "--state", "pending")
    (sent,) = json.loads(await loramux.run("deliveries", id_, "--json"))
    assert "is due now" in await loramux.run("resend", id_, sent["id"])
    assert await delivery.sweep(platform, sender) == 1
    assert len(receiver.received) == 2
    assert "delivered 204" in await loramux.run("deliveries", id_)
    renewed = json.loads(await loramux.run("rotate", id_, "--overlap", "0", "--json"))
    assert renewed["secret"] != secret
    assert "is disabled" in await loramux.run("disable", id_)
    assert "disabled (by hand)" in await loramux.run("list")
    assert "webhook_disabled" in await loramux.run("test", id_, fails=True)
    assert "is enabled" in await loramux.run("enable", id_)
    assert "is deleted" in await loramux.run("delete", id_)
    assert "There is none yet" in await loramux.run("list")


async def test_a_test_tells_how_its_first_attempt_went(
    loramux: Loramux, receiver: Receiver, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code says whether it arrived."""
    monkeypatch.setattr(webhooks, "ASK_EVERY_S", 0.01)
    receiver.answers = [status(204), status(404)]
    made = json.loads(
        await loramux.run("create", receiver.url(), "--event", "version.ready", "--json")
    )
    sender = Sender(platform.settings, platform.clock)

    async def send() -> None:
        while not await delivery.sweep(platform, sender):  # noqa: ASYNC110 - as the worker does
            await asyncio.sleep(0.01)

    arrived, _ = await asyncio.gather(loramux.run("test", made["id"]), send())
    assert "delivered 204" in arrived
    lost, _ = await asyncio.gather(loramux.run("test", made["id"], fails=True), send())
    assert "http_error 404" in lost


async def test_refusals_are_the_servers_sentences(loramux: Loramux) -> None:
    answer = await loramux.run(
        "create", "https://10.0.0.1/x", "--event", "version.ready", fails=True
    )
    assert "webhook_address_refused" in answer
    assert "webhook_not_found" in await loramux.run("delete", "whe_none", fails=True)
