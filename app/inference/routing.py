"""Which engine gets a request: least loaded, residency counted in favour. Pure; no clock, no I/O.

    cost = running + WAITING_WEIGHT x waiting - bonus(tier of the adapter there)

Running requests share steps, so they cost little; a request that waits says that an engine is
full. The bonus keeps an adapter where it lies until its engine is that much busier than another,
then requests spill over and the adapter is loaded there too. Equal costs are split by a hash of
what is routed (rendezvous), so cold adapters spread over the engines and each keeps its place.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

WAITING_WEIGHT = 2.0
RESIDENT_BONUS = {"device": 4.0, "host": 2.0, "loading": 2.0}
"""How much busier an engine may be than another before a request leaves its adapter behind."""
SPILL_WAITING = 8
"""With so many requests waiting, an engine's residency counts for nothing."""
QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine that takes requests, as far as routing cares.

    `running` counts what this process has in flight where that is more than the engine last said.
    """

    address: str
    running: int
    waiting: int = 0
    tier: str | None = None  # of the wanted adapter there; None: nowhere on it


def cost(candidate: Candidate) -> float:
    """What one more request is charged there, in requests."""
    bonus = RESIDENT_BONUS.get(candidate.tier or "", 0.0)
    if candidate.waiting >= SPILL_WAITING:
        bonus = 0.0
    return candidate.running + WAITING_WEIGHT * candidate.waiting - bonus


def choose(candidates: Sequence[Candidate], key: str) -> Candidate:
    """The cheapest of `candidates` (at least one); `key` names what is routed, for ties.

    An engine that has set the adapter aside is taken only when every engine has.
    """
    willing = [c for c in candidates if c.tier != QUARANTINED] or list(candidates)
    return min(willing, key=lambda candidate: (cost(candidate), _draw(key, candidate.address)))


def _draw(key: str, address: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{address}".encode(), digest_size=8).digest()
