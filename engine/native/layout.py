"""Brings weights into panels of 16 outputs, as `linear.h` reads them.

The checkpoint's own codes are kept, so a weight takes what it takes in the file: 4 bits and a scale
and a minimum a group of 32, or 8 bits and a scale. Everything else becomes bf16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.model.form_cache import Arrays, FormCache
from engine.model.quantization import GROUP, Floats
from engine.model.weights import Weight

PANEL = 16
BF16, INT4, INT8 = 0, 1, 2  # enum Kind
_ROWS_AT_ONCE = 4096  # panels are packed piece by piece, to bound memory

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """data: uint8, panel after panel; 64-byte aligned."""

    kind: int
    data: torch.Tensor
    inputs: int
    outputs: int
    bias: torch.Tensor | None


def fits(outputs: int, inputs: int) -> bool:
    """Whether a matrix divides into panels and groups."""
    return outputs % PANEL == 0 and inputs % GROUP == 0


def pack(
    weights: Sequence[Weight], *, bias: torch.Tensor | None = None, alternating: bool = False
) -> PackedLinear:
    """`weights`: each [out_i, in], stacked by rows; `alternating`: a panel of each in turn.

    Raises ValueError when a shape does not fit.
    """
    inputs = weights[0].columns
    outputs = sum(weight.shape[0] for weight in weights)
    if not all(fits(weight.shape[0], inputs) for weight in weights):
        raise ValueError(f"{outputs} x {inputs} does not divide into panels")
    kind, parts = _parts(weights)
    into_panels = _PACKERS[kind]
    order = np.arange(outputs)
    if alternating:
        order = order.reshape(len(weights), -1, PANEL).swapaxes(0, 1).reshape(-1)
    pieces = [
        into_panels(*(part[order[at : at + _ROWS_AT_ONCE]] for part in parts))
        for at in range(0, outputs, _ROWS_AT_ONCE)
    ]
    flat = np.concatenate([piece.reshape(-1) for piece in pieces])
    data = torch.empty(flat.size, dtype=torch.uint8)  # torch aligns to 64 bytes
    data.numpy()[:] = flat
    return PackedLinear(kind, data, inputs, outputs, bias)


def kept_pack(
    forms: FormCache,
    name: str,
    weights: Sequence[Weight],
    *,
    bias: torch.Tensor | None = None,
    alternating: bool = False,
) -> PackedLinear:
    """`pack`, its panels read from `forms` where they are kept there under `name`."""
    if all(weight.is_plain for weight in weights):
        return pack(weights, bias=bias, alternating=alternating)

    def make() -> Arrays:
        packed = pack(weights, alternating=alternating)
        return np.array([packed.kind]), packed.data.numpy()

    kind, data = forms.arrays(f"{name} native.1", make)
    outputs = sum(weight.shape[0] for weight in weights)
    return PackedLinear(int(kind[0]), torch.from_numpy(data), weights[0].columns, outputs, bias)


def _parts(weights: Sequence[Weight]) -> tuple[int, list[npt.NDArray[np.generic]]]:
    """The kind that all weights share, and its arrays, each [outputs, ...]."""
    four = [codes for weight in weights if (codes := weight.int4()) is not None]
    if len(four) == len(weights):
        scale = np.concatenate([codes.scale for codes in four])
        zero = np.concatenate([codes.zero for codes in four])
        minimum = (zero - 8.0 * scale).astype(np.float32)
        if _half_is_enough(scale) and _half_is_enough(minimum):
            q = np.concatenate([codes.q for codes in four])
            return INT4, [q, scale.astype(np.float16), minimum.astype(np.float16)]
    eight = [held for weight in weights if (held := weight.int8()) is not None]
    if len(eight) == len(weights):
        scale = np.concatenate([held.scale for held in eight]).astype(np.float16)
        return INT8, [np.concatenate([held.q for held in eight]), scale]
    bits = [torch.from_numpy(weight.decode()).bfloat16().view(torch.int16) for weight in weights]
    return BF16, [torch.cat(bits).numpy()]


def _half_is_enough(values: Floats) -> bool:
    """Whether fp16 holds them to 11 bits; a rounded weight has 8."""
    with np.errstate(over="ignore"):
        error = np.abs(values.astype(np.float16).astype(np.float32) - values)
    return bool(np.all(error <= 2.0**-11 * np.abs(values) + 2.0**-24))


def _pack_int4(q: Bytes, scale: npt.NDArray[np.float16], minimum: npt.NDArray[np.float16]) -> Bytes:
    """q: [out, in]; scale, minimum: [out, in / 32] -> [panels, groups, 320]."""
    panels, groups = q.shape[0] // PANEL, scale.shape[1]
    # panel, low or high outputs, output, group, half, pair, even or odd
    split = q.reshape(panels, 2, 8, groups, 2, 8, 2).transpose(0, 3, 4, 1, 2, 6, 5)
    pairs = split[..., 0::2] | (split[..., 1::2] << 4)  # bytes of a little-endian word
    codes = np.ascontiguousarray(pairs, np.uint8).reshape(panels, groups, -1)
    return np.concatenate((_scales(scale), _scales(minimum), codes), axis=-1)


def _pack_int8(q: npt.NDArray[np.int8], scale: npt.NDArray[np.float16]) -> Bytes:
    """q: [out, in]; scale: [out, in / 32] -> [panels, groups, 544]."""
    panels, groups = q.shape[0] // PANEL, scale.shape[1]
    # panel, low or high outputs, output, group, quarter, pair, even or odd
    split = q.reshape(panels, 2, 8, groups, 4, 4, 2).transpose(0, 3, 4, 1, 2, 6, 5)
    codes = np.ascontiguousarray(split).view(np.uint8).reshape(panels, groups, -1)
    return np.concatenate((_scales(scale), codes), axis=-1)


def _pack_bf16(bits: npt.NDArray[np.int16]) -> Bytes:
    """bits: [out, in] -> [panels, groups, 1024]."""
    panels, groups = bits.shape[0] // PANEL, bits.shape[1] // GROUP
    split = bits.reshape(panels, PANEL, groups, GROUP // 2, 2).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(split).view(np.uint8).reshape(panels, groups, -1)


def _scales(values: npt.NDArray[np.float16]) -> Bytes:
    """[out, groups] -> [panels, groups, 32]."""
    split = values.reshape(-1, PANEL, values.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(split).view(np.uint8)


_PACKERS: dict[int, Callable[..., Bytes]] = {INT4: _pack_int4, INT8: _pack_int8, BF16: _pack_bf16}
