"""What the adapters domain works with, in one object that api and worker build alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.adapters.probes import Engine
from app.clock import Clock
from app.db import Database
from app.settings import Settings
from engine.adapters.store import AdapterStore
from engine.types import ModelDescription


class QueueUnavailable(Exception):
    """The broker cannot be reached; the sweep sends the task later."""


class TaskQueue(Protocol):
    """Puts a task's name and ids on the broker; the rows stay the queue of record.

    Raises QueueUnavailable.
    """

    async def send(self, task: str, *ids: str) -> None: ...


Encode = Callable[[ModelDescription, str], Sequence[int]]
"""One user message -> the token ids of the chat prompt of that base model.

Raises EngineUnavailable where its tokenizer is not at hand.
"""


@dataclass(frozen=True)
class Resources:
    settings: Settings
    db: Database
    clock: Clock
    store: AdapterStore
    queue: TaskQueue
    engines: Sequence[Engine]
    encode: Encode
