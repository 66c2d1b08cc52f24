"""Unix sockets of the engine: a private folder, a short path, one engine at a time."""

import fcntl
import os
import stat
from pathlib import Path

from engine.errors import EngineError

MAX_PATH_CHARACTERS = 107


class AddressRefused(EngineError):
    """The engine cannot listen there."""

    code = "listen_address_refused"


def ipc_path(address: str) -> Path | None:
    """The path of an `ipc://` address, None for others. Raises AddressRefused when too long."""
    if not address.startswith("ipc://"):
        return None
    path = address.removeprefix("ipc://")
    if len(os.fsencode(path)) > MAX_PATH_CHARACTERS:
        raise AddressRefused(
            f"the socket path has {len(os.fsencode(path))} bytes, and the system allows "
            f"{MAX_PATH_CHARACTERS}: set LORAMUX_ENGINES to a shorter one, such as "
            "ipc:///run/loramux/engine.sock, or move LORAMUX_DATA_DIR"
        )
    return Path(path)


class IpcLock:
    """Keeps a second engine off the same socket (zmq would take it over without a word)."""

    def __init__(self, path: Path) -> None:
        """Makes the folder (0700) and takes the lock. Raises AddressRefused."""
        _private_folder(path.parent)
        self._handle = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise AddressRefused(f"another engine listens on {path} already") from None

    def release(self) -> None:
        os.close(self._handle)


def _private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AddressRefused(
            f"{folder} must be a folder of this user's with mode 0700, because whoever can open "
            "the socket can use the engine: chmod 700 it, or name another in LORAMUX_ENGINES"
        )
