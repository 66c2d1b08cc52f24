"""Final rows on the local disk while the database is away: one file a request, fsynced.

Any process of this host may replay a file: a row closes once, and a file goes after that.
"""

import os
from pathlib import Path

import msgspec

from app.usage.entries import FinalEntry


class Spool:
    """`folder` is made with mode 0700. The methods block; call them in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, entry: FinalEntry) -> None:
        """On disk when it returns; a crash leaves the whole file or none."""
        target = self._path(entry.request_id)
        partial = target.with_suffix(".part")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(entry))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        partial.rename(target)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def entries(self, most: int = 500) -> list[FinalEntry]:
        """Up to `most` entries, oldest first. A file that does not parse is set aside as .bad."""
        found = []
        for path in sorted(self._folder.glob("*.json"), key=_age)[:most]:
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=FinalEntry))
            except FileNotFoundError:
                continue  # another process replayed it
            except msgspec.DecodeError:
                path.rename(path.with_suffix(".bad"))
        return found

    def remove(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._path(request_id).unlink(missing_ok=True)

    def _path(self, request_id: str) -> Path:
        if not request_id.replace("_", "").replace("-", "").isalnum():
            raise ValueError("a request id has letters, digits, - and _ only")
        return self._folder / f"{request_id}.json"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
