"""Linears of 4-bit weights with a scale (and zero) for each group: y = x W^T.

    w = scale * (q - 8) + zero      q 0..15, one scale and zero for 32, 64 or 128 columns

The codes are repacked once, when a model is loaded, into the layout that is defined here and
nowhere else. The faces: Triton (`int4_cuda`) where a GPU is, `TorchInt4` elsewhere, and the plain
`reference.int4_linear` over the codes as the checkpoint has them. On the CPU the model itself uses
torch's own 4-bit kernel (`engine.model.linear`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.quantization import GROUP, Int4Codes
from engine.model.weights import row_pieces

ROWS = 64
"""Rows of W in a packed tile."""
COLUMNS = 128
"""Columns of W in a packed tile: four planes of 32, one a nibble."""
PLANE = COLUMNS // 4
PADDED_ROWS = 128
"""W is padded to a multiple: no tile of a kernel has more."""


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A matrix [out, in]; padding has weight 0.

    In tile (i, k) nibble p of word (r, j) is q[64 i + r, 128 k + 32 p + j]: a tile is 4 KiB in one
    piece, and the four planes of a word are 32 neighbouring columns each, so that no column is
    moved within a thread.
    """

    words: Tensor  # int16 [padded out / 64, padded in / 128, 64, 32]
    scale: Tensor  # bf16 or fp16 [padded in / group, padded out]
    zero: Tensor | None  # as scale; None where every zero is 0
    out_features: int
    in_features: int
    group: int

    @property
    def padded(self) -> tuple[int, int]:
        """(out, in) of the packed matrix."""
        return self.words.shape[0] * ROWS, self.words.shape[1] * COLUMNS

    @property
    def nbytes(self) -> int:
        parts = (self.words, self.scale, *(() if self.zero is None else (self.zero,)))
        return sum(part.numel() * part.element_size() for part in parts)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PackedInt4":
        """With each of its tensors where `move` puts it."""
        zero = None if self.zero is None else move(self.zero)
        return replace(self, words=move(self.words), scale=move(self.scale), zero=zero)

    def dequantize(self) -> Tensor:
        """fp32 [out, in]."""
        rows, columns = self.padded
        shifts = torch.arange(0, 16, 4, device=self.words.device, dtype=torch.int32)
        q = (self.words.int()[..., None, :] >> shifts[:, None]) & 15  # [n, k, 64, 4, 32]
        w = (q.transpose(1, 2).reshape(rows, -1, self.group) - 8).float()
        w *= self.scale.T.float()[..., None]
        if self.zero is not None:
            w += self.zero.T.float()[..., None]
        return w.view(rows, columns)[: self.out_features, : self.in_features]


def pack(codes: Int4Codes, dtype: torch.dtype, device: torch.device | str = "cpu") -> PackedInt4:
    """The codes in the kernels' layout; scales rounded to `dtype`, bf16 or fp16."""
    out_features, in_features = codes.q.shape
    packed = pack_rows(codes.rows, out_features, in_features, dtype)
    return packed.moved(lambda part: part.to(device))


def pack_rows(
    read: Callable[[int, int], Int4Codes], out_features: int, in_features: int, dtype: torch.dtype
) -> PackedInt4:
    """`pack`, on the host, of a matrix whose codes of rows start..stop `read` gives piece by piece.

    Groups of the checkpoint that are larger than 32 are found again by their equal scales.
    """
    rows = -(-out_features // PADDED_ROWS) * PADDED_ROWS
    columns = -(-in_features // COLUMNS) * COLUMNS
    words = np.full((rows // ROWS, columns // COLUMNS, ROWS, PLANE), 0x8888, np.uint16)
    scale = np.empty((out_features, in_features // GROUP), np.float32)
    zero = np.empty_like(scale)
    for start, stop in row_pieces(out_features, in_features, multiple=ROWS):
        codes = read(start, stop)
        tiles = _tiles(codes.q, columns)
        words[start // ROWS : start // ROWS + len(tiles)] = tiles
        scale[start:stop], zero[start:stop] = codes.scale, codes.zero
    group = _group(scale, zero)

    def placed(values: npt.NDArray[np.float32]) -> Tensor:
        full = torch.zeros(columns // group, rows, dtype=dtype)
        own = torch.from_numpy(values[:, :: group // GROUP].T)
        full[: own.shape[0], :out_features] = own
        return full

    return PackedInt4(
        torch.from_numpy(words.view(np.int16)),
        placed(scale),
        placed(zero) if zero.any() else None,
        out_features,
        in_features,
        group,
    )


def _tiles(q: npt.NDArray[np.uint8], columns: int) -> npt.NDArray[np.uint16]:
    """q: [out, in] -> [tiles, columns / 128, 64, 32], padded with the code of weight 0."""
    full = np.full((-(-q.shape[0] // ROWS) * ROWS, columns), 8, np.uint16)
    full[: q.shape[0], : q.shape[1]] = q
    planes = full.reshape(-1, ROWS, columns // COLUMNS, 4, PLANE).transpose(0, 2, 1, 3, 4)
    words = np.zeros((*planes.shape[:3], PLANE), np.uint16)
    for plane in range(4):
        words |= planes[..., plane, :] << np.uint16(4 * plane)
    return words


def _group(scale: npt.NDArray[np.float32], zero: npt.NDArray[np.float32]) -> int:
    """The largest of 128, 64 and 32 whose columns share their scale and zero."""
    for group in (128, 64):
        repeats = group // GROUP
        if scale.shape[1] % repeats == 0 and all(
            np.array_equal(np.repeat(part[:, ::repeats], repeats, axis=1), part)
            for part in (scale, zero)
        ):
            return group
    return GROUP


class Int4Gemm(ABC):
    """Multiplies by packed weights. Calls come from one thread at a time."""

    @abstractmethod
    def linear(self, x: Tensor, weight: PackedInt4) -> Tensor:
        """x: [T, in], rows contiguous, in the dtype of the scales -> [T, out], a new tensor."""


class TorchInt4(Int4Gemm):
    """Dequantizes the whole weight, then one product in fp32."""

    def linear(self, x: Tensor, weight: PackedInt4) -> Tensor:
        return F.linear(x.float(), weight.dequantize()).to(x.dtype)


def open_int4(
    device: torch.device, *, max_out_features: int, batch_invariant: bool = False
) -> Int4Gemm:
    """The fastest face for a device. With `batch_invariant`, no bit of a row depends on others."""
    if device.type == "cuda":
        from engine.kernels.int4_cuda import TritonInt4

        return TritonInt4(
            device, max_out_features=max_out_features, batch_invariant=batch_invariant
        )
    return TorchInt4()
