"""The base model's linears on the CPU, and the one place that chooses how they are computed.

Two forms of a weight may be held side by side:

- int4: the checkpoint's own 4-bit codes through torch's weight-only kernel (bf16 activations,
  scales rounded to bf16). It reads an eighth of the bytes, so it wins while memory is the limit.
- dense: the dequantized weight, packed by oneDNN. It wins as soon as arithmetic is the limit.

`choose_path` decides; measured on AVX2 (2 cores, SmolLM2-135M, ms for all linears, weights cold):
1 row int4 10.7, dense fp32 25.6; 4 rows 20.4, 24.8; 8 rows 33.6, 33.5; 16 rows and more dense.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.form_cache import NOTHING_KEPT, Array, Arrays, FormCache
from engine.model.quantization import GROUP
from engine.model.weights import Weight, row_pieces, stacked_int4

LinearPath = Literal["auto", "native", "int4", "dense", "fp32"]

_PACK_ROWS = 32  # batch size that the packed layout is made for; rows stay independent of it


@dataclass(frozen=True, slots=True)
class PathChoice:
    """How linears are computed. Batches of at most `int4_rows` rows take the int4 kernel."""

    int4_rows: int
    dense_dtype: torch.dtype

    @property
    def needs_dense(self) -> bool:
        """False when every batch takes the int4 kernel."""
        return self.int4_rows < _EVERY_BATCH


_EVERY_BATCH = 1 << 30
EXACT = PathChoice(int4_rows=0, dense_dtype=torch.float32)
"""Logits take it: rounded to bf16, a logit of 25 has seven neighbours a unit, and the likeliest
tokens tie."""


def bf16_is_fast() -> bool:
    """True where the CPU multiplies bf16 in hardware (AVX512_BF16, AMX); elsewhere fp32 wins."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def choose_path(path: LinearPath, *, batch_invariant: bool, fast_bf16: bool) -> PathChoice:
    """The one decision about linears.

    `batch_invariant` takes a single path for every batch size: dense fp32, whose rows are bitwise
    independent of the rows beside them (`make_rows_stable` sees to it on this machine).
    """
    if batch_invariant or path == "fp32":
        return PathChoice(int4_rows=0, dense_dtype=torch.float32)
    if path == "int4":
        return PathChoice(int4_rows=_EVERY_BATCH, dense_dtype=torch.float32)
    dense = torch.bfloat16 if fast_bf16 else torch.float32
    if path == "dense":
        return PathChoice(int4_rows=0, dense_dtype=dense)
    return PathChoice(int4_rows=15 if fast_bf16 else 5, dense_dtype=dense)


class Linear:
    """y = x W^T (+ bias) for one weight, or for several that share their input, stacked by rows."""

    def __init__(
        self,
        weights: Sequence[Weight],
        choice: PathChoice,
        bias: Tensor | None = None,
        *,
        name: str = "",
        forms: FormCache = NOTHING_KEPT,
    ) -> None:
        """`weights`: each [out_i, in]; the result has their outputs side by side. `bias`: [out].

        `forms`: where what is made of quantized weights is kept, under `name`.
        """
        self._bias = bias
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.in_features = weights[0].columns
        self._int4: _Int4 | None = None
        has_int4 = choice.int4_rows > 0 and all(weight.has_int4 for weight in weights)
        if has_int4 and _Int4.fits(self.out_features, self.in_features):
            self._int4 = _Int4(*forms.arrays(f"{name} int4.1", lambda: _int4_form(weights)))
        self._int4_rows = choice.int4_rows if self._int4 is not None else 0
        self._dense: _Dense | None = None
        if self._int4 is None or choice.needs_dense:
            dtype = choice.dense_dtype
            if all(weight.is_plain for weight in weights):
                (full,) = _dense_form(weights, dtype)  # the checkpoint itself is as good
            else:
                (full,) = forms.arrays(f"{name} {dtype}.1", lambda: _dense_form(weights, dtype))
            self._dense = _Dense(full, dtype)

    def compute_at_least(self, rows: int) -> None:
        """Smaller batches of the dense form are padded to `rows` from now on."""
        if self._dense is not None:
            self._dense.least_rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] fp32 -> [T, out] fp32, a new tensor."""
        if self._dense is None or x.shape[0] <= self._int4_rows:
            assert self._int4 is not None
            y = self._int4(x)
        else:
            y = self._dense(x)
        return y if self._bias is None else y.add_(self._bias)


def _int4_form(weights: Sequence[Weight]) -> Arrays:
    """The int4 kernel's own layout, uint8, and bf16 bits [in / 32, out, 2] of scale and zero."""
    rows, columns = sum(weight.shape[0] for weight in weights), weights[0].columns
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
    pair = torch.empty(columns // GROUP, rows, 2, dtype=torch.bfloat16)
    for start, stop in row_pieces(rows, columns, multiple=_INT4_ROWS):
        codes = stacked_int4(weights, start, stop)
        q = torch.from_numpy(codes.q).int()
        packed[start:stop] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        pair[:, start:stop, 0] = torch.from_numpy(codes.scale.T)
        pair[:, start:stop, 1] = torch.from_numpy(codes.zero.T)
    return packed.numpy(), pair.view(torch.int16).numpy()


_INT4_ROWS = 64  # that torch lays out together, at most


def _dense_form(weights: Sequence[Weight], dtype: torch.dtype) -> Arrays:
    """The weights [out, in] in fp32, or as the bits of bf16; decoded some rows at a time."""
    columns, at = weights[0].columns, 0
    full = torch.empty(sum(weight.shape[0] for weight in weights), columns, dtype=dtype)
    for weight in weights:
        for start, stop in row_pieces(weight.shape[0], columns):
            full[at + start : at + stop] = torch.from_numpy(weight.decode(start, stop))
        at += weight.shape[0]
    return (full.numpy() if dtype == torch.float32 else full.view(torch.int16).numpy(),)


class _Int4:
    """aten::_weight_int4pack_mm_for_cpu: w = scale * (q - 8) + zero, groups of 32."""

    def __init__(self, packed: Array, scale_and_zero: Array) -> None:
        """As `_int4_form` makes them."""
        self._packed = torch.from_numpy(packed)
        self._scale_and_zero = torch.from_numpy(scale_and_zero).view(torch.bfloat16)

    @staticmethod
    def fits(out_features: int, in_features: int) -> bool:
        """Whether the kernel takes this shape."""
        return out_features % 16 == 0 and in_features % GROUP == 0

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self._packed, GROUP, self._scale_and_zero
        )
        return y.float()


class _Dense:
    """oneDNN's packed matrix product in fp32 or bf16."""

    def __init__(self, full: Array, dtype: torch.dtype) -> None:
        """`full`: [out, in], as `_dense_form` makes it."""
        self.least_rows = 1
        self._dtype = dtype
        weight = torch.from_numpy(full).view(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padding = padded_rows(max(rows, self.least_rows)) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._dtype), self._packed, None, "none", [], ""
        )
        return y[:rows].float()


def padded_rows(rows: int) -> int:
    """The batch size that is computed for `rows`: oneDNN compiles and keeps code for each size.

    Without it, a server that has seen every size up to 512 holds hundreds of megabytes of code.
    """
    step = 1 if rows <= 32 else 8 if rows <= 128 else 16
    return -(-rows // step) * step


_LEAST_ROWS = (1, 2, 4, 8, 16)


def make_rows_stable(linears: Sequence[Linear]) -> bool:
    """Pads the smallest batches as far as it takes that no row's bits depend on the batch size.

    oneDNN on AVX512 splits the sum of a single long row among registers, and no other batch's.
    `linears` have one shape; the first one is tried. Returns False when padding does not help.
    """
    for least in _LEAST_ROWS:
        for linear in linears:
            linear.compute_at_least(least)
        if rows_are_stable(linears[0]):
            return True
    return False


def rows_are_stable(linear: Linear, rows: Sequence[int] = (1, 2, 3, 7, 8, 17, 64, 129)) -> bool:
    """Whether a row's product is bitwise the same in batches of all these sizes, here and now."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(rows), linear.in_features, generator=generator)
    full = linear(x)
    return all(
        torch.equal(linear(x[start : start + count].contiguous()), full[start : start + count])
        for count in rows
        for start in {0, max(rows) - count}
    )
