"""The arithmetic of weighted aliases: which targets are allowed, and which one a request gets."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import InvalidRequest

MAX_TARGETS = 8
WHOLE = 100


@dataclass(frozen=True, slots=True)
class Target:
    """A version and its share of the requests, in percent."""

    version_id: str
    weight: int


def check_weights(weights: Sequence[tuple[int, int]]) -> None:
    """Refuses targets (version number, weight) that do not share out exactly 100 percent."""
    if not 1 <= len(weights) <= MAX_TARGETS:
        raise InvalidRequest(
            f"an alias has 1 to {MAX_TARGETS} targets, not {len(weights)}",
            code="invalid_alias_targets",
            param="targets",
        )
    seen: set[int] = set()
    for index, (number, weight) in enumerate(weights):
        if number in seen:
            raise InvalidRequest(
                f"version {number} is named twice; give each version one weight",
                code="invalid_alias_targets",
                param=f"targets[{index}].version",
            )
        seen.add(number)
        if not 1 <= weight <= WHOLE:
            raise InvalidRequest(
                f"a weight is a whole percent from 1 to {WHOLE}, and version {number} has "
                f"{weight}; leave out a version that should get no requests",
                code="invalid_alias_weights",
                param=f"targets[{index}].weight",
            )
    total = sum(weight for _, weight in weights)
    if total != WHOLE:
        raise InvalidRequest(
            f"the weights must sum to {WHOLE} percent; these sum to {total}",
            code="invalid_alias_weights",
            param="targets",
        )


def pick(targets: Sequence[Target], request_id: str, *, key: bytes, alias: str) -> Target:
    """The target of this request: the same request always gets the same one.

    `key` is the tenant's (at most 64 bytes), and `alias` names the adapter too: so no request id
    tells how another tenant or another alias decides. The 64 hashed bits are scaled to
    [0, 100), which favours no target by more than 100 / 2**64.
    """
    if len(targets) == 1:
        return targets[0]
    digest = hashlib.blake2b(f"{alias}\0{request_id}".encode(), key=key, digest_size=8).digest()
    point = int.from_bytes(digest, "big") * WHOLE >> 64
    for target in targets:
        point -= target.weight
        if point < 0:
            return target
    return targets[-1]
