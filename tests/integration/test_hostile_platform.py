"""Hostile files sent to a whole running platform, while another tenant goes on asking.

Every ninth kind, or every n-th with LORAMUX_TEST_HOSTILE_STEP=n: all of them together meet an
engine in `test_stored_adapters_under_load`, and the checks one by one in `test_hostile_bounds`.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.settings import packaged_base_model
from engine.types import ModelDescription
from tests.adapter_files import HOSTILE, HostileCase
from tests.live import EXAMPLES, LivePlatform, free_port
from tests.validation_bench import CONTENT_TYPE, upload_body

pytestmark = [pytest.mark.wide, pytest.mark.timeout(400)]

KINDS = HOSTILE[:: int(os.environ.get("LORAMUX_TEST_HOSTILE_STEP", "9"))]
AT_THE_DOOR = {
    "missing_part", "empty_part", "unknown_part", "pickle_file", "config_too_large",
    "rank_out_of_range",
}  # fmt: skip
"""Codes of files that are refused while they arrive."""
VERDICT_WITHIN_S = 300.0
"""For all of them together: one worker checks one at a time."""
MORE_MEMORY_BYTES = 300 << 20
"""What api and engine together may hold more at the end than before."""


def describe() -> ModelDescription:
    """The served base model, of which hostile files are made; one layer, so that they are small."""
    command = [sys.executable, "-m", "engine.describe", f"--base-model={packaged_base_model()}"]
    result = subprocess.run(
        [*command, "--data-dir=/tmp", "--max-rank=256"], capture_output=True, check=True
    )
    whole = msgspec.json.decode(result.stdout, type=ModelDescription)
    kept = tuple(module for module in whole.modules if module.layer <= 0)
    return replace(whole, modules=kept)


class Witness:
    """Another tenant, who asks the same again and again; `answers` are all it was told."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)
        self.answers: list[str] = []

    def ask(self) -> str:
        body = {
            "model": "witness",
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "temperature": 0,
            "max_tokens": 16,
        }
        answer = self._client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text}"
        return str(answer.json()["choices"][0]["message"]["content"])

    def __enter__(self) -> "Witness":
        """Asks a few times alone first: what it is told then is what it is to be told later."""
        self.answers = [self.ask() for _ in range(3)]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            self.answers.append(self.ask())
            time.sleep(2)


def resident_bytes(live: LivePlatform) -> int:
    pids = [pid for name in ("api", "engine") for pid in live.children()[name]]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * 4096


def send(client: httpx.Client, name: str, case: HostileCase, base: ModelDescription) -> int | None:
    """The number of the version that is to be rejected; None: refused as it came."""
    body = upload_body(case.build(base), name)
    answer = client.post("/v1/adapters", content=body, headers={"content-type": CONTENT_TYPE})
    if answer.status_code == 202:
        return int(answer.json()["version"])
    assert answer.status_code in (400, 413), (case.name, answer.text)
    assert answer.json()["error"]["code"] in AT_THE_DOOR, case.name
    assert answer.json()["error"]["param"], case.name
    return None


def verdict(client: httpx.Client, name: str, number: int, deadline: float) -> dict[str, Any]:
    while True:
        version: dict[str, Any] = client.get(f"/v1/adapters/{name}/versions/{number}").json()
        if version["state"] not in ("uploaded", "validating"):
            return version
        assert time.monotonic() < deadline, f"no verdict on {name}"
        time.sleep(0.2)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePlatform]:
    """A platform of its own, whose answers do not depend on what else is in the batch."""
    running = LivePlatform(
        tmp_path / "live", free_port(), extra={"LORAMUX_ENGINE_BATCH_INVARIANT": "true"}
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_each_is_refused_by_name_and_nobody_else_notices(live: LivePlatform) -> None:
    base = describe()
    ours, theirs = live.tenant_with_key("witnesses"), live.tenant_with_key("attackers")
    live.run("tenants", "update", "attackers", "--limit", "max_adapters=1000")
    live.run("adapters", "push", str(EXAMPLES / "pirate"), "--name", "witness", key=ours)
    processes = live.children()
    headers = {"Authorization": f"Bearer {theirs}"}
    with (
        httpx.Client(base_url=live.url, headers=headers, timeout=120) as client,
        Witness(live.url, ours) as witness,
    ):
        before = resident_bytes(live)
        sent = {}
        assert len(KINDS) >= 15
        for at, case in enumerate(KINDS):
            number = send(client, f"h{at}", case, base)
            if number is not None:
                sent[f"h{at}"] = (case, number)
        deadline = time.monotonic() + VERDICT_WITHIN_S
        for name, (case, number) in sent.items():
            version = verdict(client, name, number, deadline)
            assert version["state"] == "rejected", (case.name, version["reason"])
            found = [f["code"] for c in version["report"]["checks"] for f in c["findings"]]
            assert case.code in found, case.name
    assert len(witness.answers) > 3
    assert len(set(witness.answers)) == 1
    assert not witness.answers[0].startswith("5")
    assert live.children() == processes  # nothing died and was started again
    assert resident_bytes(live) - before < MORE_MEMORY_BYTES
