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
    numbers = [number for number, _ in weights]
    if len(set(numbers)) != len(numbers):
        raise InvalidRequest(
            "a version is named twice; give each version one weight",
            code="invalid_alias_targets",
            param="targets",
        )
    total = sum(weight for _, weight in weights)
    if total != WHOLE or any(weight < 1 for _, weight in weights):
        raise InvalidRequest(
            f"the weights are whole percents from 1 and sum to {WHOLE}; these sum to {total}",
            code="invalid_alias_weights",
            param="targets",
        )


def pick(targets: Sequence[Target], request_id: str) -> Target:
    """The target of this request: the same request id always gets the same version."""
    if len(targets) == 1:
        return targets[0]
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    point = int.from_bytes(digest, "big") % WHOLE
    for target in targets:
        point -= target.weight
        if point < 0:
            return target
    return targets[-1]
