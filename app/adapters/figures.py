"""Figures about an adapter's behaviour, from what the engine answered. Pure functions."""

import math
from collections.abc import Sequence

from engine.types import TokenLogprobs

FLOOR = 1e-9
"""Probability below which two models' difference is not counted on."""
MAX_PERIOD = 16
MIN_REPEATS = 4
MIN_LOOP_TOKENS = 16


def divergence_nats(base: TokenLogprobs, adapter: TokenLogprobs) -> float:
    """KL(base || adapter) at one position, from each side's k most likely tokens, in nats.

    The tokens that base names are buckets of their own, all others share the rest. What the
    adapter does not name is at most as likely as its least likely named token.
    """
    p = _named(base)
    q_named = _named(adapter)
    missing = [token for token in p if token not in q_named]
    cap = min(q_named.values(), default=0.0)
    left = max(0.0, 1.0 - math.fsum(q_named.values()))
    share = min(cap, left / len(missing)) if missing else 0.0
    q = {token: q_named.get(token, share) for token in p}
    total = math.fsum(p[t] * math.log(max(p[t], FLOOR) / max(q[t], FLOOR)) for t in p)
    p_rest = max(0.0, 1.0 - math.fsum(p.values()))
    q_rest = max(0.0, 1.0 - math.fsum(q.values()))
    if p_rest > FLOOR:
        total += p_rest * math.log(p_rest / max(q_rest, FLOOR))
    return max(0.0, total)


def _named(entry: TokenLogprobs) -> dict[int, float]:
    """token -> probability of what one position names: the k most likely and the token itself."""
    named = {token: math.exp(logprob) for token, logprob in entry.top}
    named.setdefault(entry.token_id, math.exp(entry.logprob))
    return named


def mean_divergence_nats(
    base: Sequence[TokenLogprobs], adapter: Sequence[TokenLogprobs]
) -> float | None:
    """The mean over positions; None when there are none to compare."""
    pairs = list(zip(base, adapter, strict=True))
    if not pairs:
        return None
    return math.fsum(divergence_nats(b, a) for b, a in pairs) / len(pairs)


def loops(tokens: Sequence[int]) -> bool:
    """Whether the answer ends in one short phrase over and over.

    True when the last tokens are at least 4 repeats, and 16 tokens, of a period of up to 16.
    """
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_REPEATS * period, MIN_LOOP_TOKENS)
        if length > len(tokens):
            continue
        tail = tokens[-length:]
        if all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


def all_finite(entries: Sequence[TokenLogprobs]) -> bool:
    """Whether every probability is a number; a token ruled out (-inf) among the top is one too."""
    return all(
        math.isfinite(entry.logprob) and not any(math.isnan(value) for _, value in entry.top)
        for entry in entries
    )


def per_token_ms(total_ms: float, ttft_ms: float | None, tokens: int) -> float | None:
    """Milliseconds for each token after the first; None for fewer than two tokens."""
    if ttft_ms is None or tokens < 2:
        return None
    return (total_ms - ttft_ms) / (tokens - 1)
