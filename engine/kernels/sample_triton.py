"""The Triton face of `sample`: one program a row, no sort.

A token's *depth* is (largest logit - its own) / temperature, at least 0; the bits of such numbers,
read as integers, have the same order. So every edge (the k-th likeliest, the end of top-p, the
token that is drawn) is found by halving an interval of integers, each time with one pass over the
row: 31 passes over logits that lie in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
_DEEPEST = 0x7F7FFFFF  # the largest finite number


@triton.jit
def _depth_bits(row_ptr, at, vocab, largest, temperature):  # type: ignore[no-untyped-def]
    """Depths of a block of tokens as ordered integers; those that cannot be drawn lie beyond."""
    logit = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return ((largest - logit) / temperature).to(tl.int32, bitcast=True)


@triton.jit
def _weight(bits):  # type: ignore[no-untyped-def]
    """exp(-depth): 1 for the likeliest token."""
    return tl.exp(-(bits.to(tl.float32, bitcast=True)))


@triton.jit
def _above(row_ptr, vocab, largest, temperature, edge, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens are no deeper than `edge`, and their weight."""
    count = 0
    mass = 0.0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        bits = _depth_bits(row_ptr, at, vocab, largest, temperature)
        above = bits <= edge
        count += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, _weight(bits), 0.0), 0)
    return count, mass


@triton.jit
def _edge(  # type: ignore[no-untyped-def]
    row_ptr,
    vocab,
    largest,
    temperature,
    deepest,
    wanted_count,
    wanted_mass,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least edge, at most `deepest`, above which lie so many tokens and so much weight.

    `MORE`: more weight than that.
    """
    low = 0
    high = deepest
    for _ in range(31):
        middle = low + (high - low) // 2
        count, mass = _above(row_ptr, vocab, largest, temperature, middle, BLOCK)
        enough = (mass > wanted_mass) if MORE else (mass >= wanted_mass)
        enough = enough & (count >= wanted_count)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def sample_rows(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, vocab]
    logits_stride,
    asked_ptr,  # [R, 5] fp32
    tokens_ptr,  # [R] int64
    vocab,
    deepest,  # _DEEPEST
    BLOCK: tl.constexpr,
):
    """A row a program."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    number = tl.load(asked_ptr + 5 * row)
    temperature = tl.load(asked_ptr + 5 * row + 1)
    top_k = tl.load(asked_ptr + 5 * row + 2).to(tl.int32)
    top_p = tl.load(asked_ptr + 5 * row + 3)
    min_p = tl.load(asked_ptr + 5 * row + 4)

    largest = float("-inf")
    likeliest = -1
    broken = 0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        broken += tl.sum(((logit != logit) | (logit == float("inf"))).to(tl.int32), 0)
        logit = tl.where(logit == logit, logit, float("-inf"))
        highest = tl.max(logit, 0)
        place = tl.min(tl.where(logit == highest, at, vocab), 0)
        likeliest = tl.where(highest > largest, place, likeliest)
        largest = tl.maximum(largest, highest)
    if (broken > 0) | (likeliest < 0):
        tl.store(tokens_ptr + row, -1)
        return
    if temperature <= 0.0:
        tl.store(tokens_ptr + row, likeliest)
        return

    edge = deepest
    kth = deepest
    count, mass = _above(row_ptr, vocab, largest, temperature, deepest, BLOCK)
    kept = tl.minimum(top_k, count)
    if top_k > 0:
        kth = _edge(row_ptr, vocab, largest, temperature, deepest, kept, 0.0, False, BLOCK)
        before, mass = _above(row_ptr, vocab, largest, temperature, kth - 1, BLOCK)
        mass += (kept - before) * _weight(kth)
        edge = kth
    wanted = top_p * mass
    cut = deepest
    if top_p < 1.0:
        cut = _edge(row_ptr, vocab, largest, temperature, edge, 1, wanted, False, BLOCK)
        edge = cut
    if min_p > 0.0:
        edge = tl.minimum(edge, tl.abs(tl.log(min_p)).to(tl.int32, bitcast=True))

    token = likeliest
    upto, total = _above(row_ptr, vocab, largest, temperature, edge, BLOCK)
    if top_k > 0:  # in falling order; of equal tokens at the edge, the first ones
        before, mass = _above(row_ptr, vocab, largest, temperature, edge - 1, BLOCK)
        equal = upto - before
        if edge == kth:
            equal = tl.minimum(equal, kept - before)
        if (top_p < 1.0) & (edge == cut):
            due = tl.ceil((wanted - mass) / _weight(edge)).to(tl.int32)
            equal = tl.minimum(equal, tl.maximum(due, 1))
        target = number * (mass + equal * _weight(edge))
        drawn = _edge(row_ptr, vocab, largest, temperature, edge, 1, target, True, BLOCK)
        before, mass = _above(row_ptr, vocab, largest, temperature, drawn - 1, BLOCK)
        if drawn < edge:
            upto, _mass = _above(row_ptr, vocab, largest, temperature, drawn, BLOCK)
            equal = upto - before
        skip = tl.floor((target - mass) / _weight(drawn)).to(tl.int32)
        skip = tl.maximum(tl.minimum(skip, equal - 1), 0)
        passed = 0
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            same = _depth_bits(row_ptr, at, vocab, largest, temperature) == drawn
            order = passed + tl.cumsum(same.to(tl.int32), 0)
            place = tl.max(tl.where(same & (order == skip + 1), at, -1), 0)
            token = tl.where(place >= 0, place, token)
            passed += tl.sum(same.to(tl.int32), 0)
    else:  # in the vocabulary's order
        target = number * total
        before_mass = 0.0
        found = 0
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            bits = _depth_bits(row_ptr, at, vocab, largest, temperature)
            weight = tl.where(bits <= edge, _weight(bits), 0.0)
            beyond = (weight > 0.0) & (before_mass + tl.cumsum(weight, 0) > target)
            place = tl.min(tl.where(beyond, at, vocab), 0)
            hit = place < vocab
            # the last token of any weight stands in where rounding hides the end of the sum
            place = tl.where(hit, place, tl.max(tl.where(weight > 0.0, at, -1), 0))
            token = tl.where((found == 0) & (place >= 0), place, token)
            found = tl.where(hit, 1, found)
            before_mass += tl.sum(weight, 0)
    tl.store(tokens_ptr + row, token)


def sample(logits: Tensor, asked: Tensor) -> Tensor:
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sample_rows[(rows,)](
            logits, logits.stride(0), asked, tokens, vocab, _DEEPEST, BLOCK=BLOCK, num_warps=WARPS
        )
    return tokens
