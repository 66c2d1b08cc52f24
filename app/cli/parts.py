"""Sending a large adapter in parts: a line that breaks or a server that restarts costs one part.

What has arrived is asked of the server, so a command that was ended goes on where it stopped when
it is given again; nothing is kept on this side.
"""

import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from rich.progress import Progress, TaskID

from app.cli.http import expect
from app.cli.output import stderr
from engine.adapters.manifest import CONFIG_NAME, WEIGHTS_NAME

IN_PARTS_FROM_BYTES = 16 * 1024 * 1024
"""Smaller adapters go in one request."""
TRIES = 8
"""Attempts at one request before the command gives up; the pauses between them double."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
ROUNDS = 4
"""How often parts may turn out to be missing at the end."""
CHUNK_BYTES = 256 * 1024
PASSING = frozenset({408, 429, 500, 502, 503, 504})
AGAIN = frozenset({"parts_missing", "parts_lost", "upload_changed"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """The two files, read piece by piece."""

    config: BinaryIO
    weights: BinaryIO
    config_bytes: int
    weights_bytes: int

    def part(self, number: int, part_bytes: int) -> bytes:
        """Part 0 is the config; the weights follow in pieces."""
        if number == 0:
            self.config.seek(0)
            return self.config.read()
        self.weights.seek((number - 1) * part_bytes)
        return self.weights.read(part_bytes)


def send_in_parts(
    client: httpx.Client, folder: Path, name: str, progress: Progress
) -> dict[str, Any]:
    """Uploads what the server does not have yet; the bar follows it. Returns the version."""
    with (folder / CONFIG_NAME).open("rb") as config, (folder / WEIGHTS_NAME).open("rb") as weights:
        adapter = Adapter(
            config,
            weights,
            (folder / CONFIG_NAME).stat().st_size,
            (folder / WEIGHTS_NAME).stat().st_size,
        )
        total = adapter.config_bytes + adapter.weights_bytes
        task = progress.add_task(f"{name}: sending", total=total)
        upload = _resume(client, adapter, name) or _begin(client, adapter, name)
        for _ in range(ROUNDS):
            for number in _wanted(adapter, upload, progress, task):
                _put(client, adapter, upload, number, progress, task)
            where = _path(upload)
            response = _patiently(partial(client.post, f"{where}/complete"))
            if response.is_success or _code(response) not in AGAIN:
                break
            upload = expect(_patiently(partial(client.get, where)))
    version: dict[str, Any] = expect(response, 200, 202)
    progress.update(task, completed=total)
    return version


def _begin(client: httpx.Client, adapter: Adapter, name: str) -> dict[str, Any]:
    body = {
        "name": name,
        "config_bytes": adapter.config_bytes,
        "weights_bytes": adapter.weights_bytes,
    }
    headers = {"Idempotency-Key": secrets.token_hex(16)}  # a lost answer begins nothing twice
    begun: dict[str, Any] = expect(
        _patiently(lambda: client.post("/v1/uploads", json=body, headers=headers)), 201
    )
    return begun


def _resume(client: httpx.Client, adapter: Adapter, name: str) -> dict[str, Any] | None:
    """An upload of these files that was broken off."""
    listed = expect(_patiently(lambda: client.get("/v1/uploads")))
    for upload in listed["data"]:
        found: dict[str, Any] = upload
        sizes = (found["config_bytes"], found["weights_bytes"])
        if found["name"] == name and sizes == (adapter.config_bytes, adapter.weights_bytes):
            return found
    return None


def _wanted(
    adapter: Adapter, upload: dict[str, Any], progress: Progress, task: TaskID
) -> list[int]:
    """The parts that are missing or differ from the files; the bar shows the others as done."""
    there = {part["number"]: part for part in upload["received"]}
    wanted, done = [], 0
    for number in range(upload["parts"] + 1):
        part = there.get(number)
        data = b"" if part is None else adapter.part(number, upload["part_bytes"])
        if part is not None and hashlib.sha256(data).hexdigest() == part["sha256"]:
            done += part["bytes"]
        else:
            wanted.append(number)
    progress.update(task, completed=done)
    return wanted


def _put(
    client: httpx.Client,
    adapter: Adapter,
    upload: dict[str, Any],
    number: int,
    progress: Progress,
    task: TaskID,
) -> None:
    data = adapter.part(number, upload["part_bytes"])
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    headers = {"Content-Digest": f"sha-256=:{digest}:", "Content-Length": str(len(data))}
    before = progress.tasks[progress.task_ids.index(task)].completed

    def chunks() -> Iterator[bytes]:
        progress.update(task, completed=before)
        for at in range(0, len(data), CHUNK_BYTES):
            chunk = data[at : at + CHUNK_BYTES]
            yield chunk
            progress.advance(task, len(chunk))

    def put() -> httpx.Response:
        return client.put(f"{_path(upload)}/parts/{number}", content=chunks(), headers=headers)

    response = _patiently(put, again=frozenset({"digest_mismatch"}))
    if _code(response) != "upload_completed":  # by this command's other life: complete says so
        expect(response)


def _patiently(
    ask: Callable[[], httpx.Response], again: frozenset[str] = frozenset()
) -> httpx.Response:
    """The answer of a request that may be repeated; a fault that may pass is waited out."""
    pause_s = FIRST_PAUSE_S
    attempt = 0
    while True:
        attempt += 1
        try:
            response = ask()
        except httpx.TransportError as error:
            if attempt == TRIES or isinstance(error, httpx.UnsupportedProtocol):
                stderr.print("Give the same command again: it goes on where it stopped.")
                raise
        else:
            if response.status_code not in PASSING and _code(response) not in again:
                return response
            if attempt == TRIES:
                return response
            pause_s = max(pause_s, _asked_pause_s(response))
        time.sleep(min(pause_s, LONGEST_PAUSE_S))
        pause_s *= 2


def _asked_pause_s(response: httpx.Response) -> float:
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdigit() else 0.0


def _code(response: httpx.Response) -> str | None:
    if response.is_success:
        return None
    try:
        code = response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code)


def _path(upload: dict[str, Any]) -> str:
    return f"/v1/uploads/{upload['id']}"
