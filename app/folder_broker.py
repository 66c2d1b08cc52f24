"""Celery's broker in a folder: kombu's filesystem transport with whole-message files.

kombu opens a message's file under its final name before it has written it, so a reader can take
half of one, and it passes every message through the system's temporary folder. Here a message
appears and leaves by a rename inside the one folder, which only its owner can read.
"""

import os
import uuid
from pathlib import Path
from queue import Empty
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.utils.json import dumps, loads

from app.clock import SystemClock

TAKEN = ".taken"
WRITING = ".writing"


class Channel(filesystem.Channel):
    """Messages are `<time>_<uuid>.<queue>.msg` in `data_folder_in`; `data_folder_out` is it too."""

    @property
    def _folder(self) -> Path:
        return Path(self.data_folder_in)

    def _put(  # type: ignore[override]  # kombu names the parameter differently in its two bases
        self, queue: str, payload: Any, **_options: Any
    ) -> None:
        name = f"{_order()}_{uuid.uuid4()}.{queue}.msg"
        unfinished = self._folder / (name + WRITING)
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(dumps(payload))
            unfinished.rename(self._folder / name)
        except OSError as error:
            raise ChannelError(f"cannot put a message into {self._folder}") from error

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        """The oldest message, which exactly one of several readers gets."""
        for name in sorted(os.listdir(self._folder)):
            if name.partition(".")[2] != f"{queue}.msg":
                continue
            taken = self._folder / (name + TAKEN)
            try:
                (self._folder / name).rename(taken)
            except FileNotFoundError:
                continue  # another reader was first
            text = taken.read_text(encoding="utf-8")
            taken.unlink()
            return loads(text)
        raise Empty


def _order() -> str:
    """Sorts by time of making, also across processes and restarts."""
    return f"{SystemClock().now().timestamp():017.6f}".replace(".", "")


class Transport(filesystem.Transport):
    Channel = Channel
