"""`loramux keys`: restrictions when a key is made, and the leaked-key check."""

import json

import pytest
from typer.testing import Result

from app.cli.keys import LIVE_KEY
from tests.unit.app.cli.conftest import Run


@pytest.fixture
def made(run: Run) -> dict[str, str]:
    """A tenant `acme` and a key of it, as `keys create --json` shows it."""
    assert run("tenants", "create", "acme", "--limit", "requests_per_minute=10").exit_code == 0
    return dict(_json(run("keys", "create", "--tenant", "acme", "--name", "ci", "--json")))


def _json(result: Result) -> dict[str, str]:
    assert result.exit_code in (0, LIVE_KEY), result.output
    document: dict[str, str] = json.loads(result.stdout)
    return document


class TestCreate:
    def test_takes_access_networks_and_limits(self, run: Run, made: dict[str, str]) -> None:
        options = ("--access", "read", "--network", "203.0.113.0/24")
        limit = ("--limit", "requests_per_minute=5")
        key = _json(run("keys", "create", "--tenant", "acme", *options, *limit, "--json"))
        listed = json.loads(run("keys", "list", "--json").stdout)
        (row,) = [row for row in listed if row["id"] == key["id"]]
        assert (row["access"], row["networks"]) == ("read", ["203.0.113.0/24"])

    @pytest.mark.parametrize(
        ("option", "says"),
        [
            (("--adapter", "nothing"), "no adapter 'nothing'"),
            (("--network", "here"), "no network"),
            (("--access", "all"), "full, inference, manage, read"),
            (("--limit", "requests_per_minute=11"), "may only tighten"),
            (("--limit", "max_rank=8"), "is no limit"),
        ],
    )
    def test_refuses_what_is_no_restriction_in_a_sentence(
        self, run: Run, made: dict[str, str], option: tuple[str, str], says: str
    ) -> None:
        result = run("keys", "create", "--tenant", "acme", *option)
        assert result.exit_code == 1
        assert says in result.stderr


class TestCheck:
    def test_tells_whose_it_is_and_that_it_works(self, run: Run, made: dict[str, str]) -> None:
        result = run("keys", "check", made["key"])
        assert result.exit_code == LIVE_KEY
        assert "tenant acme WORKS NOW" in result.stdout
        assert f"loramux keys revoke {made['id']}" in result.stdout
        assert made["key"] not in result.output

    def test_reads_a_published_text_from_standard_input(
        self, run: Run, made: dict[str, str]
    ) -> None:
        result = run("keys", "check", "--json", input=f"a: 1\nkey: {made['key']}\n")
        (found,) = json.loads(result.stdout)
        assert (found["live"], found["key_id"]) == (True, made["id"])

    def test_a_revoked_key_is_no_reason_for_an_alarm(self, run: Run, made: dict[str, str]) -> None:
        run("keys", "revoke", made["id"])
        result = run("keys", "check", made["key"])
        assert result.exit_code == 0
        assert "does not work: it is revoked" in result.stdout

    def test_offline_tells_shape_and_checksum_without_a_database(
        self, run: Run, made: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from app.cli import keys

        monkeypatch.delattr(keys, "in_transaction")
        whole = run("keys", "check", made["key"], "--offline")
        wrong = run("keys", "check", made["key"][:-1] + "!", "--offline")
        typed = made["key"][:-1] + ("0" if made["key"][-1] != "0" else "1")
        mistyped = run("keys", "check", typed, "--offline")
        assert (whole.exit_code, wrong.exit_code, mistyped.exit_code) == (LIVE_KEY, 0, 0)
        assert "is a whole key" in whole.stdout
        assert "Nothing in it has the shape" in wrong.stdout
        assert "wrong checksum" in mistyped.stdout
