"""A base model's matrices and vectors in the form in which a checkpoint stores them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.model.quantization import (
    GROUP,
    INT4_TYPES,
    PLAIN_TYPES,
    Floats,
    Int4Codes,
    Int8Codes,
    decode,
    decode_fp8,
    int4_codes,
    int8_codes,
)

PIECE_WEIGHTS = 1 << 20
"""Of a matrix that are decoded or repacked at once: what that takes beside the result."""

Rows = slice | npt.NDArray[np.int64]


class Codes(Protocol):
    """4-bit codes [out, in], unpacked row by row: an array, or words that hold several each."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def __getitem__(self, rows: Rows, /) -> npt.NDArray[np.uint8]:
        """uint8 [rows, in], 0..15."""
        ...


class Weight(ABC):
    """One matrix [out, in] or vector [out]."""

    shape: tuple[int, ...]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @abstractmethod
    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        """fp32 [rows, in] of rows start..stop, a vector as [in]."""

    @abstractmethod
    def take(self, indices: npt.NDArray[np.int64]) -> Floats:
        """fp32 [n, in] of single rows."""

    @property
    def is_plain(self) -> bool:
        """Whether it is stored as floating-point numbers: decoding it is no work."""
        return False

    @property
    def has_int4(self) -> bool:
        """Whether it is stored as 4-bit groups of its columns."""
        return False

    def int4(self, start: int = 0, stop: int | None = None) -> Int4Codes | None:
        """The 4-bit codes of rows start..stop, or None without `has_int4`."""
        return None

    def int8(self, start: int = 0, stop: int | None = None) -> Int8Codes | None:
        """The 8-bit codes of rows start..stop, or None when it is not stored as 8-bit groups of its
        columns."""
        return None

    def fp8(self) -> tuple[npt.NDArray[np.uint8], Floats] | None:
        """The bits of e4m3 numbers [out, in] and a scale for each row [out, 1], or None."""
        return None


class BlockWeight(Weight):
    """Rows of blocks as in a GGUF file; plain numbers are blocks of one."""

    def __init__(self, type_name: str, rows: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        """`rows`: uint8 [out, row_bytes]; a vector is one row."""
        self.type = type_name
        self.rows = rows
        self.shape = shape

    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        values = decode(self.type, self.rows[start:stop], self.columns)
        return values[0] if len(self.shape) == 1 else values

    def take(self, indices: npt.NDArray[np.int64]) -> Floats:
        return decode(self.type, self.rows[indices], self.columns)

    @property
    def is_plain(self) -> bool:
        return self.type in PLAIN_TYPES

    @property
    def has_int4(self) -> bool:
        return self.type in INT4_TYPES and len(self.shape) == 2

    def int4(self, start: int = 0, stop: int | None = None) -> Int4Codes | None:
        if not self.has_int4:
            return None
        return int4_codes(self.type, self.rows[start:stop], self.columns)

    def int8(self, start: int = 0, stop: int | None = None) -> Int8Codes | None:
        if self.type != "Q8_0" or len(self.shape) != 2:
            return None
        return int8_codes(self.rows[start:stop])


class GroupedWeight(Weight):
    """4-bit codes with a scale and a zero for each group of columns: w = scale (q - zero)."""

    def __init__(
        self,
        q: Codes,
        scale: Floats,
        zero: Floats,
        groups: npt.NDArray[np.int64] | None,
    ) -> None:
        """q: [out, in]; scale, zero: [out, in / group].

        `groups`: [in], each column's group where columns were quantized in another order.
        """
        self.shape = q.shape
        self._q, self._scale, self._zero, self._groups = q, scale, zero, groups
        self._group = q.shape[1] // scale.shape[1]

    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        return self._decode(slice(start, stop))

    def take(self, indices: npt.NDArray[np.int64]) -> Floats:
        return self._decode(indices)

    def _decode(self, rows: Rows) -> Floats:
        q = self._q[rows].astype(np.float32)
        if self._groups is not None:
            return (q - self._zero[rows][:, self._groups]) * self._scale[rows][:, self._groups]
        grouped = q.reshape(q.shape[0], -1, self._group)
        grouped = (grouped - self._zero[rows][..., None]) * self._scale[rows][..., None]
        return grouped.reshape(q.shape)

    @property
    def has_int4(self) -> bool:
        return self._groups is None and self._group % GROUP == 0

    def int4(self, start: int = 0, stop: int | None = None) -> Int4Codes | None:
        """Larger groups become several of 32 with the same scale."""
        if not self.has_int4:
            return None
        rows = slice(start, stop)
        scale = np.repeat(self._scale[rows], self._group // GROUP, axis=1)
        zero = np.repeat(self._zero[rows], self._group // GROUP, axis=1)
        return Int4Codes(self._q[rows], scale, (8.0 - zero) * scale)


class Fp8Weight(Weight):
    """e4m3 numbers with one scale a matrix or one a row."""

    def __init__(self, rows: npt.NDArray[np.uint8], scale: Floats) -> None:
        """rows: uint8 [out, in]; scale: [1, 1] or [out, 1]."""
        self.shape = rows.shape
        self._rows, self._scale = rows, np.broadcast_to(scale, (rows.shape[0], 1))

    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        return decode_fp8(self._rows[start:stop]) * self._scale[start:stop]

    def take(self, indices: npt.NDArray[np.int64]) -> Floats:
        return decode_fp8(self._rows[indices]) * self._scale[indices]

    def fp8(self) -> tuple[npt.NDArray[np.uint8], Floats]:
        return self._rows, self._scale


def row_pieces(rows: int, columns: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of a matrix, PIECE_WEIGHTS or less where `multiple` rows are, that
    begin at a multiple."""
    step = max(1, PIECE_WEIGHTS // columns // multiple) * multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def stacked_int4(weights: Sequence[Weight], start: int, stop: int) -> Int4Codes:
    """Rows start..stop of weights on top of one another, all of which `has_int4`."""
    parts, first = [], 0
    for weight in weights:
        rows = weight.shape[0]
        low, high = max(start - first, 0), min(stop - first, rows)
        if low < high and (codes := weight.int4(low, high)) is not None:
            parts.append(codes)
        first += rows
    if len(parts) == 1:
        return parts[0]
    return Int4Codes(
        np.concatenate([codes.q for codes in parts]),
        np.concatenate([codes.scale for codes in parts]),
        np.concatenate([codes.zero for codes in parts]),
    )
