"""What the runner needs of a device beside tensor operations: streams, events, graphs, memory.

Two streams are enough: on "steps" everything that a step computes and everything that must keep its
order with steps; on "copies" adapters on their way in. Tests put a device of their own behind it,
which runs on the CPU and writes down the order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import EngineError

Stream = Literal["steps", "copies"]


class BackendUnavailable(EngineError):
    """The device that was asked for is not here, or cannot run this model."""

    code = "backend_unavailable"


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether all work before it has been done; never waits."""
        ...

    def wait(self) -> None:
        """Returns once it has."""
        ...


class Graph(Protocol):
    """Captured work: the same operations on the same addresses."""

    def replay(self) -> None:
        """Puts the work onto the current stream."""
        ...


class Memory(NamedTuple):
    """Of the device, in bytes."""

    total: int
    free: int  # for anybody
    reserved: int  # by this process's allocator, graphs included
    peak: int  # most that tensors held at once since `reset_peak`


class Device(ABC):
    """One device. Everything is called by one thread, but `pinned` by any."""

    name: str
    torch_device: torch.device
    captures = 0
    """Graphs captured so far."""

    @property
    @abstractmethod
    def compiles(self) -> int:
        """Kernels compiled by this process so far."""

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, of zeros."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory, of zeros, that the device copies from and to by itself.

        Begins on a multiple of 64 bytes. No more than its pages is locked; where the system locks
        none, it is ordinary memory.
        """

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Tensor operations inside go onto this stream."""

    @abstractmethod
    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Puts a copy onto a stream and returns at once. The two must not overlap."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event after all that was put onto the stream so far."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is put onto the stream from now on runs after the event. The host goes on."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures what `work` puts onto "steps"; nothing of it is run.

        Graphs share one memory pool: what one leaves there is gone with the next replay.
        """

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def release_unused(self) -> None:
        """Gives memory back that the allocator keeps and no tensor holds."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns once everything on every stream has been done."""
