"""`loramux aliases` against a served api."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs
from typer.testing import CliRunner

from app.cli import app as cli
from app.platform import Platform
from tests.factories import make_key, make_tenant
from tests.serving import add_version, make_ready_adapter, serve


class Loramux:
    """The command line, signed in."""

    def __init__(self, url: str, key: str) -> None:
        self._environment = {"LORAMUX_URL": url, "LORAMUX_API_KEY": key, "COLUMNS": "200"}

    async def run(self, *arguments: str, fails: bool = False) -> str:
        """What it printed."""
        result = await asyncio.to_thread(
            CliRunner().invoke, cli, ["aliases", *arguments], env=self._environment
        )
        assert (result.exit_code != 0) is fails, result.output
        return result.output


@pytest.fixture
async def loramux(app: FastAPI, platform: Platform) -> AsyncIterator[Loramux]:
    """A tenant with `support`: versions 1 and 2 ready, `live` on 1."""
    tenant = await make_tenant(platform)
    await add_version(platform, await make_ready_adapter(platform, tenant), 2)
    key = await make_key(platform, tenant)
    with capture_logs():  # the api's lines would mix with what the command prints
        async with serve(app) as url:
            yield Loramux(url, key.secret.text)


async def test_a_canary_is_set_compared_promoted_and_rolled_back(loramux: Loramux) -> None:
    canary = ("support", "canary")
    assert "v1=90% v2=10% (revision 1)" in await loramux.run("set", *canary, "1=90", "v2=10%")
    assert "v2=100% (revision 2)" in await loramux.run("promote", *canary, "2")
    back = json.loads(await loramux.run("rollback", *canary, "--json"))
    assert [target["weight"] for target in back["targets"]] == [90, 10]
    table = (await loramux.run("compare", *canary)).splitlines()
    assert table[1].split()[:3] == ["version", "weight", "requests"]
    assert [line.split()[:3] for line in table[2:]] == [["v1", "90%", "0"], ["v2", "10%", "0"]]
    history = json.loads(await loramux.run("history", *canary, "--json"))
    assert [change["action"] for change in history] == ["rollback", "promote", "set"]


async def test_the_list_says_which_alias_follows_new_versions(loramux: Loramux) -> None:
    await loramux.run("set", "support", "stable", "1=100")
    lines = (await loramux.run("list", "support")).splitlines()
    assert [line.split()[0] for line in lines] == ["alias", "live", "stable"]
    assert "new versions" in lines[1]
    assert "new versions" not in lines[2]


async def test_a_refusal_is_the_servers_sentence(loramux: Loramux) -> None:
    assert "sum to 100" in await loramux.run("set", "support", "x", "1=90", fails=True)
    assert "alias_not_found" in await loramux.run("promote", "support", "x", "1", fails=True)
    await loramux.run("set", "support", "x", "1=100")
    stale = await loramux.run("set", "support", "x", "2=100", "--if-revision", "7", fails=True)
    assert "revision 1 now" in stale


@pytest.mark.parametrize("target", ["1", "1=x", "=100", "one=100"])
async def test_what_is_no_target_is_told_before_anything_is_sent(
    target: str, loramux: Loramux
) -> None:
    assert "VERSION=PERCENT" in await loramux.run("set", "support", "x", target, fails=True)
    assert "--window takes" in await loramux.run(
        "compare", "support", "live", "--window", "7d", fails=True
    )
