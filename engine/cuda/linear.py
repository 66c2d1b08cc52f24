"""The base model's linears on the device: 4-bit, fp8, or plain, as the checkpoint stores them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda.int4_forms import kept_int4
from engine.cuda.upload import Upload
from engine.kernels import fp8
from engine.kernels.int4 import Int4Gemm, PackedInt4
from engine.model.form_cache import NOTHING_KEPT, FormCache
from engine.model.linear import LinearPath
from engine.model.quantization import Floats
from engine.model.weights import Weight, row_pieces

INVARIANT_ROWS = 64
"""Rows of every plain product in batch-invariant mode: one shape is one algorithm, and the bits of
a row do not depend on the rows beside it."""


@dataclass(frozen=True, slots=True)
class Precision:
    """`path`: "auto" keeps 4-bit and fp8 codes, "int4" 4-bit ones alone, "dense" neither; "fp32"
    computes everything in fp32."""

    path: LinearPath
    batch_invariant: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of weights that are not kept as codes."""
        return torch.float32 if self.path == "fp32" else torch.bfloat16

    @property
    def keeps_int4(self) -> bool:
        return self.path in ("auto", "int4")

    @property
    def keeps_fp8(self) -> bool:
        """torch chooses the algorithm of a scaled product by the batch."""
        return self.path == "auto" and not self.batch_invariant


class DeviceLinear:
    """y = x W^T (+ bias) for one weight, or for several that share their input, stacked by rows."""

    def __init__(
        self,
        weights: Sequence[Weight],
        precision: Precision,
        gemm: Int4Gemm,
        upload: Upload,
        bias: Tensor | None = None,
        *,
        name: str = "",
        forms: FormCache = NOTHING_KEPT,
    ) -> None:
        """`weights`: each [out_i, in]; `bias`: [out]. Several share a form only where all have it:
        else they are plain.

        `forms`: where repacked 4-bit codes are kept, under `name`.
        """
        self._gemm = gemm
        self._pieces = precision.batch_invariant
        self._bias = None if bias is None else bias.to(upload.torch_device, precision.dtype)
        self.int4: PackedInt4 | None = None
        self.fp8: fp8.PackedFp8 | None = None
        self.dense: Tensor | None = None  # [out, in]
        if precision.keeps_int4 and all(weight.has_int4 for weight in weights):
            self.int4 = kept_int4(forms, name, weights).moved(upload.tensor)
        elif precision.keeps_fp8 and (eights := _fp8_parts(weights)):
            self.fp8 = _uploaded_fp8(eights, upload)
        else:
            self.dense = decoded(weights, precision.dtype, upload)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out], a new tensor in the dtype of x."""
        if self.int4 is not None:
            y = self._gemm.linear(x, self.int4)
        elif self.fp8 is not None:
            y = fp8.linear(x, self.fp8)
        else:
            assert self.dense is not None
            y = in_pieces(F.linear, x, self.dense) if self._pieces else F.linear(x, self.dense)
        return y if self._bias is None else y.add_(self._bias)


class Head:
    """The lm_head: a plain weight, products in fp32. Logits rounded to bf16 would tie."""

    def __init__(self, weight: Tensor, *, batch_invariant: bool) -> None:
        """`weight`: [vocab, hidden]."""
        self.weight = weight
        self._pieces = batch_invariant

    def __call__(self, x: Tensor) -> Tensor:
        """x: [R, hidden] -> [R, vocab] fp32."""
        if not self._pieces:
            return _fp32_product(x, self.weight)
        return in_pieces(_fp32_product, x, self.weight)


def decoded(weights: Sequence[Weight], dtype: torch.dtype, upload: Upload) -> Tensor:
    """The weights on the device, stacked by rows: [sum of out, in]. Decodes a piece at a time."""
    pieces = (
        torch.from_numpy(weight.decode(start, stop)).to(dtype)
        for weight in weights
        for start, stop in row_pieces(weight.shape[0], weight.columns)
    )
    height = sum(weight.shape[0] for weight in weights)
    return upload.stacked(pieces, torch.Size((height, weights[0].columns)), dtype)


def in_pieces(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """`product` of INVARIANT_ROWS rows of x at a time, the last padded: [T, in] -> [T, out]."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % INVARIANT_ROWS))
    pieces = padded.view(-1, INVARIANT_ROWS, x.shape[1]).unbind()
    return torch.cat([product(piece, weight) for piece in pieces])[:rows]


def _fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with fp32 results, whatever the operands'."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return, unused-ignore]
    return F.linear(x.float(), weight.float())


_Fp8Part = tuple[npt.NDArray[np.uint8], Floats]


def _fp8_parts(weights: Sequence[Weight]) -> list[_Fp8Part]:
    """Of each weight, or nothing where one has none."""
    held = [part for weight in weights if (part := weight.fp8()) is not None]
    return held if len(held) == len(weights) else []


def _uploaded_fp8(parts: Sequence[_Fp8Part], upload: Upload) -> fp8.PackedFp8:
    packed = [fp8.pack(rows, scale) for rows, scale in parts]
    shape = torch.Size((sum(len(part.rows) for part in packed), packed[0].rows.shape[1]))
    scale = torch.cat([part.scale for part in packed], dim=1)
    return fp8.PackedFp8(
        upload.stacked((part.rows for part in packed), shape, packed[0].rows.dtype),
        upload.tensor(scale),
    )
