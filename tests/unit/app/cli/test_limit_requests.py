"""`loramux limit-requests`: an operator answers from the terminal."""

import json

import pytest

from app.limit_requests import service
from app.platform import Platform
from app.settings import Settings
from app.tenants.service import find_by_name
from tests.factories import make_caller
from tests.unit.app.cli.conftest import Run, on_platform


@pytest.fixture
def asked(run: Run, settings: Settings) -> list[str]:
    """The ids of two requests of the tenant acme."""
    run("tenants", "create", "acme", "--limit", "max_rank=16")

    async def ask(platform: Platform) -> list[str]:
        async with platform.db.transaction() as session:
            tenant = await find_by_name(session, "acme")
            rows = [
                await service.ask(
                    session,
                    make_caller(platform, tenant),
                    limit_name=name,
                    wanted=64.0,
                    reason="a launch",
                    settings=settings,
                    now=platform.clock.now(),
                )
                for name in ("max_rank", "ttft_ms")
            ]
        return [row.id for row in rows]

    return list(on_platform(settings, ask))


def test_they_are_listed_approved_and_declined(run: Run, asked: list[str]) -> None:
    rank, ttft = asked
    listed = json.loads(run("limit-requests", "list", "--state", "open", "--json").stdout)
    assert [(row["id"], row["tenant"]) for row in listed] == [(ttft, "acme"), (rank, "acme")]
    assert "a launch" in run("limit-requests", "list", "--tenant", "acme").stdout
    approved = run("limit-requests", "approve", rank, "--value", "32", "--answer", "half of it")
    assert approved.stdout == f"{rank} is approved: max_rank is set to 32\n"
    (tenant,) = json.loads(run("tenants", "list", "--json").stdout)
    assert tenant["max_rank"] == 32
    declined = run("limit-requests", "decline", ttft, "--answer", "too fast")
    assert declined.stdout == f"{ttft} is declined: ttft_ms is as it was\n"
    (event,) = json.loads(run("audit", "--action", "limits.decline", "--json").stdout)
    assert (event["actor_label"], event["detail"]["answer"]) == ("cli", "too fast")


def test_what_cannot_be_is_a_sentence(run: Run, asked: list[str]) -> None:
    rank, _ = asked
    for arguments, said in (
        (("approve", rank, "--value", "2.5"), "whole number"),
        (("approve", "lrq_none"), "There is no request 'lrq_none'"),
        (("decline", rank, "--answer", " "), "Say why"),
        (("list", "--state", "closed"), "'closed' is no state"),
    ):
        result = run("limit-requests", *arguments)
        assert result.exit_code == 1
        assert said in result.stderr
    assert run("limit-requests", "decline", rank).exit_code == 2
