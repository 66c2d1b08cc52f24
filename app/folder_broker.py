"""Celery's broker in a folder: kombu's filesystem transport with whole-message files.

kombu opens a message's file under its final name before it has written it, so a reader can take
half of one, and it passes every message through the system's temporary folder. Here a message
appears and leaves by a rename inside the one folder, which only its owner can read. Its table of
which queue is bound to which exchange is a file too, empty for a moment and forever after a kill in
that moment; here the table is a list of file names, which is never half written.
"""

import os
import uuid
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote, unquote

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.transport.filesystem import exchange_queue_t
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

    def get_table(  # type: ignore[override]  # its two bases disagree on the type
        self, exchange: str
    ) -> list[exchange_queue_t]:
        """The bindings of `exchange`, in any order."""
        table = self._table(exchange)
        return [_binding(path.name) for path in table.iterdir()] if table.is_dir() else []

    def _queue_bind(
        self, exchange: str, routing_key: str | None, pattern: str | None, queue: str | None
    ) -> None:
        try:
            table = self._table(exchange)
            table.mkdir(mode=0o700, exist_ok=True)
            (table / _file_name(routing_key, pattern, queue)).touch(mode=0o600)
        except OSError as error:
            raise ChannelError(f"cannot bind a queue in {self.control_folder}") from error

    def _delete(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *_: Any, **__: Any
    ) -> None:
        self._purge(queue)
        (self._table(exchange) / _file_name(routing_key, pattern, queue)).unlink(missing_ok=True)

    def _table(self, exchange: str) -> Path:
        return self.control_folder / f"{quote(exchange, safe='')}.bindings"


def _file_name(routing_key: str | None, pattern: str | None, queue: str | None) -> str:
    return "&".join(quote(part or "", safe="") for part in (routing_key, pattern, queue))


def _binding(file_name: str) -> exchange_queue_t:
    return exchange_queue_t(*(unquote(part) for part in file_name.split("&")))


def _order() -> str:
    """Sorts by time of making, also across processes and restarts."""
    return f"{SystemClock().now().timestamp():017.6f}".replace(".", "")


class Transport(filesystem.Transport):
    Channel = Channel
