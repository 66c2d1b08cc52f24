"""The compiled pass of multi-LoRA on the CPU: an adapter's bytes are read once for all its rows.

Units of work are (chunk, slice, part of the slice's columns). Threads draw them from a counter, and
each computes shrink and expand of its unit alone, so no unit waits for another. bf16 is widened in
registers. `lora_cpu` fills the argument block and starts the threads.
"""

# mypy: ignore-errors
# (numba infers its own types; mypy would check Python's meaning of this code, which never runs)

import ctypes
import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_FAST = {"reassoc", "contract", "nsz"}  # sums may be vectorised; NaN and infinity stay themselves


# --------------------------------------------------------------------------- what Python lacks


@intrinsic
def _widen(typing: Any, value: Any) -> Any:
    """fp32 of a bf16 bit pattern (uint16) or of an fp32 number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value != types.uint16:
            return args[0]
        bits = ir.IntType(32)
        shifted = builder.shl(builder.zext(args[0], bits), ir.Constant(bits, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(value), code


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """The address as a pointer."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(address), code


@intrinsic
def _draw(typing: Any, counter: Any) -> Any:
    """Adds one to the int64 that a pointer names, atomically, and returns what was there."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.bitcast(args[0], ir.PointerType(word))
        return builder.atomic_rmw("add", pointer, ir.Constant(word, 1), "monotonic")

    return types.int64(counter), code


# --------------------------------------------------------------------------- the arithmetic


@numba.njit(fastmath=_FAST, nogil=True, cache=True)
def _dot_1(x, w, base, n, k, y, scale):
    """y[j] += scale * x . W[j] for one row; W [n, k] begins at element `base` of w."""
    j = 0
    while j + 4 <= n:
        at = base + j * k
        w0, w1 = w[at : at + k], w[at + k : at + 2 * k]
        w2, w3 = w[at + 2 * k : at + 3 * k], w[at + 3 * k : at + 4 * k]
        s0 = s1 = s2 = s3 = np.float32(0)
        for i in range(k):
            s0 += x[i] * _widen(w0[i])
            s1 += x[i] * _widen(w1[i])
            s2 += x[i] * _widen(w2[i])
            s3 += x[i] * _widen(w3[i])
        y[j] += scale * s0
        y[j + 1] += scale * s1
        y[j + 2] += scale * s2
        y[j + 3] += scale * s3
        j += 4
    while j < n:
        row = w[base + j * k : base + (j + 1) * k]
        s0 = np.float32(0)
        for i in range(k):
            s0 += x[i] * _widen(row[i])
        y[j] += scale * s0
        j += 1


@numba.njit(fastmath=_FAST, nogil=True, cache=True)
def _dot_2(x0, x1, w, base, n, k, y0, y1, scale):
    """`_dot_1` for two rows: every weight is widened once for both."""
    j = 0
    while j + 4 <= n:
        at = base + j * k
        w0, w1 = w[at : at + k], w[at + k : at + 2 * k]
        w2, w3 = w[at + 2 * k : at + 3 * k], w[at + 3 * k : at + 4 * k]
        s0 = s1 = s2 = s3 = np.float32(0)
        t0 = t1 = t2 = t3 = np.float32(0)
        for i in range(k):
            a, b = x0[i], x1[i]
            v0, v1, v2, v3 = _widen(w0[i]), _widen(w1[i]), _widen(w2[i]), _widen(w3[i])
            s0 += a * v0
            s1 += a * v1
            s2 += a * v2
            s3 += a * v3
            t0 += b * v0
            t1 += b * v1
            t2 += b * v2
            t3 += b * v3
        y0[j] += scale * s0
        y0[j + 1] += scale * s1
        y0[j + 2] += scale * s2
        y0[j + 3] += scale * s3
        y1[j] += scale * t0
        y1[j + 1] += scale * t1
        y1[j + 2] += scale * t2
        y1[j + 3] += scale * t3
        j += 4
    while j < n:
        row = w[base + j * k : base + (j + 1) * k]
        s0 = t0 = np.float32(0)
        for i in range(k):
            v0 = _widen(row[i])
            s0 += x0[i] * v0
            t0 += x1[i] * v0
        y0[j] += scale * s0
        y1[j] += scale * t0
        j += 1


@numba.njit(fastmath=_FAST, nogil=True, cache=True)
def _dot_4(x0, x1, x2, x3, w, base, n, k, y0, y1, y2, y3, scale):
    """`_dot_1` for four rows."""
    j = 0
    while j < n:
        at = base + j * k
        pair = j + 1 < n
        w0 = w[at : at + k]
        w1 = w[at + k : at + 2 * k] if pair else w0
        s0 = s1 = s2 = s3 = np.float32(0)
        t0 = t1 = t2 = t3 = np.float32(0)
        for i in range(k):
            v0, v1 = _widen(w0[i]), _widen(w1[i])
            s0 += x0[i] * v0
            s1 += x1[i] * v0
            s2 += x2[i] * v0
            s3 += x3[i] * v0
            t0 += x0[i] * v1
            t1 += x1[i] * v1
            t2 += x2[i] * v1
            t3 += x3[i] * v1
        y0[j] += scale * s0
        y1[j] += scale * s1
        y2[j] += scale * s2
        y3[j] += scale * s3
        if pair:
            y0[j + 1] += scale * t0
            y1[j + 1] += scale * t1
            y2[j + 1] += scale * t2
            y3[j + 1] += scale * t3
        j += 2


# --------------------------------------------------------------------------- units of work


class Call(ctypes.Structure):
    """The arguments of one call: addresses in bytes, strides and counts in elements."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("next_unit", "units"),  # the counter that threads draw from, and where it ends
            *("x", "x_stride", "in_features"),  # fp32 [T, in]
            "tokens",  # int64 [T]; not 0 for an embedding
            *("y", "y_stride"),  # fp32 [T, columns]
            *("weights", "elements"),  # the arena, in elements of the adapter dtype
            *("a", "b", "rank", "scale", "modules"),  # AdapterTable [slots, modules]
            *("slices", "slice_count", "parts"),  # int64 [3, slice_count]: module, column, width
            *("batch", "capacity", "chunks"),  # LoraBatch.buffer
            "invariant",  # rows must not depend on each other; not read here: chunks have one row
            "max_rank",  # of any adapter; not read here
        )
    ]


_CALL = numba.from_dtype(np.dtype(Call))


@numba.njit(nogil=True, cache=True)
def _row(address, stride, row, column, count):
    """`count` elements from `column` on, of one row of an fp32 matrix."""
    return numba.carray(_pointer(address + (row * stride + column) * 4), (count,), np.float32)


@numba.njit(nogil=True, cache=True)
def _entry(address, index, kind):
    """One element of an array."""
    return numba.carray(_pointer(address), (index + 1,), kind)[index]


@numba.njit(nogil=True, cache=True)
def _unit(call, w, unit):
    """Shrink and expand of one chunk for one part of one slice."""
    part, piece = unit % call.parts, unit // call.parts
    index, chunk = piece % call.slice_count, piece // call.slice_count
    module, column, columns = numba.carray(_pointer(call.slices), (3, call.slice_count), np.int64)[
        :, index
    ]
    first = columns * part // call.parts
    width = columns * (part + 1) // call.parts - first
    batch = numba.carray(_pointer(call.batch + 4), (4, call.capacity), np.int32)
    start, count, slot = batch[1, chunk], batch[2, chunk], batch[3, chunk]
    rows = batch[0, start : start + count]

    entry = slot * call.modules + module
    rank = np.int64(_entry(call.rank, entry, np.int32))
    if rank == 0 or width == 0:
        return
    a = _entry(call.a, entry, np.int64)
    b = _entry(call.b, entry, np.int64) + first * rank
    scale = _entry(call.scale, entry, np.float32)

    hidden = np.zeros((count, rank), np.float32)
    if call.tokens:
        for i in range(count):
            token = _entry(call.tokens, rows[i], np.int64)
            for j in range(rank):
                hidden[i, j] = _widen(w[a + token * rank + j])
    else:
        _shrink(call.x, call.x_stride, call.in_features, rows, w, a, rank, hidden)
    _expand(call.y, call.y_stride, column + first, width, rows, w, b, rank, hidden, scale)


@numba.njit(nogil=True, cache=True)
def _shrink(x, stride, k, rows, w, a, rank, hidden):
    """hidden [count, rank] += x[rows] A^T."""
    one = np.float32(1)
    count = len(rows)
    i = 0
    while i + 4 <= count:
        x0, x1 = _row(x, stride, rows[i], 0, k), _row(x, stride, rows[i + 1], 0, k)
        x2, x3 = _row(x, stride, rows[i + 2], 0, k), _row(x, stride, rows[i + 3], 0, k)
        h0, h1, h2, h3 = hidden[i], hidden[i + 1], hidden[i + 2], hidden[i + 3]
        _dot_4(x0, x1, x2, x3, w, a, rank, k, h0, h1, h2, h3, one)
        i += 4
    if i + 2 <= count:
        x0, x1 = _row(x, stride, rows[i], 0, k), _row(x, stride, rows[i + 1], 0, k)
        _dot_2(x0, x1, w, a, rank, k, hidden[i], hidden[i + 1], one)
        i += 2
    if i < count:
        _dot_1(_row(x, stride, rows[i], 0, k), w, a, rank, k, hidden[i], one)


@numba.njit(nogil=True, cache=True)
def _expand(y, stride, column, n, rows, w, b, rank, hidden, scale):
    """y[rows, column : column + n] += scale * hidden B^T."""
    count = len(rows)
    i = 0
    while i + 4 <= count:
        y0, y1 = _row(y, stride, rows[i], column, n), _row(y, stride, rows[i + 1], column, n)
        y2, y3 = _row(y, stride, rows[i + 2], column, n), _row(y, stride, rows[i + 3], column, n)
        h0, h1, h2, h3 = hidden[i], hidden[i + 1], hidden[i + 2], hidden[i + 3]
        _dot_4(h0, h1, h2, h3, w, b, n, rank, y0, y1, y2, y3, scale)
        i += 4
    if i + 2 <= count:
        y0, y1 = _row(y, stride, rows[i], column, n), _row(y, stride, rows[i + 1], column, n)
        _dot_2(hidden[i], hidden[i + 1], w, b, n, rank, y0, y1, scale)
        i += 2
    if i < count:
        _dot_1(hidden[i], w, b, n, rank, _row(y, stride, rows[i], column, n), scale)


@functools.cache
def worker(element):
    """The compiled part of one thread in a call over an arena of `element`s.

    Takes the address of a `Call`. Compiled at its first use (seconds), then read from numba's
    cache beside this file.
    """

    @numba.cfunc(types.void(types.CPointer(_CALL)), cache=True)
    def work(arguments):
        call = numba.carray(arguments, (1,))[0]
        w = numba.carray(_pointer(call.weights), (call.elements,), element)
        unit = _draw(arguments)
        while unit < call.units:
            _unit(call, w, unit)
            unit = _draw(arguments)

    return work
