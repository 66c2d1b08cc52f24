"""`loramux users`: what an operator does to people."""

import json

import pytest

from tests.unit.app.cli.conftest import Run


@pytest.fixture
def ada(run: Run) -> str:
    run("tenants", "create", "acme")
    assert run("users", "create", "ada@example.com", "--tenant", "acme").exit_code == 0
    return "ada@example.com"


def statuses(run: Run) -> dict[str, str]:
    return {
        row["email"]: row["status"] for row in json.loads(run("users", "list", "--json").stdout)
    }


def test_suspend_resume_reset_sign_out_and_remove(run: Run, ada: str) -> None:
    assert run("users", "suspend", ada).exit_code == 0
    assert statuses(run) == {ada: "suspended"}
    run("users", "resume", ada)
    assert statuses(run) == {ada: "invited"}
    assert "/console/invitation/" in run("users", "reset", ada).stdout
    assert "is viewer" in run("users", "role", ada, "viewer").stdout
    assert "choose admin or viewer" in run("users", "role", ada, "operator").stderr
    assert "signed in nowhere" in run("users", "sessions", ada).stdout
    assert "0 sessions ended" in run("users", "sign-out", ada).stdout
    assert run("users", "remove", ada).exit_code == 0
    assert statuses(run) == {}
    shown = run("audit", "--tenant", "acme", "--action", "user.role", "--json")
    (event,) = json.loads(shown.stdout)
    assert (event["detail"]["to"], event["actor_label"]) == ("tenant_viewer", "cli")


def test_nobody_of_that_name_is_a_sentence(run: Run, ada: str) -> None:
    result = run("users", "remove", "eve@example.com")
    assert result.exit_code == 1
    assert "There is no user 'eve@example.com'" in result.stderr
