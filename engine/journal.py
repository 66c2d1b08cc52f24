"""Token counts of every request on disk until the api has them in its ledger.

One JSON line a change: {"r": id, "p": prompt, "c": completion, "f": finish, "w": wall ms}, with
cached tokens "k" and the cost ("pm", "dm" ms, "ab" byte-seconds) once it has ended, or
{"a": [ids]} once acknowledged. The last line of a request counts. A thread writes what changed
several times a second and fsyncs each second, so the step path never waits for the disk. A line
torn by a crash is the last one; it is cut off at the next start.
"""

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.clock import Clock, SystemClock
from engine.types import FinishReason, JournalEntry, RequestOutput

WRITE_INTERVAL_S = 0.25
SYNC_INTERVAL_S = 1.0
MAX_FINISHED = 200_000
"""Finished requests kept unacknowledged; beyond that the oldest are dropped, with a log line."""
KEPT_MS = 48 * 3600 * 1000
"""Finished requests that nobody acknowledged for so long are of no use: the api's sweep has closed
their rows by then, and the acknowledgement was lost while the engine was away."""
_COMPACT_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class _Line(msgspec.Struct, omit_defaults=True):
    r: str = ""
    p: int = 0
    c: int = 0
    f: FinishReason | None = None
    w: int = 0
    a: list[str] = []
    k: int = 0
    pm: float = 0.0
    dm: float = 0.0
    ab: float = 0.0


class _Counts(msgspec.Struct):
    """`c` grows with the outputs and becomes the engine's own count with the last one."""

    prompt: int
    completion: int
    finish: FinishReason | None
    wall_ms: int
    failed: bool = False
    cached: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    adapter_byte_seconds: float = 0.0


class Journal:
    """Thread-safe. `begin` and `record` only touch memory; the writer thread does the rest."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._disk = threading.Lock()  # held around file operations, never with `_lock` inside it
        self._entries: dict[str, _Counts] = {}
        self._changed: dict[str, None] = {}
        self._acknowledged: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._read_back()
        self._damaged = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._compact()
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._writer.start()

    # ---------------------------------------------------------------------- what the engine says

    def begin(self, request_id: str, prompt_tokens: int) -> None:
        """A request was handed to the engine."""
        with self._lock:
            self._entries[request_id] = _Counts(prompt_tokens, 0, None, self._clock.wall_ms())
            self._changed[request_id] = None

    def drop(self, request_id: str) -> None:
        """The engine refused the request: nothing of it ran."""
        self.acknowledge([request_id])

    def record(self, outputs: Iterable[RequestOutput]) -> None:
        """Counts what a step brought. Unknown requests (acknowledged already) are left out."""
        now = self._clock.wall_ms()
        with self._lock:
            for output in outputs:
                counts = self._entries.get(output.request_id)
                if counts is None or counts.finish is not None:
                    continue
                counts.completion += len(output.token_ids) + (output.stop_token is not None)
                counts.failed |= output.error_code is not None
                counts.wall_ms = now
                if output.usage is not None:
                    counts.prompt = output.usage.prompt_tokens
                    counts.completion = output.usage.completion_tokens
                    counts.cached = output.usage.cached_tokens
                    counts.prefill_ms = output.usage.prefill_ms
                    counts.decode_ms = output.usage.decode_ms
                    counts.adapter_byte_seconds = output.usage.adapter_byte_seconds
                    counts.finish = "error" if counts.failed else (output.finish or "error")
                self._changed[output.request_id] = None

    # ---------------------------------------------------------------------- what the api asks

    def entries(self, request_ids: Iterable[str]) -> list[JournalEntry]:
        """Those of the requests that are here; the others were never begun or are acknowledged."""
        with self._lock:
            return [
                JournalEntry(
                    request_id,
                    c.prompt,
                    c.completion,
                    c.finish,
                    c.wall_ms,
                    c.cached,
                    c.prefill_ms,
                    c.decode_ms,
                    c.adapter_byte_seconds,
                )
                for request_id in request_ids
                if (c := self._entries.get(request_id)) is not None
            ]

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """The api has these in its ledger; they may be forgotten. Unknown ids are nothing new."""
        with self._lock:
            for request_id in request_ids:
                if self._entries.pop(request_id, None) is not None:
                    self._changed.pop(request_id, None)
                    self._acknowledged.append(request_id)

    # ---------------------------------------------------------------------- the disk

    def write(self) -> None:
        """Appends what changed since the last call (without fsync).

        After a failed write the file may end in half a line, so the next one rewrites it whole.
        """
        with self._disk:
            if self._damaged:
                self._compact()
            data = self._take_changes()
            if data:
                self._damaged = True
                _write_all(self._file, data)
                self._damaged = False

    def sync(self) -> None:
        """Makes what was written durable, and rewrites the file when most of it is settled."""
        with self._disk:
            os.fsync(self._file)
            with self._lock:
                live = len(self._entries)
            if os.fstat(self._file).st_size > max(_COMPACT_BYTES, 400 * live):
                self._compact()

    def close(self) -> None:
        """Writes and syncs the rest."""
        self._stop.set()
        self._writer.join()
        self.write()
        with self._disk:
            os.fsync(self._file)
            os.close(self._file)

    def _write_loop(self) -> None:
        rounds = round(SYNC_INTERVAL_S / WRITE_INTERVAL_S)
        turn = 0
        while not self._stop.wait(WRITE_INTERVAL_S):
            turn += 1
            try:
                self.write()
                if turn % rounds == 0:
                    self.sync()
            except OSError as error:  # a full disk must not end the engine; the next round retries
                _log.error("the usage journal cannot be written: %s", error.strerror)

    def _take_changes(self) -> bytes:
        with self._lock:
            lines = [_encode_entry(key, self._entries[key]) for key in self._changed]
            if self._acknowledged:
                lines.append(msgspec.json.encode(_Line(a=self._acknowledged)))
            self._changed, self._acknowledged = {}, []
            self._drop_oldest()
        return b"".join(line + b"\n" for line in lines)

    def _drop_oldest(self) -> None:
        excess = len(self._entries) - MAX_FINISHED
        if excess <= 0:
            return
        finished = [key for key, c in self._entries.items() if c.finish is not None][:excess]
        for key in finished:
            del self._entries[key]
            self._acknowledged.append(key)
        _log.error("dropped %d unacknowledged requests from the usage journal", len(finished))

    def _compact(self) -> None:
        """Writes the live entries to a new file and swaps it in. Called with `_disk` held."""
        oldest_ms = self._clock.wall_ms() - KEPT_MS
        with self._lock:
            self._entries = {
                key: counts
                for key, counts in self._entries.items()
                if counts.finish is None or counts.wall_ms >= oldest_ms
            }
            lines = [_encode_entry(key, counts) + b"\n" for key, counts in self._entries.items()]
            self._changed, self._acknowledged = {}, []
        fresh = self._path.with_suffix(self._path.suffix + ".new")
        file = os.open(fresh, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        _write_all(file, b"".join(lines))
        os.fsync(file)
        os.replace(fresh, self._path)
        _sync_folder(self._path.parent)
        os.close(self._file)
        self._file = file
        self._damaged = False

    def _read_back(self) -> None:
        """Entries of the former life. What was still running then has ended with it."""
        if not self._path.exists():
            return
        bad = 0
        for raw in self._path.read_bytes().split(b"\n"):
            if not raw:
                continue
            try:
                line = msgspec.json.decode(raw, type=_Line)
            except msgspec.DecodeError:
                bad += 1
                continue
            for request_id in line.a:
                self._entries.pop(request_id, None)
            if line.r:
                self._entries[line.r] = _Counts(
                    line.p,
                    line.c,
                    line.f or "error",
                    line.w,
                    cached=line.k,
                    prefill_ms=line.pm,
                    decode_ms=line.dm,
                    adapter_byte_seconds=line.ab,
                )
        if bad:
            _log.warning("skipped %d unreadable lines of the usage journal", bad)


def _encode_entry(request_id: str, c: _Counts) -> bytes:
    return msgspec.json.encode(
        _Line(
            request_id,
            c.prompt,
            c.completion,
            c.finish,
            c.wall_ms,
            k=c.cached,
            pm=c.prefill_ms,
            dm=c.decode_ms,
            ab=c.adapter_byte_seconds,
        )
    )


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
