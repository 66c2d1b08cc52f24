"""A Redis of the test's own, to be killed and brought back."""

import socket
import subprocess
import time
from pathlib import Path

from tests.live import free_port


class OwnRedis:
    """`redis-server` on a free port. Without `persistent` it comes back with nothing."""

    def __init__(self, folder: Path, *, persistent: bool = False) -> None:
        self.folder = folder
        self.port = free_port()
        self.persistent = persistent
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> "OwnRedis":
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if self.persistent:
            options += ["--appendonly", "yes", "--appendfsync", "always"]
        self.process = subprocess.Popen(
            ["redis-server", *options, "--save", ""], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return self
            except OSError:
                time.sleep(0.02)
        raise AssertionError("redis-server did not come up")

    def kill(self) -> None:
        """As `kill -9` does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
