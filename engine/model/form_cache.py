"""The forms in which weights are served, kept on the disk from one start to the next.

A quantized checkpoint is decoded and repacked when it is loaded. What comes of it is written to one
file beside the engine's other files, and the next start maps that file instead. Engines on one
machine that serve the same base share its pages.

    magic | arrays, each at a multiple of 64 | index (JSON) | its length, its crc32 | magic

The index names every array with its place, type, shape and crc32. An array is checked when it is
taken; one that is damaged, cut off or missing is made anew, and then the file is written anew.
Files are written under another name and renamed when they are whole, so that engines that start at
once leave one good file. The key of a file (`forms_key`) holds all that its bytes depend on, and
each array's name the version of its form, which belongs to the code that makes it.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]

_MAGIC = b"LMXFORM1"
_FOOTER = struct.Struct("<QI8s")
_ALIGNMENT = 64
_SUFFIX, _PARTIAL = ".forms", ".partial"
_ABANDONED_AFTER_S = 3600.0
_FREE_SHARE = 0.5
"""A file may take this much of what is free on its disk."""


def forms_key(base_digest: str, facts: Mapping[str, object]) -> str:
    """The name of a base's file. `facts`: of processor, torch and settings, as far as forms differ
    by them."""
    text = json.dumps([base_digest, dict(sorted(facts.items()))], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def open_forms(
    data_dir: Path, base_digest: str, facts: Mapping[str, object], most_bytes: int
) -> "FormCache":
    """The forms of a base in an engine's data folder. `facts`: see `forms_key`."""
    folder = data_dir / "base-models" / "forms"
    return FormCache(folder, forms_key(base_digest, facts), most_bytes)


class FormCache:
    """The arrays of one base model. Used by one thread, while the model is loaded."""

    def __init__(self, folder: Path | None, key: str = "", most_bytes: int = 0) -> None:
        """`most_bytes`: of all files in the folder. No folder or 0 bytes: nothing is kept."""
        self._folder = folder if most_bytes > 0 else None
        self._most_bytes = most_bytes
        self._file = folder / f"{key}{_SUFFIX}" if folder is not None else Path()
        self._known = _Kept.open(self._file) if self._folder is not None else None
        self._taken: dict[str, Arrays] = {}
        self._writer: _Writer | None = None

    def arrays(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """What `make` returns, from the disk where it is there. Not to be written to."""
        if self._folder is None:
            return make()
        found = self._known.take(name) if self._known is not None else None
        if found is not None:
            self._taken[name] = found
            if self._writer is not None:
                self._writer.add(name, found)
            return found
        made = make()
        self._keep(name, made)
        return made

    def release(self) -> None:
        """Takes the pages of kept arrays out of this process; those that serve come back."""
        if self._known is not None:
            self._known.release()

    def close(self) -> None:
        """All forms are made: writes what is new, and makes room among older files."""
        if self._folder is None:
            return
        if self._writer is not None and self._writer.finish(self._file):
            log.info("kept the model's forms, %.0f MiB", self._writer.nbytes / 2**20)
        self._writer = None
        self._taken.clear()
        self.release()
        if self._known is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)  # the oldest unused goes first
        with contextlib.suppress(OSError):
            prune(self._folder, self._most_bytes, keep=self._file)

    def _keep(self, name: str, made: Arrays) -> None:
        if self._writer is None:
            assert self._folder is not None
            self._writer = _Writer(self._folder, self._file.stem, self._most_bytes)
            for earlier, arrays in self._taken.items():
                self._writer.add(earlier, arrays)
        self._writer.add(name, made)


NOTHING_KEPT = FormCache(None)


class _Kept:
    """A whole file, mapped."""

    def __init__(self, mapped: mmap.mmap, index: dict[str, list[dict[str, Any]]]) -> None:
        self._map, self._index = mapped, index

    @classmethod
    def open(cls, file: Path) -> "_Kept | None":
        """None when there is no file, or none that ends as a whole one does."""
        try:
            with file.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            length, crc, magic = _FOOTER.unpack(mapped[-_FOOTER.size :])
            start = len(mapped) - _FOOTER.size - length
            index = mapped[max(0, start) : len(mapped) - _FOOTER.size]
            if magic != _MAGIC or mapped[: len(_MAGIC)] != _MAGIC or start < 0:
                raise ValueError("no magic")
            if zlib.crc32(index) != crc:
                raise ValueError("another index was written")
            return cls(mapped, json.loads(index))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            log.warning("the kept forms in %s cannot be used: %s", file.name, error)
            return None

    def take(self, name: str) -> Arrays | None:
        """The arrays, or None when they are not there or not what was written."""
        entries = self._index.get(name)
        if entries is None:
            return None
        try:
            arrays = tuple(self._read(entry) for entry in entries)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("kept form %s is damaged and made anew: %s", name, error)
            return None
        return arrays

    def _read(self, entry: dict[str, Any]) -> Array:
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        array = np.frombuffer(self._map, dtype, math.prod(shape), entry["at"]).reshape(shape)
        if zlib.crc32(array.reshape(-1).view(np.uint8).data) != entry["crc32"]:
            raise ValueError("its checksum differs")
        return array

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


class _Writer:
    """A file in the making. Once something cannot be written it gives up, and says so once."""

    def __init__(self, folder: Path, key: str, most_bytes: int) -> None:
        self.nbytes = 0
        self._failed = False
        self._index: dict[str, list[dict[str, Any]]] = {}
        self._partial = folder / f"{key}.{os.getpid()}.{secrets.token_hex(4)}{_PARTIAL}"
        self._most_bytes = most_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = os.statvfs(folder)
            self._most_bytes = min(most_bytes, int(free.f_bavail * free.f_frsize * _FREE_SHARE))
            self._stream = self._partial.open("xb")
            self._put(_MAGIC)
        except OSError as error:
            self._give_up(error)

    def add(self, name: str, arrays: Arrays) -> None:
        if self._failed:
            return
        try:
            self._index[name] = [self._entry(array) for array in arrays]
        except OSError as error:
            self._give_up(error)

    def finish(self, file: Path) -> bool:
        """Whether the file is there now, whole."""
        if self._failed:
            return False
        try:
            text = json.dumps(self._index).encode()
            self._put(text)
            self._put(_FOOTER.pack(len(text), zlib.crc32(text), _MAGIC))
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._partial.replace(file)
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def _entry(self, array: Array) -> dict[str, Any]:
        self._put(bytes(-self.nbytes % _ALIGNMENT))
        at, data = self.nbytes, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._put(data)
        crc = zlib.crc32(data)
        return {"dtype": array.dtype.str, "shape": list(array.shape), "at": at, "crc32": crc}

    def _put(self, data: bytes | memoryview) -> None:
        if self.nbytes + len(data) > self._most_bytes:
            raise OSError(f"more than {self._most_bytes / 2**20:.0f} MiB")
        self._stream.write(data)
        self.nbytes += len(data)

    def _give_up(self, error: OSError) -> None:
        log.warning("the model's forms are not kept: %s", error)
        self._failed = True
        with contextlib.suppress(OSError, AttributeError):
            self._stream.close()
        with contextlib.suppress(OSError):
            self._partial.unlink()


def prune(folder: Path, most_bytes: int, *, keep: Path) -> None:
    """Removes the files that were not used for longest until all take `most_bytes` at most, and
    what writers that died left behind. `keep` stays."""
    os.utime(folder)
    now = folder.stat().st_mtime
    for partial in folder.glob(f"*{_PARTIAL}"):
        if now - partial.stat().st_mtime > _ABANDONED_AFTER_S:
            partial.unlink(missing_ok=True)
    files = [(file.stat(), file) for file in folder.glob(f"*{_SUFFIX}")]
    held = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if held > most_bytes and file != keep:
            file.unlink(missing_ok=True)
            held -= stat.st_size
