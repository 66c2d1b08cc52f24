"""The Triton face of `pointwise`: kernels, and the functions of the same names that start them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pointwise import HeadNorm

HEADS_A_PROGRAM = 8
GATE_COLUMNS = 1024


@triton.jit
def norm_rows(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, width]; with ADD the update is added to it in place
    x_stride,
    update_ptr,
    update_stride,
    weight_ptr,  # [width]
    y_ptr,
    y_stride,
    width,
    eps,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A row a program: optional sum with the update, then its norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        update = tl.load(update_ptr + row * update_stride + column, mask=inside, other=0.0)
        total = (x + update.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(  # type: ignore[no-untyped-def]
    qkv_ptr,  # [T, (HEADS + 2 KV_HEADS) * 2 HALF]
    qkv_stride,
    cos_ptr,  # [T, 2 HALF] fp32
    sin_ptr,
    token_rows_ptr,  # [T] int64
    norm_ptr,  # [HEADS + KV_HEADS, 2 HALF]
    eps,
    q_ptr,  # [T, HEADS, 2 HALF]
    keys_ptr,  # [token rows, KV_HEADS * 2 HALF]
    values_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Programs: row, block of heads (queries, then keys, then values)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None]
    rotated = head < HEADS + KV_HEADS
    within = head[:, None] * (2 * HALF) + d
    source = qkv_ptr + row * qkv_stride + within
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        factor = tl.where(rotated, tl.rsqrt(mean + eps), 1.0)[:, None]
        mask = rotated[:, None]
        low *= factor * tl.load(norm_ptr + within, mask=mask, other=1.0).to(tl.float32)
        high *= factor * tl.load(norm_ptr + HALF + within, mask=mask, other=1.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * (2 * HALF) + d)
    sin = tl.load(sin_ptr + row * (2 * HALF) + HALF + d)
    first = tl.where(rotated[:, None], low * cos - high * sin, low)
    second = tl.where(rotated[:, None], high * cos + low * sin, high)

    is_query = (head < HEADS)[:, None]
    q = q_ptr + row * (HEADS * 2 * HALF) + within
    tl.store(q, first.to(q_ptr.dtype.element_ty), mask=is_query)
    tl.store(q + HALF, second.to(q_ptr.dtype.element_ty), mask=is_query)
    token_row = tl.load(token_rows_ptr + row)
    if token_row < 0:
        return
    start = token_row * (KV_HEADS * 2 * HALF)
    is_key = ((head >= HEADS) & rotated)[:, None]
    key = keys_ptr + start + within - HEADS * 2 * HALF
    tl.store(key, first.to(keys_ptr.dtype.element_ty), mask=is_key)
    tl.store(key + HALF, second.to(keys_ptr.dtype.element_ty), mask=is_key)
    is_value = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None]
    value = values_ptr + start + within - (HEADS + KV_HEADS) * 2 * HALF
    tl.store(value, first.to(values_ptr.dtype.element_ty), mask=is_value)
    tl.store(value + HALF, second.to(values_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def gate_rows(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, 2 inner]
    x_stride,
    y_ptr,  # [T, inner]
    inner,
    COLUMNS: tl.constexpr,
):
    """Programs: row, tile of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    source = x_ptr + row * x_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * inner + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def row_warps(width: int) -> int:
    """Warps of a program that holds one row: 8 to 16 numbers a thread."""
    return min(16, max(1, triton.next_power_of_2(width) // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, eps)


def add_rms_norm(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(hidden, update, weight, eps)


def _norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        added = x if update is None else update
        norm_rows[(rows,)](
            x, x.stride(0), added, added.stride(0), weight, y, y.stride(0), width, eps,
            ADD=update is not None,
            WIDTH=triton.next_power_of_2(width),
            num_warps=row_warps(width),
        )  # fmt: skip
    return y


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
    """Raises ValueError when the size of a head is no power of two."""
    rows, head_dim = cos.shape
    if head_dim & (head_dim - 1):
        raise ValueError(f"heads of {head_dim} are not supported: a power of two is due")
    kv_heads = keys.shape[1] // head_dim
    q = torch.empty(rows, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if rows:
        rotate_heads[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_A_PROGRAM))](
            qkv, qkv.stride(0), cos, sin, token_rows,
            cos if norm is None else norm.weight, 0.0 if norm is None else norm.eps,
            q, keys, values,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            BLOCK=HEADS_A_PROGRAM,
            NORM=norm is not None,
            num_warps=2,
        )  # fmt: skip
    return q


def silu_gate(gate_up: Tensor) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_rows[(rows, triton.cdiv(inner, GATE_COLUMNS))](
            gate_up, gate_up.stride(0), y, inner, COLUMNS=GATE_COLUMNS, num_warps=4
        )
    return y
