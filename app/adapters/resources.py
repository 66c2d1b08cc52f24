"""What the adapters domain works with, in one object that api and worker build alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from app.adapters.probes import Engine
from app.clock import Clock
from app.db import Database
from app.errors import Overloaded
from app.settings import Settings
from engine.adapters.store import AdapterStore
from engine.errors import StoreUnavailable
from engine.types import ModelDescription

log = structlog.get_logger(__name__)


class QueueUnavailable(Exception):
    """The broker cannot be reached; the sweep sends the task later."""


class TaskQueue(Protocol):
    """Puts a task's name and ids on the broker; the rows stay the queue of record.

    Raises QueueUnavailable.
    """

    async def send(self, task: str, *ids: str) -> None: ...


@contextmanager
def storing() -> Iterator[None]:
    """Around work on the store for a caller: a store that is full or away is a 503, not a fault."""
    try:
        yield
    except (StoreUnavailable, OSError) as error:
        log.error("adapter_store_unavailable", error=type(error).__name__, detail=str(error)[:200])
        raise Overloaded(
            "The adapter store cannot be used now, so nothing was kept; send it again later.",
            code="store_unavailable",
            retry_after_ms=10_000,
        ) from error


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
