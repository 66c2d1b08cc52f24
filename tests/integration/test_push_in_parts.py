"""The command line's upload in parts, against a real api process, over a line that breaks."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from rich.progress import Progress

from app.adapters import base_models
from app.cli import parts
from app.cli.output import stderr
from app.keys.service import NewKey
from app.platform import Platform
from app.settings import Settings
from engine.adapters.store import open_store
from tests.adapter_files import AdapterFiles, good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.live import free_port
from tests.worker_process import Process, environment, served_description

pytestmark = pytest.mark.timeout(120)
PART_BYTES = 64 * 1024
FILES = good_adapter(tiny_description(layers=8, hidden=256, kv=64, mlp=384), rank=16)
assert len(FILES.weights or b"") > 10 * PART_BYTES


class BreakingLine:
    """A TCP proxy that cuts each connection after some bytes of the client's, `cuts` times."""

    def __init__(self, port: int, *, cut_after: int, cuts: int) -> None:
        self._to = port
        self._cut_after, self.cuts_left = cut_after, cuts
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._connection, client)

    def _start(self, target: Callable[..., None], *given: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _connection(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._to)) as server:
            answers = self._start(self._pass, server, client, None)
            self._pass(client, server, self._cut_after if self.cuts_left else None)
            answers.join()

    def _pass(self, here: socket.socket, there: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(16 * 1024):
                there.sendall(data)
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        self.cuts_left -= 1
                        break
        for end in (here, there):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
async def key(platform: Platform) -> NewKey:
    await base_models.remember(platform.db, served_description(), platform.clock.now())
    return await make_key(platform, await make_tenant(platform))


class Api:
    """The api process; `start` again after `kill`."""

    def __init__(self, settings: Settings) -> None:
        self.port = free_port()
        self._settings = settings
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process(
            [sys.executable, "-m", "app.api_server"],
            self._settings.data_dir / "api.log",
            **environment(
                self._settings,
                LORAMUX_PORT=str(self.port),
                LORAMUX_UPLOAD_PART_BYTES=str(PART_BYTES),
            ),
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/healthz", timeout=5)
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    process = Api(settings)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return FILES.write(tmp_path / "adapter")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FIRST_PAUSE_S", 0.05)


def send(port: int, key: NewKey, folder: Path) -> tuple[dict[str, object], float]:
    """The version, and where the bar ended (1.0: all of it)."""
    address = f"http://127.0.0.1:{port}"
    with (
        httpx.Client(base_url=address, headers=bearer(key), timeout=20) as client,
        Progress(console=stderr, disable=True) as progress,
    ):
        version = parts.send_in_parts(client, folder, "a", progress)
        (task,) = progress.tasks
        return version, task.completed / (task.total or 1)


def stored(settings: Settings) -> AdapterFiles:
    store = open_store(settings.adapter_store_url)
    (ref,) = store.refs()
    files = store.open_checked(ref)
    return AdapterFiles(files.config, files.weights_path.read_bytes())


async def test_a_line_that_breaks_again_and_again_costs_single_parts(
    api: Api, key: NewKey, folder: Path, settings: Settings
) -> None:
    line = BreakingLine(api.port, cut_after=3 * PART_BYTES + 1000, cuts=3)
    version, bar = send(line.port, key, folder)
    line.close()
    assert line.cuts_left == 0
    assert (version["state"], version["version"]) == ("uploaded", 1)
    assert bar == 1.0
    assert stored(settings) == FILES


async def test_a_command_that_was_ended_goes_on_where_it_stopped(
    api: Api, key: NewKey, folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "TRIES", 1)
    line = BreakingLine(api.port, cut_after=5 * PART_BYTES, cuts=1)
    with pytest.raises(httpx.TransportError):
        send(line.port, key, folder)
    line.close()
    api.kill()
    api.start()  # and the server has restarted, too
    sent: list[int] = []
    put = parts._put

    def counted(client, adapter, upload, number, *rest):  # type: ignore[no-untyped-def]
        sent.append(number)
        put(client, adapter, upload, number, *rest)

    monkeypatch.setattr(parts, "_put", counted)
    version, bar = send(api.port, key, folder)
    assert version["state"] == "uploaded"
    assert bar == 1.0
    assert 0 not in sent
    assert 1 not in sent
    assert sent == list(range(sent[0], sent[-1] + 1))
    assert stored(settings) == FILES
    address = f"http://127.0.0.1:{api.port}"
    async with httpx.AsyncClient(base_url=address, headers=bearer(key), timeout=60) as client:
        assert (await client.get("/v1/uploads")).json()["data"] == []


@pytest.mark.wide
async def test_files_that_changed_since_are_not_mixed_with_what_was_sent_before(
    api: Api, key: NewKey, folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "TRIES", 1)
    line = BreakingLine(api.port, cut_after=5 * PART_BYTES, cuts=1)
    with pytest.raises(httpx.TransportError):
        send(line.port, key, folder)
    line.close()
    weights = bytearray(FILES.weights or b"")
    weights[len(weights) - 1] ^= 1
    weights[PART_BYTES + 5] ^= 1  # in a part that has arrived
    changed = AdapterFiles(FILES.config, bytes(weights))
    changed.write(folder)
    send(api.port, key, folder)
    assert stored(settings) == changed


def test_a_refusal_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask() -> httpx.Response:
        asked.append(1)
        error = {"error": {"message": "no", "code": "adapter_too_large"}}
        return httpx.Response(413, json=error)

    assert parts._patiently(ask).status_code == 413
    assert len(asked) == 1
