"""The command line against the whole platform, and on the database."""

import json
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.live import EXAMPLES, LORAMUX, LivePlatform

pytestmark = pytest.mark.timeout(180)

BASE = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def key(live: LivePlatform) -> str:
    return live.tenant_with_key("cli")


class TestUsage:
    def test_what_was_answered_is_shown_by_key_and_exported(self, live: LivePlatform) -> None:
        own = live.tenant_with_key("counted")
        live.run("chat", "Hello", "--model", BASE, "--max-tokens", "4", key=own)
        report: dict[str, Any] = {"data": []}
        for _ in range(20):  # the row closes soon after the answer
            report = live.json("usage", "--group-by", "key,model", "--bucket", "hour", key=own)
            if report["data"]:
                break
            time.sleep(0.1)
        (entry,) = report["data"]
        assert (entry["requests"], entry["model"]) == (1, BASE)
        assert entry["total_tokens"] > 0
        assert entry["prefill_ms"] > 0
        lines = live.run("usage", "--csv", "--requests", key=own).splitlines()
        assert len(lines) == 2
        assert lines[0].startswith("request_id,started_at,")
        assert BASE in live.run("usage", "--group-by", "model", key=own)
        refused = live.run("usage", "--bucket", "week", key=own, check=False)
        assert refused == ""


class TestAdapters:
    def test_push_ends_with_an_adapter_that_can_be_called(
        self, live: LivePlatform, key: str
    ) -> None:
        folder = str(EXAMPLES / "pirate")
        version = live.json("adapters", "push", folder, "--name", "buccaneer", key=key)
        assert version["state"] == "ready"
        assert [group["group"] for group in version["report"]["checks"]] == [
            "container",
            "config",
            "coverage",
            "numbers",
            "behaviour",
        ]
        answer = live.json("chat", "Hello", "--model", "buccaneer", "--max-tokens", "8", key=key)[
            "answer"
        ]
        assert answer

    def test_check_and_push_say_the_same_of_a_broken_adapter(
        self, live: LivePlatform, key: str, tmp_path: Path
    ) -> None:
        config = json.loads((EXAMPLES / "pirate" / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
        weights = (EXAMPLES / "pirate" / "adapter_model.safetensors").read_bytes()
        (tmp_path / "adapter_model.safetensors").write_bytes(weights[:-4])
        checked = json.loads(live.run("adapters", "check", str(tmp_path), "--json", check=False))
        pushed = json.loads(
            live.run(
                *("adapters", "push", str(tmp_path), "--name", "broken", "--json"),
                key=key,
                check=False,
            )
        )
        assert pushed["state"] == "rejected"
        offline = [(g["name"], g["status"], _codes(g)) for g in checked["groups"]]
        online = [(g["group"], g["status"], _codes(g)) for g in pushed["report"]["checks"]]
        assert online[: len(offline)] == offline
        assert {"truncated_file", "unsupported_dora"} <= {
            c for _, _, codes in offline for c in codes
        }

    def test_every_example_passes_the_offline_check(self, live: LivePlatform) -> None:
        folders = [folder for folder in EXAMPLES.iterdir() if folder.is_dir()]
        assert len(folders) == 3
        for folder in folders:
            assert live.json("adapters", "check", str(folder))["status"] == "pass"


def _codes(group: dict[str, object]) -> list[str]:
    found = group["findings"]
    assert isinstance(found, list)
    return [entry["code"] for entry in found]


class TestKeys:
    def test_a_revoked_key_is_refused_with_a_sentence(self, live: LivePlatform) -> None:
        made = live.json("keys", "create", "--tenant", "cli", "--name", "short-lived")
        live.run("keys", "revoke", made["id"])
        listed = live.json("keys", "list", "--tenant", "cli")
        assert next(k for k in listed if k["id"] == made["id"])["state"] == "revoked"

    def test_operator_commands_refuse_bad_input_in_a_sentence(self, live: LivePlatform) -> None:
        for command in (
            ("tenants", "create", "Not A Name"),
            ("tenants", "create", "cli"),
            ("tenants", "update", "cli", "--limit", "no_such_limit=1"),
            ("keys", "create", "--tenant", "nobody"),
            ("users", "create", "not-an-address", "--tenant", "cli"),
        ):
            assert live.run(*command, check=False) == ""  # the sentence goes to stderr


@pytest.mark.wide
def test_demo_streams_three_adapters_and_the_base_model(live: LivePlatform) -> None:
    answers = {answer["title"]: answer for answer in live.json("demo")}
    assert answers.keys() == {"pirate", "json", "haiku", "base model"}
    assert not any(answer["problem"] for answer in answers.values())
    assert len({answer["text"] for answer in answers.values()}) == 4
    assert len({answer["tenant"] for answer in answers.values()}) == 2
    assert "arr" in answers["pirate"]["text"].lower()
    assert answers["json"]["text"].lstrip().startswith("{")


def requests_of(live: LivePlatform) -> int:
    """How many calls the ledger knows."""
    with closing(sqlite3.connect(live.data_dir / "loramux.db")) as ledger:
        (count,) = ledger.execute("SELECT count(*) FROM usage_records").fetchone()
    return int(count)


class TestBench:
    """`loramux bench` against the real server."""

    LOAD = ("--rate", "4", "--seconds", "1.5", "--prompt-tokens", "8", "--output-tokens", "4")
    SMALL = (*LOAD, "--most-prompt", "16", "--most-output", "6", "--ttft-ms", "60000")

    @pytest.mark.wide
    def test_a_workload_over_all_models_is_answered_and_drawn(
        self, live: LivePlatform, key: str, tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib")
        document = live.json(
            *("bench", "--workload", "uniform", *self.SMALL, "--tpot-ms", "60000"),
            *("--plots", str(tmp_path / "plots"), "--output", str(tmp_path / "run.json")),
            key=key,
        )
        assert document == json.loads((tmp_path / "run.json").read_text())
        (report,) = document["runs"].values()
        assert report["offered"] == report["answered"] > 1
        assert report["goodput"] == 1.0
        assert report["ttft_ms"]["p50"] > 0
        assert (tmp_path / "plots" / "latencies.png").stat().st_size > 1000

    @pytest.mark.wide
    def test_refusals_are_counted_by_their_code(self, live: LivePlatform, key: str) -> None:
        command = ("bench", "--workload", "jam", *self.SMALL, "--model", "nobody", "--json")
        (report,) = json.loads(live.run(*command, key=key, check=False))["runs"].values()
        assert report["answered"] == 0
        assert list(report["refused"]) == ["model_not_found"]

    @pytest.mark.wide
    def test_ctrl_c_stops_and_reports(self, live: LivePlatform, key: str) -> None:
        command = [str(LORAMUX), "bench", "--model", BASE, *self.SMALL, "--seconds", "600"]
        before = requests_of(live)
        with subprocess.Popen(
            command,
            env=live.environment | {"LORAMUX_API_KEY": key},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            give_up_s = time.monotonic() + 60
            while requests_of(live) == before and time.monotonic() < give_up_s:
                time.sleep(0.2)  # the command has to start and to send something
            process.send_signal(signal.SIGINT)
            shown, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "goodput" in shown
