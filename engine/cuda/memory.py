"""How the device's memory is divided, once, before the engine is ready.

What the model, the fixed buffers, the largest step and the graphs take is measured; the rest of the
engine's share becomes the one arena of KV blocks and adapters.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import EngineError

SLACK = 0.02
"""Of the share: for what allocators and the driver round up."""
MIB = 1 << 20


class DeviceMemoryTooSmall(EngineError):
    """The model and its largest step leave no room for KV blocks."""

    code = "device_memory_too_small"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """All in bytes, as measured but `share`, the part of the device that the engine may use."""

    total: int
    share: float
    others: int  # other processes, and what the driver keeps for this one
    weights: int
    buffers: int
    step: int  # of the largest step, beside all of the above
    graphs: int
    extent: int

    @property
    def limit(self) -> int:
        return int(self.total * self.share)

    @property
    def slack(self) -> int:
        return int(self.limit * SLACK)

    @property
    def extents(self) -> int:
        """How many the arena holds. Raises DeviceMemoryTooSmall where it is none."""
        taken = self.others + self.weights + self.buffers + self.step + self.graphs + self.slack
        count = (self.limit - taken) // self.extent
        if count < 1:
            raise DeviceMemoryTooSmall(
                f"{self.limit // MIB} MiB of the device may be used and {taken // MIB} MiB are "
                "taken before the first KV block: "
                + ", ".join(f"{name} {size // MIB} MiB" for name, size in self._taken())
                + ". Lower max_batch_tokens or max_running, raise device_memory_share, or take a "
                "smaller model."
            )
        return count

    @property
    def arena(self) -> int:
        """A whole number of extents."""
        return self.extents * self.extent

    def table(self) -> list[str]:
        """A line for each part, for the log."""
        rows = [*self._taken(), (f"arena, {self.extents} extents of {self.extent} bytes",
                                 self.arena)]  # fmt: skip
        lines = [f"{'device memory':44}{'MiB':>10}{'of it':>8}"]
        lines += [f"{name:44}{size / MIB:>10.1f}{size / self.total:>8.1%}" for name, size in rows]
        used = sum(size for _, size in rows)
        lines.append(f"{'used of the share':44}{used / MIB:>10.1f}{used / self.total:>8.1%}")
        lines.append(f"{'the share':44}{self.limit / MIB:>10.1f}{self.share:>8.1%}")
        return lines

    def _taken(self) -> Iterator[tuple[str, int]]:
        yield "other processes, driver", self.others
        yield "weights", self.weights
        yield "fixed buffers", self.buffers
        yield "largest step", self.step
        yield "graphs", self.graphs
        yield "slack", self.slack
