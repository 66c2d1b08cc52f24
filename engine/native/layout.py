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
from engine.model.weights import Weight, row_pieces

PANEL = 16
BF16, INT4, INT8 = 0, 1, 2  # enum Kind
_BLOCK_BYTES = {INT4: 320, INT8: 544, BF16: 1024}  # of a panel's group

Bytes = npt.NDArray[np.uint8]
Take = Callable[[int], torch.Tensor]
"""Gives memory for so many bytes: uint8, 64-byte aligned."""


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
    weights: Sequence[Weight],
    take: Take,
    *,
    bias: torch.Tensor | None = None,
    alternating: bool = False,
) -> PackedLinear:
    """`weights`: each [out_i, in], stacked by rows; `alternating`: a panel of each in turn.

    Panels are written to the memory that `take` gives, piece by piece. Raises ValueError when a
    shape does not fit.
    """
    inputs = weights[0].columns
    outputs = sum(weight.shape[0] for weight in weights)
    if not all(fits(weight.shape[0], inputs) for weight in weights):
        raise ValueError(f"{outputs} x {inputs} does not divide into panels")
    for kind in (INT4, INT8, BF16):
        if any(_READERS[kind](weight, 0, PANEL) is None for weight in weights):
            continue
        block = _BLOCK_BYTES[kind]
        data = take(outputs * inputs // (PANEL * GROUP) * block)
        panels = data.numpy().reshape(outputs // PANEL, inputs // GROUP, block)
        if _fill(panels, kind, weights, alternating=alternating):
            return PackedLinear(kind, data, inputs, outputs, bias)
    raise AssertionError("every weight can be decoded")


def kept_pack(
    forms: FormCache,
    name: str,
    weights: Sequence[Weight],
    take: Take,
    *,
    bias: torch.Tensor | None = None,
    alternating: bool = False,
) -> PackedLinear:
    """`pack`, its panels read from `forms` where they are kept there under `name`."""
    if all(weight.is_plain for weight in weights):
        return pack(weights, take, bias=bias, alternating=alternating)
    made: list[PackedLinear] = []

    def make() -> Arrays:
        made.append(pack(weights, take, bias=bias, alternating=alternating))
        return np.array([made[0].kind]), made[0].data.numpy()

    kind, kept = forms.arrays(f"{name} native.1", make)
    if made:
        return made[0]
    data = take(kept.size)
    data.numpy()[:] = kept
    outputs = sum(weight.shape[0] for weight in weights)
    return PackedLinear(int(kind[0]), data, weights[0].columns, outputs, bias)


def _fill(panels: Bytes, kind: int, weights: Sequence[Weight], *, alternating: bool) -> bool:
    """panels: [panels, groups, bytes]. False when a weight turns out not to be of this kind."""
    first = 0
    for index, weight in enumerate(weights):
        count = weight.shape[0] // PANEL
        own = panels[index :: len(weights)] if alternating else panels[first : first + count]
        first += count
        for start, stop in row_pieces(weight.shape[0], weight.columns, multiple=PANEL):
            parts = _READERS[kind](weight, start, stop)
            if parts is None:
                return False
            own[start // PANEL : stop // PANEL] = _PACKERS[kind](*parts)
    return True


_Parts = tuple[npt.NDArray[np.generic], ...]


def _read_int4(weight: Weight, start: int, stop: int) -> _Parts | None:
    """None for scales that fp16 cannot hold, too."""
    codes = weight.int4(start, stop)
    if codes is None:
        return None
    minimum = (codes.zero - 8.0 * codes.scale).astype(np.float32)
    if not (_half_is_enough(codes.scale) and _half_is_enough(minimum)):
        return None
    return codes.q, codes.scale.astype(np.float16), minimum.astype(np.float16)


def _read_int8(weight: Weight, start: int, stop: int) -> _Parts | None:
    codes = weight.int8(start, stop)
    return None if codes is None else (codes.q, codes.scale.astype(np.float16))


def _read_bf16(weight: Weight, start: int, stop: int) -> _Parts:
    return (torch.from_numpy(weight.decode(start, stop)).bfloat16().view(torch.int16).numpy(),)


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
_READERS: dict[int, Callable[[Weight, int, int], _Parts | None]] = {
    INT4: _read_int4, INT8: _read_int8, BF16: _read_bf16,
}  # fmt: skip
"""What its packer takes of a weight's rows start..stop, or None where the kind does not hold it."""
