"""An AdapterStore in a local folder: files 0600, folders 0700.

    root/<salt>/<digest>/adapter_config.json, adapter_model.safetensors
    root/.staging/<random>/          what is being written, or what a crash left behind
    root/.parts/<upload>/<random>    pieces of uploads that are not complete

A version appears and disappears by one rename, after its bytes are on disk, so a crash at any
moment leaves only staging leftovers for `sweep`. No link is followed.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.adapters.store import (
    CONFIG_NAME,
    HASH_CHUNK_BYTES,
    WEIGHTS_NAME,
    StoredAdapter,
    StoredFiles,
    adapter_digest,
    check_names,
    check_part,
    check_upload,
    is_name,
    is_upload,
)
from engine.clock import Clock, SystemClock
from engine.errors import AdapterCorrupt, AdapterMissing, AdapterRefused
from engine.types import AdapterRef

STAGING = ".staging"
PARTS = ".parts"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderStore:
    """One folder of this machine, each version a folder in it."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self.root = root.absolute()
        self._clock = clock or SystemClock()
        self._staging = self.root / STAGING
        self._parts = self.root / PARTS
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._staging.mkdir(mode=0o700, exist_ok=True)

    def stage(self) -> "FolderStaging":
        """A new adapter to be written."""
        return FolderStaging(self)

    def open(self, ref: AdapterRef) -> StoredFiles:
        """The files of `ref`. Raises AdapterMissing."""
        folder = self._folder(ref)
        try:
            config = _open_file(folder, CONFIG_NAME)
            with os.fdopen(config, "rb") as file:
                data = file.read()
            os.close(_open_file(folder, WEIGHTS_NAME))
        finally:
            os.close(folder)
        return StoredFiles(data, self._path(ref) / WEIGHTS_NAME)

    def open_checked(self, ref: AdapterRef) -> StoredFiles:
        """`verify`, then `open`."""
        self.verify(ref)
        return self.open(ref)

    def release(self, files: StoredFiles) -> None:
        """Nothing: these are the stored files themselves."""

    def verify(self, ref: AdapterRef) -> None:
        """Hashes the stored bytes again. Raises AdapterMissing or AdapterCorrupt."""
        folder = self._folder(ref)
        try:
            digests = [_sha256(_open_file(folder, name)) for name in (CONFIG_NAME, WEIGHTS_NAME)]
        finally:
            os.close(folder)
        found = adapter_digest(*digests)
        if found != ref.digest:
            raise AdapterCorrupt(f"the stored files of {ref.digest[:16]} hash to {found[:16]}")

    def delete(self, ref: AdapterRef) -> bool:
        """Erases `ref`; False when it was not there. Crash-safe: gone from sight at once."""
        path = self._path(ref)
        trash = self._staging / f"trash-{secrets.token_hex(16)}"
        try:
            path.rename(trash)
        except (FileNotFoundError, NotADirectoryError):
            return False
        _fsync_folder(path.parent)
        _remove(trash)
        _remove_if_empty(path.parent)
        return True

    def refs(self) -> Iterator[AdapterRef]:
        """Every adapter that is stored, for reconciliation with the database."""
        for salt in sorted(os.listdir(self.root)):
            if not is_name(salt) or not _is_folder(self.root / salt):
                continue
            for digest in sorted(os.listdir(self.root / salt)):
                if is_name(digest) and _is_folder(self.root / salt / digest):
                    yield AdapterRef(salt, digest)

    def list_staging_older_than(self, age_s: float) -> list[str]:
        """Leftovers that nobody has written to for `age_s` seconds."""
        now_ms = self._clock.wall_ms()
        return [
            name
            for name in sorted(os.listdir(self._staging))
            if (touched_ms := _last_touched_ms(self._staging / name)) is not None
            and now_ms - touched_ms >= age_s * 1000
        ]

    def sweep(self, age_s: float) -> int:
        """Removes those leftovers; how many there were."""
        leftovers = self.list_staging_older_than(age_s)
        for name in leftovers:
            _remove(self._staging / name)
        return len(leftovers)

    # ------------------------------------------------------------------ parts of uploads

    def new_part(self, upload: str) -> "FolderPart":
        """A new part of that upload; every process that opens this store can read it."""
        folder = self._upload_folder(upload)
        self._parts.mkdir(mode=0o700, exist_ok=True)
        return FolderPart(folder)

    def read_part(self, upload: str, part: str) -> Iterator[bytes]:
        """Its bytes in chunks. Raises AdapterMissing, at the first chunk, when it is not there."""
        path = self._part_path(upload, part)
        try:
            descriptor = os.open(path, _FILE_FLAGS)
        except OSError as error:
            raise AdapterMissing("this part of the upload is not stored") from error
        with os.fdopen(descriptor, "rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                yield chunk

    def drop_part(self, upload: str, part: str) -> None:
        """Removes one part, if it is there."""
        self._part_path(upload, part).unlink(missing_ok=True)

    def drop_parts(self, upload: str) -> None:
        """Removes all parts of an upload."""
        _remove(self._upload_folder(upload))

    def uploads_with_parts(self) -> list[str]:
        """The uploads that parts lie here for."""
        names = os.listdir(self._parts) if _is_folder(self._parts) else []
        return sorted(name for name in names if is_upload(name))

    def _upload_folder(self, upload: str) -> Path:
        check_upload(upload)
        return self._parts / upload

    def _part_path(self, upload: str, part: str) -> Path:
        check_part(part)
        return self._upload_folder(upload) / part

    # ------------------------------------------------------------------ names to paths

    def _path(self, ref: AdapterRef) -> Path:
        check_names(ref)
        return self.root / ref.salt / ref.digest

    def _folder(self, ref: AdapterRef) -> int:
        """A descriptor of the adapter's folder, reached without following a link."""
        self._path(ref)
        missing = AdapterMissing(f"no adapter {ref.digest[:16]} is stored for this tenant")
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            salt = os.open(ref.salt, _FOLDER_FLAGS, dir_fd=root)
        except OSError as error:
            raise missing from error
        finally:
            os.close(root)
        try:
            return os.open(ref.digest, _FOLDER_FLAGS, dir_fd=salt)
        except OSError as error:
            raise missing from error
        finally:
            os.close(salt)


class FolderStaging:
    """Writes one adapter into a staging folder, then moves it into place."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store
        self.path = store.root / STAGING / secrets.token_hex(16)
        self.path.mkdir(mode=0o700)
        self._hashes = {name: hashlib.sha256() for name in (CONFIG_NAME, WEIGHTS_NAME)}
        self._files = {
            name: os.open(
                self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            for name in self._hashes
        }
        self._sizes = dict.fromkeys(self._hashes, 0)
        self._open = True

    def __enter__(self) -> "FolderStaging":
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    @property
    def digest(self) -> str:
        """The identity of what has been written so far."""
        return adapter_digest(*(self._hashes[n].digest() for n in (CONFIG_NAME, WEIGHTS_NAME)))

    def write_config(self, data: bytes) -> None:
        """Appends to adapter_config.json."""
        self._write(CONFIG_NAME, data)

    def write_weights(self, chunk: bytes) -> None:
        """Appends to adapter_model.safetensors."""
        self._write(WEIGHTS_NAME, chunk)

    def prepare(self) -> None:
        """Brings the bytes to the disk."""
        if not self._open:
            raise ValueError("the staging is closed")
        for descriptor in self._files.values():
            os.fsync(descriptor)

    def commit(self, salt: str) -> StoredAdapter:
        """Makes the adapter durable and visible. The same bytes twice are stored once.

        Raises AdapterRefused when one of the two files was never written.
        """
        for name, size in self._sizes.items():
            if size == 0:
                raise AdapterRefused(f"{name} is missing or empty", code="missing_file")
        digest = adapter_digest(*(h.digest() for h in self._hashes.values()))
        ref = AdapterRef(salt, digest)
        target = self._store._path(ref)
        self.prepare()
        self._close()
        _fsync_folder(self.path)
        self._move(ref, target)
        return StoredAdapter(ref, self._sizes[CONFIG_NAME], self._sizes[WEIGHTS_NAME])

    def abort(self) -> None:
        """Removes what was staged; nothing happens after a commit."""
        self._close()
        _remove(self.path)

    def _write(self, name: str, data: bytes) -> None:
        if not self._open:
            raise ValueError("the staging is closed")
        view = memoryview(data)
        self._hashes[name].update(view)
        self._sizes[name] += len(view)
        while view:
            view = view[os.write(self._files[name], view) :]

    def _close(self) -> None:
        if self._open:
            self._open = False
            for descriptor in self._files.values():
                os.close(descriptor)

    def _move(self, ref: AdapterRef, target: Path) -> None:
        while True:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            _fsync_folder(self._store.root)
            try:
                self.path.rename(target)
            except FileNotFoundError:
                continue  # a delete removed the empty tenant folder in between
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if self._stored_already(ref):
                    _remove(self.path)
                    return
                self._store.delete(ref)  # what lies there is damaged: put the good bytes in place
                continue
            _fsync_folder(target.parent)
            return

    def _stored_already(self, ref: AdapterRef) -> bool:
        try:
            self._store.verify(ref)
        except (AdapterCorrupt, AdapterMissing):
            return False
        return True


class FolderPart:
    """Writes one part beside its place and renames it once its bytes are on disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._name = secrets.token_hex(16)
        self._folder = folder
        self._path = folder / f"{self._name}.writing"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file: int | None = os.open(self._path, flags, 0o600)

    def write(self, chunk: bytes) -> None:
        if self._file is None:
            raise ValueError("the part is closed")
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._file, view) :]

    def finish(self) -> str:
        """Raises AdapterMissing when the upload was dropped meanwhile."""
        if self._file is None:
            raise ValueError("the part is closed")
        os.fsync(self._file)
        self._close()
        try:
            self._path.rename(self._folder / self._name)
            _fsync_folder(self._folder)
        except FileNotFoundError as error:
            raise AdapterMissing("the upload of this part was dropped") from error
        return self._name

    def abort(self) -> None:
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open_file(folder: int, name: str) -> int:
    try:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except OSError as error:
        raise AdapterMissing(f"the stored adapter lacks {name}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterMissing(f"the stored {name} is not a file")
    return descriptor


def _sha256(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").digest()


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _last_touched_ms(path: Path) -> int | None:
    """The newest change of a staging folder or of a file in it; None when it is gone.

    Rounded down like the clock, or what was just written would lie in the future.
    """
    try:
        times_ns = [path.lstat().st_mtime_ns]
        if _is_folder(path):
            times_ns += [(path / name).lstat().st_mtime_ns for name in os.listdir(path)]
    except FileNotFoundError:
        return None
    return max(times_ns) // 1_000_000


def _remove(path: Path) -> None:
    """Removes a staging entry, whatever it is; a link is removed, not followed."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
