"""CURVE keys for engines that listen on TCP: who may connect, and to whom.

A folder (0700) holds `engine.key` and `client.key` (0600, a public and a secret line) and
`clients.allowed`, the public keys that the engine admits, one a line, `#` for comments.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine.errors import EngineError

_KEY_CHARACTERS = 40  # 32 bytes as Z85
_Z85 = frozenset(
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


class CurveKeyError(EngineError):
    """A key file is missing, malformed or readable by others."""

    code = "curve_key_invalid"


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What a client needs: its own pair, and the engine's public key that it insists on."""

    pair: KeyPair
    server_public: str


@dataclass(frozen=True, slots=True)
class EngineCurve:
    """What an engine needs: its own pair, and the clients that it admits."""

    pair: KeyPair
    allowed: frozenset[str]


def create_curve_keys(folder: Path) -> KeyPair:
    """Makes both pairs and the allow-list; returns the engine's (its public half is printed).

    Raises CurveKeyError when keys are there already, which an engine may be using.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine, client = _new_pair(), _new_pair()
    _write_new(folder / "engine.key", f"public {engine.public}\nsecret {engine.secret}\n")
    _write_new(folder / "client.key", f"public {client.public}\nsecret {client.secret}\n")
    _write_new(
        folder / "clients.allowed",
        f"# public keys of the api and worker hosts, one a line\n{client.public}\n",
    )
    return engine


def load_engine_curve(folder: Path) -> EngineCurve:
    """The engine's side of the folder. Raises CurveKeyError."""
    lines = _read(folder / "clients.allowed").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for key in keys:
        _check_key(key, "clients.allowed")
    if not keys:
        raise CurveKeyError("clients.allowed names no client, so nobody could connect")
    return EngineCurve(_read_pair(folder / "engine.key"), frozenset(keys))


def load_client_curve(folder: Path, server_public: str) -> CurveKeys:
    """The client's side of the folder. Raises CurveKeyError."""
    _check_key(server_public, "the engine's public key")
    return CurveKeys(_read_pair(folder / "client.key"), server_public)


def _new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def _write_new(file: Path, text: str) -> None:
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CurveKeyError(f"{file} exists already; move it away to make new keys") from None
    with os.fdopen(handle, "w", encoding="ascii") as opened:
        opened.write(text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        raise CurveKeyError(f"cannot read {file}; `loramux secrets init` makes the keys") from None


def _read_pair(file: Path) -> KeyPair:
    text = _read(file)
    if file.stat().st_mode & 0o077:
        raise CurveKeyError(f"{file} is readable by others; chmod 600 it")
    values = dict(line.split(None, 1) for line in text.splitlines() if len(line.split()) == 2)
    public, secret = values.get("public", "").strip(), values.get("secret", "").strip()
    _check_key(public, file.name)
    _check_key(secret, file.name)
    if zmq.curve_public(secret.encode()).decode() != public:
        raise CurveKeyError(f"the two halves in {file} do not belong together")
    return KeyPair(public, secret)


def _check_key(key: str, where: str) -> None:
    if len(key) != _KEY_CHARACTERS or not set(key) <= _Z85:
        raise CurveKeyError(f"{where} has a key that is not {_KEY_CHARACTERS} Z85 characters")
