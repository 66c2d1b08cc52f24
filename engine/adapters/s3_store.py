"""An AdapterStore on S3-compatible object storage, for platforms of more than one machine.

    s3://bucket/prefix?endpoint=https://host:port&region=name
    prefix/<salt>/<digest>/<random>   the config; its own name is the name of its weights
    prefix/weights/<random>           weights, or what a crash left behind
    prefix/parts/<upload>/<random>    pieces of uploads that are not complete

A version appears with the one small object that names its weights and disappears with it, so a
reader sees a whole adapter or none. Readers get local copies, hashed while they arrive, in folders
of their own below TMPDIR, which `release` removes: nothing of an erased adapter stays on a host.

Credentials come from the AWS_* variables or files, as boto3 finds them, and never from the URL.
Calls are bounded: each is tried three times, with a few seconds to connect and half a minute to
wait for bytes. boto3 is imported here alone, and this file only where a store is s3://.
"""

import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl, urlsplit

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

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
    unsupported,
)
from engine.clock import Clock, SystemClock
from engine.errors import AdapterCorrupt, AdapterMissing, AdapterRefused, StoreUnavailable
from engine.types import AdapterRef

MIB = 1 << 20
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
ATTEMPTS = 3
TRANSFER = TransferConfig(
    multipart_threshold=64 * MIB, multipart_chunksize=16 * MIB, max_concurrency=4
)
MAX_CONFIG_BYTES = MIB
COPY_PREFIX = "loramux-adapter-"
MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_RANDOM = re.compile(r"[0-9a-f]{32}", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


@dataclass(frozen=True, slots=True)
class S3Address:
    """A store URL taken apart; `prefix` is empty or ends with a slash."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None


def parse_address(url: str) -> S3Address:
    """Raises EngineError with code unsupported_store, which says what is wrong."""
    parts = urlsplit(url)
    try:
        query = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
    except ValueError as error:
        raise unsupported(f"the adapter store {url!r} has an unreadable query") from error
    if "@" in parts.netloc:
        raise unsupported("the adapter store's URL holds credentials; put them in AWS_* variables")
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise unsupported(f"the adapter store {url!r} is not s3://bucket/prefix")
    unknown = query.keys() - {"endpoint", "region"}
    if unknown:
        raise unsupported(
            f"the adapter store's URL has {sorted(unknown)[0]!r}; it takes endpoint and region"
        )
    endpoint = query.get("endpoint")
    if endpoint is not None:
        host = urlsplit(endpoint)
        if host.scheme not in ("http", "https") or not host.hostname or host.username:
            raise unsupported("the adapter store's endpoint must be like https://host:port")
    prefix = parts.path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise unsupported(f"the adapter store's prefix {prefix!r} is not a plain path")
    return S3Address(parts.netloc, f"{prefix}/" if prefix else "", endpoint, query.get("region"))


@lru_cache(maxsize=4)
def _client(endpoint: str | None, region: str | None) -> Any:
    """One client a process: making one reads megabytes of models. Its use is thread-safe."""
    named = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=16,
        # The store hashes what it reads; some compatible servers refuse the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    return boto3.session.Session().client(
        "s3", endpoint_url=endpoint, region_name=named or "us-east-1", config=config
    )


@contextmanager
def _calls(what: str) -> Iterator[None]:
    """Turns the library's errors into ours; their text may hold addresses, so it stays here."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in MISSING:
            raise AdapterMissing(f"{what} is not in the store") from error
        raise StoreUnavailable(
            f"the adapter store refused ({code or 'no code'}): {what}"
        ) from error
    except (BotoCoreError, Boto3Error) as error:
        name = type(error).__name__
        raise StoreUnavailable(f"the adapter store does not answer ({name}): {what}") from error


class S3Store:
    """An AdapterStore in a bucket. Synchronous; may be used from several threads."""

    def __init__(self, address: S3Address, clock: Clock | None = None) -> None:
        self.address = address
        self._clock = clock or SystemClock()

    @classmethod
    def at(cls, url: str) -> "S3Store":
        return cls(parse_address(url))

    @property
    def client(self) -> Any:
        return _client(self.address.endpoint, self.address.region)

    # ------------------------------------------------------------------ adapters

    def stage(self) -> "S3Staging":
        """A new adapter to be written."""
        return S3Staging(self)

    def open(self, ref: AdapterRef) -> StoredFiles:
        """A local copy of `ref`, its sha256 checked. Raises AdapterMissing, AdapterCorrupt."""
        check_names(ref)
        folder = Path(tempfile.mkdtemp(prefix=COPY_PREFIX))
        try:
            config = self._copy(ref, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StoredFiles(config, folder / WEIGHTS_NAME)

    def open_checked(self, ref: AdapterRef) -> StoredFiles:
        return self.open(ref)

    def release(self, files: StoredFiles) -> None:
        """Removes a local copy."""
        shutil.rmtree(files.weights_path.parent, ignore_errors=True)

    def verify(self, ref: AdapterRef) -> None:
        """Hashes the stored bytes again. Raises AdapterMissing or AdapterCorrupt."""
        self.release(self.open(ref))

    def delete(self, ref: AdapterRef) -> bool:
        """Erases `ref`; False when it was not there. What names the weights goes first."""
        check_names(ref)
        names = self._names(ref)
        for name in names:
            self.delete_object(f"{self._folder(ref)}{name}")
            self.delete_object(self.weights_key(name))
        return bool(names)

    def refs(self) -> Iterator[AdapterRef]:
        """Every adapter that is stored, for reconciliation with the database."""
        seen = None
        for ref, _ in self._named():
            if ref != seen:
                seen = ref
                yield ref

    def list_staging_older_than(self, age_s: float) -> list[str]:
        """Weights that nothing names, older than `age_s` seconds."""
        now_s = self._clock.wall_ms() / 1000
        old = [
            key.rpartition("/")[2]
            for key, modified_s in self._keys("weights/")
            if now_s - modified_s >= age_s
        ]
        if not old:
            return []
        named = {name for _, name in self._named()}
        return sorted(name for name in old if name not in named)

    def sweep(self, age_s: float) -> int:
        """Removes those, sendings that were broken off, and this host's forgotten copies."""
        leftovers = self.list_staging_older_than(age_s)
        for name in leftovers:
            self.delete_object(self.weights_key(name))
        return len(leftovers) + self._end_broken_sendings(age_s) + self._remove_old_copies(age_s)

    # ------------------------------------------------------------------ parts of uploads

    def new_part(self, upload: str) -> "S3Part":
        """A new part of that upload; every process that opens this store can read it."""
        check_upload(upload)
        return S3Part(self, upload)

    def read_part(self, upload: str, part: str) -> Iterator[bytes]:
        """Its bytes in chunks. Raises AdapterMissing, at the first chunk, when it is not there."""
        key = self.part_key(upload, part)
        with _calls("this part of the upload"):
            body = self.client.get_object(Bucket=self.address.bucket, Key=key)["Body"]
            yield from body.iter_chunks(HASH_CHUNK_BYTES)

    def drop_part(self, upload: str, part: str) -> None:
        """Removes one part, if it is there."""
        self.delete_object(self.part_key(upload, part))

    def drop_parts(self, upload: str) -> None:
        """Removes all parts of an upload."""
        check_upload(upload)
        for key, _ in self._keys(f"parts/{upload}/"):
            self.delete_object(self.address.prefix + key)

    def uploads_with_parts(self) -> list[str]:
        """The uploads that parts lie here for."""
        return sorted({key.split("/")[1] for key, _ in self._keys("parts/")})

    # ------------------------------------------------------------------ objects

    def weights_key(self, name: str) -> str:
        return f"{self.address.prefix}weights/{name}"

    def part_key(self, upload: str, part: str) -> str:
        check_upload(upload)
        check_part(part)
        return f"{self.address.prefix}parts/{upload}/{part}"

    def send(self, file: IO[bytes], key: str) -> None:
        """Uploads a file from its beginning."""
        file.seek(0)
        with _calls("an upload"):
            self.client.upload_fileobj(file, self.address.bucket, key, Config=TRANSFER)

    def delete_object(self, key: str) -> None:
        with _calls("an erasure"):
            self.client.delete_object(Bucket=self.address.bucket, Key=key)

    def name(self, ref: AdapterRef, name: str, config: bytes) -> None:
        """Makes weights visible as `ref`, in one step."""
        key = f"{self._folder(ref)}{name}"
        with _calls("an upload"):
            self.client.put_object(Bucket=self.address.bucket, Key=key, Body=config)

    def holds(self, ref: AdapterRef, weights_bytes: int) -> bool:
        """Whether `ref` is there with weights of that size."""
        return any(self._size(self.weights_key(name)) == weights_bytes for name in self._names(ref))

    def _size(self, key: str) -> int | None:
        try:
            with _calls("an adapter's weights"):
                found = self.client.head_object(Bucket=self.address.bucket, Key=key)
        except AdapterMissing:
            return None
        return int(found["ContentLength"])

    def _copy(self, ref: AdapterRef, folder: Path) -> bytes:
        """Downloads both files into the folder; the config's bytes."""
        missing = AdapterMissing(f"no adapter {ref.digest[:16]} is stored for this tenant")
        names = self._names(ref)
        if not names:
            raise missing
        config = b"".join(self._chunks(f"{self._folder(ref)}{names[0]}", MAX_CONFIG_BYTES))
        _write(folder / CONFIG_NAME, iter((config,)))
        weights = _write(folder / WEIGHTS_NAME, self._chunks(self.weights_key(names[0])))
        found = adapter_digest(hashlib.sha256(config).digest(), weights)
        if found != ref.digest:
            raise AdapterCorrupt(f"the stored files of {ref.digest[:16]} hash to {found[:16]}")
        return config

    def _chunks(self, key: str, most: int | None = None) -> Iterator[bytes]:
        with _calls("this adapter"):
            body = self.client.get_object(Bucket=self.address.bucket, Key=key)["Body"]
            taken = 0
            for chunk in body.iter_chunks(HASH_CHUNK_BYTES):
                taken += len(chunk)
                if most is not None and taken > most:
                    raise AdapterCorrupt("a stored config is larger than any that was taken")
                yield chunk

    def _folder(self, ref: AdapterRef) -> str:
        return f"{self.address.prefix}{ref.salt}/{ref.digest}/"

    def _names(self, ref: AdapterRef) -> list[str]:
        """The names of the weights that `ref` has: one, but for a repair that was broken off."""
        return [key.rpartition("/")[2] for key, _ in self._keys(f"{ref.salt}/{ref.digest}/")]

    def _named(self) -> Iterator[tuple[AdapterRef, str]]:
        """Every adapter with the name of its weights."""
        for key, _ in self._keys(""):
            parts = key.split("/")
            if len(parts) != 3 or not _RANDOM.fullmatch(parts[2]):
                continue
            ref = AdapterRef(parts[0], parts[1])
            try:
                check_names(ref)
            except AdapterMissing:
                continue  # parts/…
            yield ref, parts[2]

    def _keys(self, below: str) -> Iterator[tuple[str, float]]:
        """(key without the prefix, when it was written in Unix seconds) of all objects below."""
        prefix = self.address.prefix
        with _calls("a list"):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=prefix + below
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"].removeprefix(prefix), entry["LastModified"].timestamp()

    def _end_broken_sendings(self, age_s: float) -> int:
        """Multipart sendings whose process died hold bytes that no list shows."""
        now_s, ended = self._clock.wall_ms() / 1000, 0
        bucket = self.address.bucket
        with _calls("a list"):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=self.address.prefix
            )
            for page in pages:
                for entry in page.get("Uploads", ()):
                    if now_s - entry["Initiated"].timestamp() >= age_s:
                        self.client.abort_multipart_upload(
                            Bucket=bucket, Key=entry["Key"], UploadId=entry["UploadId"]
                        )
                        ended += 1
        return ended

    def _remove_old_copies(self, age_s: float) -> int:
        now_s, removed = self._clock.wall_ms() / 1000, 0
        for folder in Path(tempfile.gettempdir()).glob(f"{COPY_PREFIX}*"):
            try:
                found = folder.lstat()
            except FileNotFoundError:
                continue
            if found.st_uid == os.getuid() and now_s - found.st_mtime >= age_s:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed


class S3Staging:
    """Writes one adapter to an unnamed local file while hashing it, then sends it."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._name = secrets.token_hex(16)
        self._config = bytearray()
        self._weights = tempfile.TemporaryFile()  # noqa: SIM115 - closed by abort
        self._weights_bytes = 0
        self._hashes: Mapping[str, Any] = {
            name: hashlib.sha256() for name in (CONFIG_NAME, WEIGHTS_NAME)
        }
        self._sent = False
        self._committed = False

    def __enter__(self) -> "S3Staging":
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    @property
    def digest(self) -> str:
        """The identity of what has been written so far."""
        return adapter_digest(*(h.digest() for h in self._hashes.values()))

    def write_config(self, data: bytes) -> None:
        """Appends to adapter_config.json."""
        self._require_open()
        self._config += data
        self._hashes[CONFIG_NAME].update(data)

    def write_weights(self, chunk: bytes) -> None:
        """Appends to adapter_model.safetensors."""
        self._require_open()
        self._weights.write(chunk)
        self._weights_bytes += len(chunk)
        self._hashes[WEIGHTS_NAME].update(chunk)

    def prepare(self) -> None:
        """Sends the weights ahead, under a name that nobody knows yet."""
        self._require_open()
        if not self._config or not self._weights_bytes:
            missing = WEIGHTS_NAME if self._config else CONFIG_NAME
            raise AdapterRefused(f"{missing} is missing or empty", code="missing_file")
        self._store.send(self._weights, self._store.weights_key(self._name))
        self._sent = True
        self._weights.close()

    def commit(self, salt: str) -> StoredAdapter:
        """Makes the adapter visible. The same bytes twice are stored once.

        Raises AdapterRefused when one of the two files was never written.
        """
        ref = AdapterRef(salt, self.digest)
        check_names(ref)
        if not self._sent:
            self.prepare()
        stored = StoredAdapter(ref, len(self._config), self._weights_bytes)
        if self._store.holds(ref, self._weights_bytes):
            self.abort()
            return stored
        self._store.delete(ref)  # what is left there lacks its weights
        self._store.name(ref, self._name, bytes(self._config))
        self._committed = True
        return stored

    def abort(self) -> None:
        """Removes what was sent; nothing happens after a commit."""
        self._weights.close()
        if self._sent and not self._committed:
            self._sent = False
            self._store.delete_object(self._store.weights_key(self._name))

    def _require_open(self) -> None:
        if self._sent or self._committed or self._weights.closed:
            raise ValueError("the staging is closed")


class S3Part:
    """Gathers one part in an unnamed local file, then sends it."""

    def __init__(self, store: S3Store, upload: str) -> None:
        self._store = store
        self._upload = upload
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by finish or abort

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)

    def finish(self) -> str:
        name = secrets.token_hex(16)
        self._store.send(self._file, self._store.part_key(self._upload, name))
        self._file.close()
        return name

    def abort(self) -> None:
        self._file.close()


def _write(path: Path, chunks: Iterator[bytes]) -> bytes:
    """Writes a file 0600; its sha256."""
    hashed = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in chunks:
            hashed.update(chunk)
            file.write(chunk)
    return hashed.digest()
