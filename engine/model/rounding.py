"""Rounds a matrix to 4 bits, to the nearest, in groups of columns: w = scale (q - zero).

The scale of a group spans its least and its greatest weight (and 0, which stays exact), and is
rounded to the type in which it is stored before the codes are chosen, so that its own rounding
costs nothing twice.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.model.config import CheckpointRefused
from engine.model.quantization import Floats

ScaleType = Literal["F32", "F16", "BF16"]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows of a matrix [rows, in] in groups of `in / groups` columns."""

    q: npt.NDArray[np.uint8]  # [rows, in], 0..15
    scale: Floats  # [rows, groups], numbers of the scales' type
    zero: npt.NDArray[np.uint8]  # [rows, groups], 0..15; 8 where it is symmetric

    def values(self) -> Floats:
        """fp32 [rows, in], what the codes stand for."""
        grouped = self.q.reshape(*self.scale.shape, -1).astype(np.float32)
        grouped -= self.zero[..., None]
        grouped *= self.scale[..., None]
        return grouped.reshape(self.q.shape)


def round_groups(weight: Floats, group: int, scale_type: ScaleType, *, symmetric: bool) -> Rounded:
    """weight: [rows, in], in a multiple of `group`. Raises CheckpointRefused for inf and nan."""
    if not np.isfinite(weight).all():
        raise CheckpointRefused("a weight is not a finite number")
    grouped = weight.reshape(weight.shape[0], -1, group)
    if symmetric:
        # codes -8..7: the greatest weight may lie half a step outside, for finer steps everywhere
        scale = _stored(np.abs(grouped).max(axis=-1) / 7.5, scale_type)
        zero = np.full(scale.shape, 8, np.uint8)
    else:
        low, high = np.minimum(grouped.min(axis=-1), 0), np.maximum(grouped.max(axis=-1), 0)
        scale = _stored((high - low) / 15, scale_type)
        zero = np.rint(-low / scale).clip(0, 15).astype(np.uint8)
    q = np.rint(grouped / scale[..., None])
    q += zero[..., None]
    codes = q.clip(0, 15).astype(np.uint8).reshape(weight.shape)
    return Rounded(codes, scale, zero)


def stored_scales(scale: Floats, scale_type: ScaleType) -> npt.NDArray[np.uint8]:
    """The bytes of scales that are numbers of the type: uint8 [rows, groups x bytes]."""
    if scale_type == "BF16":
        words: npt.NDArray[np.generic] = (scale.view(np.uint32) >> 16).astype("<u2")
    else:
        words = scale.astype("<f2" if scale_type == "F16" else "<f4")
    return np.ascontiguousarray(words).view(np.uint8).reshape(scale.shape[0], -1)


def _stored(scale: Floats, scale_type: ScaleType) -> Floats:
    """The nearest number of the type; 1 for a group of zeros or too small for the type."""
    if scale_type == "BF16":
        bits = scale.astype(np.float32).view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    elif scale_type == "F16":
        nearest = scale.astype(np.float16).astype(np.float32)
    else:
        nearest = scale.astype(np.float32)
    smallest = 2.0**-24 if scale_type == "F16" else 2.0**-126
    return np.where(nearest < smallest, np.float32(1.0), nearest)
