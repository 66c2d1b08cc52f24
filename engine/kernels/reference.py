"""The kernels' maths in plain torch, a row at a time: slow, and right by inspection."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.lora import Lora
from engine.kernels.metadata import LoraBatch, SliceGroup
from engine.kernels.pointwise import HeadNorm
from engine.model.quantization import GROUP, Int4Codes, decode_fp8
from engine.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from engine.model.attention import QueryChunk
    from engine.model.kv_cache import KvCache


class ReferenceLora(Lora):
    """Multi-LoRA as a loop over rows and slices, in fp32."""

    def new_batch(self, capacity: int) -> LoraBatch:
        return LoraBatch(capacity, chunk_rows=1)

    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        self._add(group, batch, y, lambda row, a: a @ x[row].float())

    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        self._add(group, batch, y, lambda row, a: a[tokens[row]])

    def _add(
        self,
        group: SliceGroup,
        batch: LoraBatch,
        y: Tensor,
        shrink: Callable[[int, Tensor], Tensor],
    ) -> None:
        for slot, start, length in batch.chunks():
            for row in batch.rows[start : start + length].tolist():
                self._add_row(group, slot, y[row], functools.partial(shrink, row))

    def _add_row(
        self, group: SliceGroup, slot: int, y: Tensor, shrink: Callable[[Tensor], Tensor]
    ) -> None:
        for module, column, width in zip(
            group.modules, group.columns, group.out_features, strict=True
        ):
            if self.table.rank[slot, module]:
                a, b = (matrix.float() for matrix in self.matrices(slot, module))
                update = b @ shrink(a) * float(self.table.scale[slot, module])
                y[column : column + width] += update.to(y.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As pointwise.rms_norm."""
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        values = x[row].double()
        y[row] = values / (values.square().mean() + eps).sqrt() * weight
    return y


def add_rms_norm(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As pointwise.add_rms_norm."""
    hidden.copy_(hidden.float() + update.float())
    return rms_norm(hidden, weight, eps)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    token_rows: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    norm: HeadNorm | None = None,
) -> Tensor:
    """As pointwise.rotate_and_write."""
    rows, head_dim = cos.shape
    kv_heads = keys.shape[1] // head_dim
    q = torch.empty(rows, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    for row in range(rows):
        split = qkv[row].float().view(-1, head_dim)
        turned = []
        for head in range(heads + kv_heads):
            x = split[head]
            if norm is not None:
                x = x / (x.square().mean() + norm.eps).sqrt() * norm.weight[head]
            swapped = torch.cat((x[head_dim // 2 :], x[: head_dim // 2]))
            turned.append(x * cos[row] + swapped * sin[row])
        q[row] = torch.stack(turned[:heads])
        target = int(token_rows[row])
        if target >= 0:
            keys[target] = torch.cat(turned[heads:])
            values[target] = split[heads + kv_heads :].reshape(-1)
    return q


def silu_gate(gate_up: Tensor) -> Tensor:
    """As pointwise.silu_gate."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def paged_attention(
    cache: "KvCache", layer: int, chunks: "Sequence[QueryChunk]", q: Tensor
) -> Tensor:
    """Causal attention of each query over its own keys. q: [T, heads, head_dim], out the same."""
    config = cache.config
    out = torch.zeros_like(q)
    for chunk in chunks:
        for index in range(chunk.count):
            position = chunk.start + index
            first = 0 if config.sliding_window is None else position + 1 - config.sliding_window
            rows = [
                int(chunk.table[at // BLOCK_TOKENS]) * cache.rows_per_block + at % BLOCK_TOKENS
                for at in range(max(first, 0), position + 1)
            ]
            shape = (len(rows), config.kv_heads, config.head_dim)
            keys = cache.keys(layer)[rows].float().view(shape)
            values = cache.values(layer)[rows].float().view(shape)
            for head in range(config.heads):
                kv_head = head // (config.heads // config.kv_heads)
                query = q[chunk.first + index, head].float()
                weights = torch.softmax(keys[:, kv_head] @ query * config.head_dim**-0.5, 0)
                out[chunk.first + index, head] = weights @ values[:, kv_head]
    return out


def int4_linear(x: Tensor, codes: Int4Codes, dtype: torch.dtype) -> Tensor:
    """y = x W^T over a checkpoint's codes, scales and zeros rounded to `dtype`. fp32."""
    scale, zero = (torch.from_numpy(part).to(dtype).float() for part in (codes.scale, codes.zero))
    q = torch.from_numpy(codes.q).float() - 8.0
    weight = q * scale.repeat_interleave(GROUP, 1) + zero.repeat_interleave(GROUP, 1)
    return x.float() @ weight.to(x.device).T


def sample(logits: Tensor, asked: Tensor) -> Tensor:
    """As sample.sample, row by row and in fp64."""
    tokens = [
        _sample_row(row.double(), *asked[index].double().tolist())
        for index, row in enumerate(logits)
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(
    logits: Tensor, number: float, temperature: float, top_k: float, top_p: float, min_p: float
) -> int:
    if not torch.isfinite(logits.max()):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    weights = torch.exp((logits - logits.max()) / temperature)
    falling, order = weights.sort(descending=True, stable=True)
    if top_k:
        falling, order = falling[: int(top_k)], order[: int(top_k)]
    before = falling.cumsum(0) - falling
    # top-p of 1 leaves out none, however little a token adds to the sum
    in_nucleus = (before < top_p * falling.sum()) | (top_p >= 1)
    if not top_k and top_p < 1:  # tokens as likely as the last one stay
        in_nucleus |= falling >= falling[in_nucleus].min()
    in_nucleus[0] = True
    kept = torch.where(in_nucleus & (falling >= min_p), falling, 0.0)
    if not top_k:
        kept = torch.zeros_like(weights).scatter_(0, order, kept)
        order = torch.arange(len(weights))
    sums = kept.cumsum(0)
    return int(order[int((sums <= number * sums[-1]).sum().clamp(max=len(order) - 1))])


def fp8_linear(
    x: Tensor, rows: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], *, rounds: bool
) -> Tensor:
    """y = x W^T over a checkpoint's e4m3 bits, in fp64.

    `rounds`: each row of x is first divided by a step of its largest value, in fp32, and rounded to
    8 bits.
    """
    weight = torch.from_numpy(decode_fp8(rows) * scale).double()
    values = x.double().cpu()
    if rounds:
        for row in values:
            step = row.float().abs().max() / 448 if row.any() else torch.ones(())
            row.copy_((row.float() / step).to(torch.float8_e4m3fn).double() * step.double())
    return values @ weight.T
