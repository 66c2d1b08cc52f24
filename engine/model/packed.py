"""Weights that a Hugging Face folder stores quantized: AWQ, GPTQ, and compressed-tensors' fp8 and
int4.

AWQ's GEMM layout packs eight columns of the output into an int32, in the order 0 2 4 6 1 3 5 7;
GPTQ packs eight rows of the input, in order. Both keep their matrices transposed, [in, out].
GPTQ stores each zero less one, except in its second format.

compressed-tensors' pack-quantized packs eight columns of a row into an int32, in order, and the
zeros of eight rows into another; matrices lie as they are multiplied, [out, in]. Its source:
https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized.

Codes stay in the file's words until rows of them are asked for: unpacked, they take twice as much.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.model.config import CheckpointRefused
from engine.model.quantization import Floats, decode
from engine.model.weights import Fp8Weight, GroupedWeight, Rows, Weight

_AWQ_SHIFTS = 4 * np.argsort([0, 2, 4, 6, 1, 3, 5, 7]).astype(np.uint32)
"""Of a word's eight columns, in order."""
_FLOATS = ("F32", "F16", "BF16")

Tensors = Callable[[str], "StoredTensor | None"]
"""A folder's tensor by its full name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A safetensors entry; `data` is its mapped bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def floats(self) -> Floats:
        """fp32 of its shape. Raises CheckpointRefused for other than floating-point numbers."""
        if self.dtype not in _FLOATS:
            raise CheckpointRefused(f"a scale is {self.dtype}: F32, F16 or BF16 is due")
        numbers = math.prod(self.shape)
        return decode(self.dtype, self.data.reshape(1, -1), numbers).reshape(self.shape)

    def integers(self) -> npt.NDArray[np.int64]:
        """The numbers of an int64 tensor."""
        if self.dtype != "I64":
            raise CheckpointRefused(f"a shape is {self.dtype}: I64 is due")
        return np.ascontiguousarray(self.data).view("<i8").reshape(self.shape)

    def words(self) -> npt.NDArray[np.uint32]:
        """The bits of an int32 tensor."""
        if self.dtype not in ("I32", "U32"):
            raise CheckpointRefused(f"packed codes are {self.dtype}: I32 is due")
        return np.ascontiguousarray(self.data).view("<u4").reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _AwqCodes:
    words: npt.NDArray[np.uint32]  # [in, out / 8]

    @property
    def shape(self) -> tuple[int, int]:
        return 8 * self.words.shape[1], self.words.shape[0]

    def __getitem__(self, rows: Rows, /) -> npt.NDArray[np.uint8]:
        outputs = np.arange(self.shape[0])[rows]
        codes = (self.words[:, outputs // 8] >> _AWQ_SHIFTS[outputs % 8]) & 15
        return np.ascontiguousarray(codes.T, np.uint8)


@dataclass(frozen=True, slots=True)
class _GptqCodes:
    words: npt.NDArray[np.uint32]  # [in / 8, out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[1], 8 * self.words.shape[0]

    def __getitem__(self, rows: Rows, /) -> npt.NDArray[np.uint8]:
        codes = _nibbles(self.words[:, rows].T)
        return codes.reshape(codes.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _RowCodes:
    words: npt.NDArray[np.uint32]  # [out, in / 8], the last one of a row perhaps not full
    shape: tuple[int, int]

    def __getitem__(self, rows: Rows, /) -> npt.NDArray[np.uint8]:
        codes = _nibbles(self.words[rows])
        return np.ascontiguousarray(codes.reshape(codes.shape[0], -1)[:, : self.shape[1]])


@dataclass(frozen=True, slots=True)
class Packing:
    """What a folder's `quantization_config` says."""

    method: Literal["awq", "gptq", "fp8", "int4"]
    zeros_less_one: bool = False

    def weight(self, module: str, tensors: Tensors) -> Weight | None:
        """None when this module is stored plain. `module`: without its `.weight`."""
        if self.method == "fp8":
            return _fp8(module, tensors)
        if self.method == "int4":
            return _pack_quantized(module, tensors)
        if tensors(f"{module}.qweight") is None:
            return None
        return self._awq(module, tensors) if self.method == "awq" else self._gptq(module, tensors)

    def _awq(self, module: str, tensors: Tensors) -> Weight:
        q, zeros = (_AwqCodes(_due(module, n, tensors).words()) for n in ("qweight", "qzeros"))
        scale = _due(module, "scales", tensors).floats()
        _check_groups(module, q.shape[::-1], scale.shape, zeros.shape[::-1])
        zero = zeros[:].astype(np.float32)  # [out, groups]: packed as the codes are
        return GroupedWeight(q, scale.T.copy(), zero, None)

    def _gptq(self, module: str, tensors: Tensors) -> Weight:
        q = _GptqCodes(_due(module, "qweight", tensors).words())
        zeros = _nibbles(_due(module, "qzeros", tensors).words())
        zero = zeros.reshape(zeros.shape[0], -1).astype(np.float32) + self.zeros_less_one
        scale = _due(module, "scales", tensors).floats()
        _check_groups(module, q.shape[::-1], scale.shape, zero.shape)
        groups = _column_groups(module, tensors, q.shape[1], scale.shape[0])
        return GroupedWeight(q, scale.T.copy(), zero.T.copy(), groups)


def packing_of(raw: dict[str, Any]) -> Packing | None:
    """Reads `quantization_config` of config.json. Raises CheckpointRefused by the part's name."""
    given = raw.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(given)
    if method not in ("awq", "gptq"):
        raise CheckpointRefused(
            f"quant_method {method!r} is not supported: awq, gptq, compressed-tensors"
        )
    if given.get("bits", given.get("w_bit")) != 4:
        raise CheckpointRefused(f"{method} with {given.get('bits')} bits is not supported: 4")
    if method == "awq" and str(given.get("version", "gemm")).lower() != "gemm":
        raise CheckpointRefused(f"awq version {given['version']!r} is not supported: gemm")
    first_format = given.get("checkpoint_format", "gptq") == "gptq"
    return Packing(method, zeros_less_one=method == "gptq" and first_format)


_COMPRESSED: dict[str, tuple[Literal["fp8", "int4"], int, str, tuple[str, ...]]] = {
    "float-quantized": ("fp8", 8, "float", ("tensor", "channel")),
    "pack-quantized": ("int4", 4, "int", ("group", "channel")),
}
"""By format: the method, the bits and type of a number, and what may share a scale."""


def _compressed(given: dict[str, Any]) -> Packing:
    known = _COMPRESSED.get(str(given.get("format")))
    if known is None:
        raise CheckpointRefused(
            f"compressed-tensors format {given.get('format')!r} is not supported: "
            f"{', '.join(_COMPRESSED)}"
        )
    method, bits, kind, strategies = known
    for group in (given.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        strategy = weights.get("strategy")
        if (
            weights.get("num_bits") != bits
            or weights.get("type", kind) != kind
            or strategy not in strategies
        ):
            raise CheckpointRefused(
                f"compressed-tensors strategy {strategy!r} with {weights.get('num_bits')} bits is "
                f"not supported: {' or '.join(strategies)} with {bits}"
            )
    return Packing(method)


def _pack_quantized(module: str, tensors: Tensors) -> Weight | None:
    packed = tensors(f"{module}.weight_packed")
    if packed is None:
        return None
    shape = tuple(map(int, _due(module, "weight_shape", tensors).integers()))
    scale = _due(module, "weight_scale", tensors).floats()
    words = packed.words()
    if len(shape) != 2 or words.shape != (shape[0], -(-shape[1] // 8)):
        raise CheckpointRefused(
            f"{module} has codes of {list(words.shape)} words, which are not its weight_shape "
            f"{list(shape)}"
        )
    zero = np.full(scale.shape, 8.0, np.float32)
    if (zeros := tensors(f"{module}.weight_zero_point")) is not None:
        stored = zeros.words()
        if stored.shape != (-(-shape[0] // 8), scale.shape[1]):
            raise CheckpointRefused(f"{module}.weight_zero_point has shape {list(stored.shape)}")
        zero = _nibbles(stored.T).reshape(scale.shape[1], -1)[:, : shape[0]].T.astype(np.float32)
    _check_groups(module, shape[::-1], scale.shape[::-1], zero.shape[::-1])
    groups = _column_groups(module, tensors, shape[1], scale.shape[1], "weight_g_idx")
    return GroupedWeight(_RowCodes(words, (shape[0], shape[1])), scale, zero, groups)


def _fp8(module: str, tensors: Tensors) -> Weight | None:
    stored = tensors(f"{module}.weight")
    if stored is None or stored.dtype != "F8_E4M3":
        return None
    scale = _due(module, "weight_scale", tensors).floats()
    if scale.size not in (1, stored.shape[0]):
        raise CheckpointRefused(f"{module}.weight_scale has shape {list(scale.shape)}")
    return Fp8Weight(stored.data.reshape(stored.shape), scale.reshape(-1, 1))


def _nibbles(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """[..., n] words -> [..., n, 8] codes, the lowest first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return ((np.ascontiguousarray(words)[..., None] >> shifts) & 15).astype(np.uint8)


def _column_groups(
    module: str, tensors: Tensors, columns: int, groups: int, part: str = "g_idx"
) -> npt.NDArray[np.int64] | None:
    """Each column's group, or None when they follow one another."""
    stored = tensors(f"{module}.{part}")
    if stored is None:
        return None
    index = stored.words().astype(np.int64)
    if index.shape != (columns,) or index.max(initial=0) >= groups:
        raise CheckpointRefused(f"{module}.{part} does not give each column one of {groups} groups")
    in_order = np.array_equal(index, np.arange(columns) // (columns // groups))
    return None if in_order else index


def _check_groups(
    module: str, codes: tuple[int, ...], scale: tuple[int, ...], zero: tuple[int, ...]
) -> None:
    """codes: (in, out); scale and zero: (in / group, out)."""
    if scale != zero or scale[1:] != codes[1:] or not scale[0] or codes[0] % scale[0]:
        raise CheckpointRefused(
            f"{module} has codes of {list(codes)}, scales of {list(scale)} and zeros of "
            f"{list(zero)}, which do not fit together"
        )


def _due(module: str, part: str, tensors: Tensors) -> StoredTensor:
    stored = tensors(f"{module}.{part}")
    if stored is None:
        raise CheckpointRefused(f"{module} is quantized and has no {part}")
    return stored
