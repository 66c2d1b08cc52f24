"""The seam between the pool and what reads adapters: two phases, so that a size is known first.

    measure(ref) ──> Measured(nbytes) ──(host bytes reserved)──> build(ref) ──> Loaded(blob)

Every call returns at once; events come back through `poll`. Either phase may fail instead.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.types import AdapterBlob, AdapterRef


@dataclass(frozen=True, slots=True)
class Measured:
    """The adapter's files are sound; its blob will have exactly `nbytes` bytes."""

    ref: AdapterRef
    nbytes: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class Loaded:
    ref: AdapterRef
    blob: AdapterBlob


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Why this adapter cannot be had. `transient`: worth another try soon."""

    ref: AdapterRef
    code: str
    message: str
    transient: bool = False


LoadEvent = Measured | Loaded | LoadFailed


class Loader(Protocol):
    def measure(self, ref: AdapterRef) -> None:
        """Begins to verify an adapter and plan its blob; answered by Measured."""
        ...

    def build(self, ref: AdapterRef) -> None:
        """Begins to build the blob of a measured adapter; answered by Loaded."""
        ...

    def abandon(self, ref: AdapterRef) -> None:
        """Forgets a measured adapter that nobody wants any more."""
        ...

    def poll(self) -> list[LoadEvent]:
        """What has happened since the last call."""
        ...

    def close(self) -> None: ...
