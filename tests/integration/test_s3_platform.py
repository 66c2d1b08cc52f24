"""The whole platform on object storage: upload, validation, engine, and the server going away."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live import EXAMPLES, LivePlatform, free_port
from tests.s3_server import CREDENTIALS, S3Server

pytestmark = [pytest.mark.wide, pytest.mark.timeout(400)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    running = S3Server(tmp_path)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def platform(server: S3Server, tmp_path: Path) -> Iterator[LivePlatform]:
    url = server.new_store_url()
    running = LivePlatform(
        tmp_path / "live", free_port(), extra={"LORAMUX_ADAPTER_STORE_URL": url} | CREDENTIALS
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()


def ask(platform: LivePlatform, key: str, model: str) -> httpx.Response:
    """Asked again while the engine starts."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    }
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(120):
        answer = httpx.post(
            f"{platform.url}/v1/chat/completions", json=body, headers=headers, timeout=60
        )
        if answer.status_code != 503 or answer.json()["error"]["code"] != "engine_unavailable":
            return answer
        httpx.get(f"{platform.url}/readyz", timeout=5)
    return answer


def test_it_serves_from_there_and_what_is_in_memory_outlives_the_server(
    platform: LivePlatform, server: S3Server
) -> None:
    key = platform.tenant_with_key("s3")
    for name in ("pirate", "haiku"):
        version = platform.json("adapters", "push", str(EXAMPLES / name), "--name", name, key=key)
        assert version["state"] == "ready"
    assert not (platform.data_dir / "adapters").exists()
    platform.kill("engine")  # what it held is gone: both are cold
    assert ask(platform, key, "pirate").status_code == 200
    server.stop()
    assert ask(platform, key, "pirate").status_code == 200
    lost = ask(platform, key, "haiku")
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(lost.headers["retry-after"]) >= 1
    again = httpx.post(
        f"{platform.url}/v1/uploads",
        json={"name": "later", "config_bytes": 2, "weights_bytes": 2},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )
    part = httpx.put(
        f"{platform.url}/v1/uploads/{again.json()['id']}/parts/0",
        content=b"{}",
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert (part.status_code, part.json()["error"]["code"]) == (503, "store_unavailable")
