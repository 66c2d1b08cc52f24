"""What surrounds a block's matrix products: norm with residual, rotary with KV write, gating.

Each operation reads its rows once. The faces: Triton (`pointwise_triton`) where the tensors lie on
a GPU, the torch operations below elsewhere, and the plain `reference`. Rows are bf16, fp16 or fp32;
sums are fp32. No row's bits depend on the rows beside it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadNorm(NamedTuple):
    """The norm of every query and key head before it is rotated."""

    weight: Tensor  # [heads + kv_heads, head_dim]
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x: [T, hidden], weight: [hidden]."""
    if x.is_cuda:
        from engine.kernels import pointwise_triton

        return pointwise_triton.rms_norm(x, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden += update in place, then the norm of the rounded sum. Both: [T, hidden]."""
    if hidden.is_cuda:
        from engine.kernels import pointwise_triton

        return pointwise_triton.add_rms_norm(hidden, update, weight, eps)
    hidden.add_(update)
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
    """The rotated queries [T, heads, head_dim]; rotated keys and the values go to the cache.

    qkv: [T, (heads + 2 kv_heads) * head_dim]. cos, sin: [T, head_dim] fp32 as in RopeAngles, sin
    negated in the first half. token_rows: [T] int64, see KvCache; below 0 nothing is written, as
    for the padding of a captured graph. keys, values: one layer's views of the cache,
    [token rows, kv_heads * head_dim]. `norm` is applied to queries and keys before the rotation.
    """
    if qkv.is_cuda:
        from engine.kernels import pointwise_triton

        return pointwise_triton.rotate_and_write(
            qkv, cos, sin, token_rows, keys, values, heads=heads, norm=norm
        )
    rows, head_dim = cos.shape
    rotated = heads + keys.shape[1] // head_dim
    split = rotated * head_dim
    qk = qkv[:, :split].float().view(rows, rotated, head_dim)
    if norm is not None:
        qk = F.rms_norm(qk, (head_dim,), None, norm.eps) * norm.weight
    qk = torch.roll(qk, head_dim // 2, dims=-1).mul_(sin[:, None]).add_(qk * cos[:, None])
    written = token_rows >= 0
    targets = token_rows[written]
    keys.index_copy_(0, targets, qk[written, heads:].flatten(1).to(keys.dtype))
    values.index_copy_(0, targets, qkv[written, split:].to(values.dtype))
    return qk[:, :heads].to(qkv.dtype)


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 * inner], the gates first -> [T, inner]."""
    if gate_up.is_cuda:
        from engine.kernels import pointwise_triton

        return pointwise_triton.silu_gate(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)
