"""The whole platform as a user starts it: `loramux serve` on a temporary data folder."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).parents[1]
LORAMUX = Path(sys.executable).parent / "loramux"
EXAMPLES = REPOSITORY / "examples" / "adapters"
START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class LivePlatform:
    """A running `loramux serve`. `log` is what it printed."""

    data_dir: Path
    port: int
    extra: dict[str, str] = field(default_factory=dict)  # more environment variables
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data_dir / "serve.log"

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("LORAMUX_")}
        own = {
            "LORAMUX_DATA_DIR": str(self.data_dir),
            "LORAMUX_PORT": str(self.port),
            "LORAMUX_URL": self.url,
            "LORAMUX_ARENA_BYTES": str(256 * 2**20),
        }
        return inherited | own | self.extra

    def start(self) -> None:
        """Returns once /readyz says so."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(LORAMUX), "serve"],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if self._ready():
                return
            time.sleep(0.2)
        raise AssertionError(f"loramux serve did not come up:\n{self.log.read_text()[-4000:]}")

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def run(self, *arguments: str, key: str = "", check: bool = True) -> str:
        """One command of the CLI against this platform; its standard output."""
        environment = self.environment | ({"LORAMUX_API_KEY": key} if key else {})
        result = subprocess.run(
            [str(LORAMUX), *arguments], env=environment, capture_output=True, text=True, timeout=110
        )
        if check and result.returncode != 0:
            raise AssertionError(f"{arguments}: {result.stdout}\n{result.stderr}")
        return result.stdout

    def json(self, *arguments: str, key: str = "") -> Any:
        return json.loads(self.run(*arguments, "--json", key=key))

    def tenant_with_key(self, name: str) -> str:
        """Makes the tenant and a key of it; returns the key."""
        self.run("tenants", "create", name)
        return str(self.json("keys", "create", "--tenant", name)["key"])

    def one_time_password(self) -> str:
        """The operator's, from what the first start printed."""
        found = re.search(r"[a-z2-9]{5}(?:-[a-z2-9]{5}){3}", self.log.read_text())
        assert found is not None, "no one-time password was printed"
        return found.group()

    def kill(self, name: str, within_s: float = 30.0) -> None:
        """`kill -9` on one supervised process, as soon as it is there."""
        deadline = time.monotonic() + within_s
        while not (found := self.children()[name]):
            if time.monotonic() > deadline:
                raise AssertionError(f"{name} does not run:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)
        os.kill(found[0], signal.SIGKILL)

    def children(self) -> dict[str, Sequence[int]]:
        """Process ids of the supervised processes by name."""
        assert self.process is not None
        marks = {
            "engine": "-m engine",
            "api": "app.api_server",
            "worker": "app.worker worker",
            "beat": "app.worker beat",
        }
        listed = subprocess.run(
            ["ps", "-ww", "--ppid", str(self.process.pid), "-o", "pid=,args="],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        return {
            name: [int(line.split()[0]) for line in listed if mark in line]
            for name, mark in marks.items()
        }
