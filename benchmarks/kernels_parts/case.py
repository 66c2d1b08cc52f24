"""A case: one call of a kernel, what it moves and multiplies, and how it is opened on a device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.roofline import Work
from benchmarks.step_roofline import Shape

TOLERANCE = 2e-2


@dataclass(frozen=True)
class Sizes:
    """Rows that decode at `context` tokens, and the tokens of a prompt's chunk."""

    decodes: tuple[int, ...]
    context: int
    prompt: int


@dataclass(frozen=True)
class Target:
    """Where the cases run. `triton`: on the Triton faces; else on those of the CPU."""

    shape: Shape
    sizes: Sizes
    device: torch.device
    triton: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.bfloat16 if self.triton else torch.float32

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Trial:
    """`error`: how far the call is from its reference, of the largest value."""

    call: Callable[[], object]
    error: Callable[[], float]


@dataclass(frozen=True)
class Case:
    """`open` allocates what the call needs; None where the face does not take the shape."""

    name: str
    work: Work
    open: Callable[[], Trial | None]


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value; not a number where one is not."""
    expected = expected.to(actual.device).float()
    return float((actual.float() - expected).abs().max() / expected.abs().max())


def largest(*errors: float) -> float:
    """Infinite where one is not a number: `max` may lose it."""
    return max((error if error == error else float("inf") for error in errors), default=0.0)
