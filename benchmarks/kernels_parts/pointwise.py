"""Norms, rotary with KV write, and gates."""

from collections.abc import Iterator
from types import ModuleType

import torch

from benchmarks import roofline
from benchmarks.kernels_parts.case import Case, Target, Trial, difference, largest
from engine.kernels import pointwise, reference
from engine.kernels.pointwise import HeadNorm

EPS = 1e-5


def cases(target: Target) -> Iterator[Case]:
    for rows in (*target.sizes.decodes, target.sizes.prompt):
        yield from (_norm(target, rows), _residual(target, rows), _gate(target, rows))
        yield from (_rotary(target, rows, normed=normed) for normed in (False, True))


def _face(target: Target) -> ModuleType:
    if not target.triton:
        return pointwise
    from engine.kernels import pointwise_triton

    return pointwise_triton


def _norm(target: Target, rows: int) -> Case:
    width = target.shape.hidden

    def opened() -> Trial:
        x, weight, face = target.randn(rows, width), target.randn(width), _face(target)
        return Trial(
            lambda: face.rms_norm(x, weight, EPS),
            lambda: difference(face.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)),
        )

    return Case(f"norm, {rows} rows", roofline.norm(rows, width, residual=False), opened)


def _residual(target: Target, rows: int) -> Case:
    width = target.shape.hidden

    def opened() -> Trial:
        x, update, weight = (
            target.randn(rows, width),
            target.randn(rows, width),
            target.randn(width),
        )
        face = _face(target)

        def error() -> float:
            sums = x.clone(), x.clone()
            actual = face.add_rms_norm(sums[0], update, weight, EPS)
            expected = reference.add_rms_norm(sums[1], update, weight, EPS)
            return largest(difference(actual, expected), difference(*sums))

        return Trial(lambda: face.add_rms_norm(x, update, weight, EPS), error)

    work = roofline.norm(rows, width, residual=True)
    return Case(f"norm with residual, {rows} rows", work, opened)


def _gate(target: Target, rows: int) -> Case:
    inner = target.shape.inner

    def opened() -> Trial:
        x, face = target.randn(rows, 2 * inner), _face(target)
        return Trial(
            lambda: face.silu_gate(x),
            lambda: difference(face.silu_gate(x), reference.silu_gate(x)),
        )

    return Case(f"gate, {rows} rows", roofline.silu_gate(rows, inner), opened)


def _rotary(target: Target, rows: int, *, normed: bool) -> Case:
    heads, kv_heads, head_dim = (
        target.shape.heads, target.shape.kv_heads, target.shape.head_dim,
    )  # fmt: skip

    def opened() -> Trial:
        face, device = _face(target), target.device
        qkv = target.randn(rows, (heads + 2 * kv_heads) * head_dim)
        angles = torch.randn(rows, head_dim // 2, device=device)
        cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
        norm = None
        if normed:
            norm = HeadNorm(torch.rand(heads + kv_heads, head_dim, device=device) + 0.5, EPS)
        token_rows = torch.arange(rows, device=device).flip(0)
        keys, values = torch.zeros(2, rows, kv_heads * head_dim, device=device).bfloat16()

        def error() -> float:
            k, v, k_due, v_due = (torch.zeros_like(keys) for _ in range(4))
            q = face.rotate_and_write(qkv, cos, sin, token_rows, k, v, heads=heads, norm=norm)
            q_due = reference.rotate_and_write(
                qkv, cos, sin, token_rows, k_due, v_due, heads=heads, norm=norm
            )
            return largest(difference(q, q_due), difference(k, k_due), difference(v, v_due))

        return Trial(
            lambda: face.rotate_and_write(
                qkv, cos, sin, token_rows, keys, values, heads=heads, norm=norm
            ),
            error,
        )

    work = roofline.rotate_and_write(rows, heads, kv_heads, head_dim)
    name = f"rotary with KV write{', head norm' if normed else ''}, {rows} rows"
    return Case(name, work, opened)
