"""Writes safetensors files from front to back, without holding their tensors.

Format: https://huggingface.co/docs/safetensors. The header names every tensor's place, so shapes
and types are known before the first byte of data is written.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

TYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor that will be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * TYPE_BYTES[self.dtype]


class SafetensorsWriter:
    """One file. Tensors are written in pieces, each from its front, in any order of tensors."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorPlan]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._at: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        at = 0
        for name, plan in tensors.items():
            self._at[name], self._ends[name] = at, at + plan.nbytes
            header[name] = {
                "dtype": plan.dtype,
                "shape": list(plan.shape),
                "data_offsets": [at, at + plan.nbytes],
            }
            at += plan.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self.nbytes = self._base + at
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        """Appends bytes to a tensor."""
        at = self._at[name]
        assert at + data.size <= self._ends[name], f"{name} was planned smaller"
        self._file.seek(self._base + at)
        self._file.write(np.ascontiguousarray(data).data)
        self._at[name] = at + data.size

    def close(self) -> None:
        """Puts the bytes on the disk. Every tensor has been written whole by now."""
        assert self._at == self._ends, "a tensor was left unwritten"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Closes an unfinished file."""
        self._file.close()
