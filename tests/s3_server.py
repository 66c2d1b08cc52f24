"""A real S3 server as a process of its own (moto's), and buckets in it."""

import secrets
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.live import free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


class S3Server:
    """Listens on a port of 127.0.0.1 from `start` to `stop`; keeps its objects in memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(self.endpoint, timeout=5)
            except httpx.TransportError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise AssertionError(self._log.read_text()[-2000:]) from None
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def new_store_url(self) -> str:
        """A bucket of its own, as LORAMUX_ADAPTER_STORE_URL names it."""
        bucket = f"loramux-{secrets.token_hex(6)}"
        answer = httpx.put(
            f"{self.endpoint}/{bucket}",
            headers={"authorization": "AWS4-HMAC-SHA256 Credential=tests/x/us-east-1/s3/aws4"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return f"s3://{bucket}/some/where?endpoint={self.endpoint}"
