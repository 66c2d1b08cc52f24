"""Where adapters' files lie, addressed by (tenant salt, digest): what any store promises.

A version appears and disappears at once, so a reader sees a whole adapter or none. Names are hex
digests alone, so no name leads outside the store. Torch-free, synchronous; `folder_store` and
`s3_store` keep the promises.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from engine.errors import AdapterMissing, EngineError
from engine.types import AdapterRef

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
HASH_CHUNK_BYTES = 1024 * 1024
_NAME = re.compile(r"[0-9a-f]{16,64}", re.ASCII)
_UPLOAD = re.compile(r"[0-9a-z_]{1,64}", re.ASCII)
_PART = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    ref: AdapterRef
    config_bytes: int
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """An adapter as a reader gets it: the config whole, the weights by path."""

    config: bytes
    weights_path: Path


class Staging(Protocol):
    """One adapter being written; hashes as it goes. Leaving the `with` block aborts it unless
    it was committed. `prepare` does the slow part of a commit ahead of it, once all is written."""

    def __enter__(self) -> "Staging": ...
    def __exit__(self, *exception: object) -> None: ...
    @property
    def digest(self) -> str: ...
    def write_config(self, data: bytes) -> None: ...
    def write_weights(self, chunk: bytes) -> None: ...
    def prepare(self) -> None: ...
    def commit(self, salt: str) -> StoredAdapter: ...
    def abort(self) -> None: ...


class PartWriter(Protocol):
    """One part of an upload being written. `finish` keeps it and returns the name to read it by;
    `abort` after it does nothing."""

    def write(self, chunk: bytes) -> None: ...
    def finish(self) -> str: ...
    def abort(self) -> None: ...


class AdapterStore(Protocol):
    """What the api, the worker and the engine need of a store; the folder is one, S3 another.

    Whoever opened files releases them: they may be a local copy. Raises StoreUnavailable.
    """

    def stage(self) -> Staging: ...
    def open(self, ref: AdapterRef) -> StoredFiles: ...
    def open_checked(self, ref: AdapterRef) -> StoredFiles: ...
    def release(self, files: StoredFiles) -> None: ...
    def verify(self, ref: AdapterRef) -> None: ...
    def delete(self, ref: AdapterRef) -> bool: ...
    def refs(self) -> Iterator[AdapterRef]: ...
    def list_staging_older_than(self, age_s: float) -> list[str]: ...
    def sweep(self, age_s: float) -> int: ...
    def new_part(self, upload: str) -> PartWriter: ...
    def read_part(self, upload: str, part: str) -> Iterator[bytes]: ...
    def drop_part(self, upload: str, part: str) -> None: ...
    def drop_parts(self, upload: str) -> None: ...
    def uploads_with_parts(self) -> list[str]: ...


def adapter_digest(config_sha256: bytes, weights_sha256: bytes) -> str:
    """The identity of an adapter, from the sha256 digests (32 bytes each) of its two files."""
    return hashlib.sha256(b"loramux-adapter-v1\0" + config_sha256 + weights_sha256).hexdigest()


def open_store(url: str) -> AdapterStore:
    """The store at `url`: file:///path, or s3://bucket/prefix?endpoint=…&region=….

    Raises EngineError with code unsupported_store.
    """
    if urlsplit(url).scheme == "s3":
        try:
            from engine.adapters.s3_store import S3Store
        except ImportError as error:
            raise unsupported(
                "an adapter store at s3:// needs boto3: pip install 'loramux[s3]'"
            ) from error
        return S3Store.at(url)
    from engine.adapters.folder_store import FolderStore

    return FolderStore(folder_of(url))


def folder_of(url: str) -> Path:
    """The path of file:///path. Raises EngineError with code unsupported_store."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.startswith("/"):
        raise unsupported(
            f"the adapter store {url!r} is neither file:///an/absolute/path nor s3://bucket/prefix"
        )
    return Path(path)


def unsupported(message: str) -> EngineError:
    return EngineError(message, code="unsupported_store")


def is_name(text: str) -> bool:
    """Whether it can be a salt or a digest."""
    return _NAME.fullmatch(text) is not None


def is_upload(text: str) -> bool:
    """Whether it can be the id of an upload."""
    return _UPLOAD.fullmatch(text) is not None


def check_names(ref: AdapterRef) -> None:
    """Raises AdapterMissing for anything but hex names, before anything is touched."""
    if not (is_name(ref.salt) and is_name(ref.digest)):
        raise AdapterMissing("no adapter is stored under this name")


def check_upload(upload: str) -> None:
    if not is_upload(upload):
        raise AdapterMissing("no upload is stored under this name")


def check_part(part: str) -> None:
    if not _PART.fullmatch(part):
        raise AdapterMissing("no part is stored under this name")
