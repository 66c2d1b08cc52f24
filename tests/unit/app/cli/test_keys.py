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
            (("--limit", "ttft_ms=900"), "no such budget that a key could loosen"),
            (("--limit", "budget_percentile=nan"), "a key may only loosen it"),
        ],
    )
    def test_refuses_what_is_no_restriction_in_a_sentence(
        self, run: Run, made: dict[str, str], option: tuple[str, str], says: str
    ) -> None:
        result = run("keys", "create", "--tenant", "acme", *option)
        assert result.exit_code == 1
        assert says in result.stderr


class TestChange:
    def test_a_rotated_key_has_a_successor_and_works_until_the_overlap_ends(
        self, run: Run, made: dict[str, str]
    ) -> None:
        new = _json(run("keys", "rotate", made["id"], "--overlap", "60", "--json"))
        assert new["name"] == "ci"
        assert {run("keys", "check", k["key"]).exit_code for k in (made, new)} == {LIVE_KEY}
        last = _json(run("keys", "rotate", new["id"], "--overlap", "0", "--json"))
        assert [run("keys", "check", k["key"]).exit_code for k in (new, last)] == [0, LIVE_KEY]
        again = run("keys", "rotate", made["id"])
        assert "already rotated" in again.stderr

    def test_restrictions_are_changed_and_ended(self, run: Run, made: dict[str, str]) -> None:
        network = ("--network", "203.0.113.0/24", "--days", "7")
        changed = _json(run("keys", "update", made["id"], "--access", "read", *network, "--json"))
        assert (changed["access"], changed["networks"]) == ("read", ["203.0.113.0/24"])
        assert changed["expires_at"]
        open_again = ("--network", "all", "--days", "0", "--json")
        changed = _json(run("keys", "update", made["id"], *open_again))
        assert (changed["access"], changed["networks"]) == ("read", None)
        assert changed["expires_at"] is None
        assert "nothing to change" in run("keys", "update", made["id"]).stderr
        refused = run("keys", "update", made["id"], "--adapter", "nothing")
        assert "no adapter 'nothing'" in refused.stderr


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
