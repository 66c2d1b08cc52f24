"""Root secret, purpose keys, keyed hashes, passwords.

One root secret (versions of it while a rotation drains) gives every purpose a key of its own by
HKDF-SHA256 (RFC 5869). What is stored is HMAC-SHA256 under the purpose key, with the version
beside it, so an old version stays valid until nothing refers to it.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Purpose = Literal[
    "api-key", "session", "invitation", "password-reset", "sign-in", "idempotency", "webhook"
]
MIN_SECRET_CHARACTERS = 32


class SecretError(Exception):
    """The root secret is missing, weak, or readable by others; the message says what to do."""


@dataclass(frozen=True, slots=True)
class RootSecret:
    """Versions of the root secret; the highest one signs, all of them verify."""

    versions: dict[int, bytes]

    @property
    def current(self) -> int:
        return max(self.versions)


class SecretSource(Protocol):
    def read(self) -> RootSecret: ...


def parse_root_secret(text: str) -> RootSecret:
    """`secret`, or `2:new,1:old`. Raises ValueError with a sentence; never quotes the secret."""
    versions: dict[int, bytes] = {}
    parts = text.split(",")
    for part in parts:
        number, separator, secret = part.strip().partition(":")
        if not separator:
            number, secret = "1", part.strip()
        if not number.isdigit() or int(number) < 1 or int(number) in versions:
            raise ValueError("LORAMUX_ROOT_SECRET must be a secret, or `2:new,1:old`")
        if len(secret) < MIN_SECRET_CHARACTERS or len(set(secret)) < 8:
            raise ValueError(
                f"LORAMUX_ROOT_SECRET is too weak: give at least {MIN_SECRET_CHARACTERS} random "
                "characters (`openssl rand -hex 32`)"
            )
        versions[int(number)] = secret.encode()
    return RootSecret(versions)


class TextSource:
    """The root secret from the environment."""

    def __init__(self, text: str) -> None:
        self._root = parse_root_secret(text)

    def read(self) -> RootSecret:
        return self._root


class FileSource:
    """The root secret in a file of mode 0600: {"versions": {"1": "hex…"}}."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> RootSecret:
        """Raises SecretError when the file is absent, malformed, or others may read it."""
        try:
            mode = self.path.stat().st_mode
            text = self.path.read_text()
        except FileNotFoundError:
            raise SecretError(f"there is no root secret at {self.path}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise SecretError(
                f"{self.path} can be read by other users; run `chmod 600 {self.path}`"
            )
        try:
            versions = {int(n): bytes.fromhex(s) for n, s in json.loads(text)["versions"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SecretError(f"{self.path} is not a root secret; restore it from a copy") from None
        if not versions or any(len(secret) < 32 for secret in versions.values()):
            raise SecretError(f"{self.path} holds no usable root secret; restore it from a copy")
        return RootSecret(versions)

    def create(self) -> None:
        """Writes a new secret unless there is one; safe when several processes start at once."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._draft(RootSecret({1: secrets.token_bytes(32)}))
        try:
            os.link(draft, self.path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()

    def changed_at(self) -> datetime:
        """When the file was last written, by its time stamp."""
        return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)

    def rotate(self) -> int:
        """Adds a version, which signs from now on; the old ones stay. Returns its number."""
        root = self.read()
        number = root.current + 1
        self._replace(RootSecret({**root.versions, number: secrets.token_bytes(32)}))
        return number

    def drop(self, version: int) -> None:
        """Removes a drained version. Raises SecretError for the current or an unknown one."""
        root = self.read()
        if version == root.current or version not in root.versions:
            raise SecretError(f"version {version} is the current one or does not exist")
        self._replace(RootSecret({n: s for n, s in root.versions.items() if n != version}))

    def _replace(self, root: RootSecret) -> None:
        self._draft(root).replace(self.path)

    def _draft(self, root: RootSecret) -> Path:
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"versions": {str(n): s.hex() for n, s in root.versions.items()}}, file)
            file.flush()
            os.fsync(file.fileno())
        return draft


@dataclass(frozen=True, slots=True)
class KeyedHash:
    """What is stored: the digest in hex, and the version of the root secret that made it."""

    digest: str
    version: int


class Secrets:
    """Purpose keys and what is done with them. Reads the source again for an unknown version."""

    def __init__(self, source: SecretSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._root = source.read()
        self._keys: dict[tuple[str, int], bytes] = {}

    @classmethod
    def open(cls, *, root_secret: str | None, path: Path) -> "Secrets":
        """From the environment's secret when there is one, else from the file (made if absent)."""
        if root_secret is not None:
            return cls(TextSource(root_secret))
        source = FileSource(path)
        source.create()
        return cls(source)

    @property
    def current_version(self) -> int:
        return self._root.current

    @property
    def versions(self) -> list[int]:
        return sorted(self._root.versions, reverse=True)

    def reload(self) -> None:
        """Reads the source again, after a rotation by another process."""
        with self._lock:
            self._root = self._source.read()
            self._keys.clear()

    def purpose_key(self, purpose: Purpose, version: int | None = None) -> bytes:
        """32 bytes that only this purpose and version have. Raises SecretError if unknown."""
        number = self._root.current if version is None else version
        if number not in self._root.versions:
            self.reload()
        with self._lock:
            key = self._keys.get((purpose, number))
            if key is None:
                root = self._root.versions.get(number)
                if root is None:
                    raise SecretError(
                        f"version {number} of the root secret is gone, but a stored hash needs it"
                    )
                info = f"loramux {purpose} v{number}".encode()
                key = HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(root)
                self._keys[(purpose, number)] = key
        return key

    def hash(self, purpose: Purpose, value: str, version: int | None = None) -> KeyedHash:
        """The keyed hash of a secret value, under the current version unless one is named."""
        number = self._root.current if version is None else version
        key = self.purpose_key(purpose, number)
        return KeyedHash(hmac.new(key, value.encode(), hashlib.sha256).hexdigest(), number)

    def hashes(self, purpose: Purpose, value: str) -> list[str]:
        """The digests under every version, for a look-up by hash."""
        return [self.hash(purpose, value, version).digest for version in self.versions]

    def matches(self, purpose: Purpose, value: str, stored: KeyedHash) -> bool:
        """Whether the value is the stored one; takes the same time for any two values."""
        try:
            candidate = self.hash(purpose, value, stored.version)
        except SecretError:
            return False
        return hmac.compare_digest(candidate.digest, stored.digest)

    def seal(self, purpose: Purpose, plain: bytes) -> bytes:
        """Encrypts what must be readable again (AES-256-GCM); the version leads the result."""
        version = self.current_version
        nonce = secrets.token_bytes(12)
        cipher = AESGCM(self.purpose_key(purpose, version)).encrypt(nonce, plain, None)
        return version.to_bytes(4, "big") + nonce + cipher

    def open_sealed(self, purpose: Purpose, sealed: bytes) -> bytes:
        """The plain bytes. Raises cryptography's InvalidTag when they were tampered with."""
        version = int.from_bytes(sealed[:4], "big")
        return AESGCM(self.purpose_key(purpose, version)).decrypt(sealed[4:16], sealed[16:], None)


class Passwords:
    """argon2id with the library's defaults (RFC 9106, low-memory profile)."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()

    @cached_property
    def _nobody(self) -> str:
        """A hash that no password has, for accounts that do not exist."""
        return self._hasher.hash(secrets.token_urlsafe(16))

    def hash(self, password: str) -> str:
        return self._hasher.hash(password)

    def matches(self, password: str, stored: str | None) -> bool:
        """False for a wrong password; an absent hash takes as long as a present one."""
        try:
            verified = self._hasher.verify(stored or self._nobody, password)
        except (VerificationError, InvalidHashError):
            return False
        return verified and stored is not None

    def outdated(self, stored: str) -> bool:
        """Whether the hash was made with weaker parameters than today's."""
        return self._hasher.check_needs_rehash(stored)
