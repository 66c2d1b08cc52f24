"""Linears of fp8 weights (e4m3, https://arxiv.org/abs/2209.05433), a scale for each output.

Where the device multiplies fp8 (Hopper, and the CPU in its own way), the rows of x are rounded to
fp8 by their largest value and torch's scaled product does the rest; elsewhere the weight is
dequantized. The plain face is `reference.fp8_linear`. torch chooses its algorithm by the batch, so
this is not for batch-invariant mode.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0
"""The largest number of e4m3."""
MULTIPLE = 16
"""Of which both sizes of a scaled product must be a multiple."""


@dataclass(frozen=True, slots=True)
class PackedFp8:
    rows: Tensor  # e4m3 [out, in]
    scale: Tensor  # fp32 [1, out]

    def dequantize(self) -> Tensor:
        """fp32 [out, in]."""
        return self.rows.float() * self.scale.T


def pack(
    rows: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    device: torch.device | str = "cpu",
) -> PackedFp8:
    """As a checkpoint has them. rows: the bits, [out, in]; scale: [1, 1] or [out, 1]."""
    full = np.broadcast_to(scale.reshape(1, -1), (1, rows.shape[0]))
    return PackedFp8(
        torch.from_numpy(np.array(rows)).view(torch.float8_e4m3fn).to(device),
        torch.from_numpy(np.array(full, np.float32)).to(device),
    )


def multiplies_fp8(weight: PackedFp8) -> bool:
    """Whether a scaled product takes this weight where it lies."""
    if any(size % MULTIPLE for size in weight.rows.shape):
        return False
    if not weight.rows.is_cuda:
        return True
    return torch.cuda.get_device_capability(weight.rows.device) >= (9, 0)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, in] as e4m3 and a scale for each row, fp32 [T, 1]. A row of zeros keeps scale 1."""
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    return (values / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def linear(x: Tensor, weight: PackedFp8) -> Tensor:
    """x: [T, in] -> [T, out], a new tensor in the dtype of x."""
    if not multiplies_fp8(weight):
        return F.linear(x, weight.dequantize().to(x.dtype))
    if not x.shape[0]:
        return x.new_empty(0, weight.rows.shape[0])
    rounded, scale = round_rows(x)
    y: Tensor = torch._scaled_mm(
        rounded, weight.rows.T, scale_a=scale, scale_b=weight.scale, out_dtype=torch.bfloat16
    )
    return y.to(x.dtype)
