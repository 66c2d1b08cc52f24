"""What a managing key may hand on: never more than it has itself.

A key that ends (by its expiry, or in the overlap of its rotation), is bound to networks or has a
looser latency budget makes only keys that are bound at least as tightly. One that has limits makes
none, for each key's calls are counted by themselves: many such keys, or a successor, would have
them many times over. A bound key makes no people at all: a user of the console is bound by none of
these. An admin's session is bound by its tenant alone.

An operator's key makes keys for others, so its networks and its expiry are not theirs. In the
overlap of its rotation it hands on no more than that: nothing that would outlive it.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.caller import Caller, KeyBudget, KeyLimits
from app.errors import Forbidden
from app.keys import service
from app.keys.models import ApiKey
from app.keys.networks import Network, covers, parse_networks
from app.keys.restrictions import networks_of

LIMITS = tuple(KeyLimits.__dataclass_fields__)
BUDGETS = tuple(KeyBudget.__dataclass_fields__)
BOUNDS = ("expires_at", "networks", *LIMITS, *BUDGETS)
"""What a key may be bound by; access and adapters are whole, or it could not manage."""


async def own_key(session: AsyncSession, caller: Caller) -> ApiKey | None:
    """The key that asks, as it is now; None for a session of the console."""
    if caller.key_id is None:
        return None
    return await service.find_key(session, caller.key_id, tenant_id=caller.tenant_id or None)


def handed_on(own: ApiKey | None) -> tuple[str, ...]:
    """Which of its bounds hold for all that the key makes."""
    if own is None:
        return ()
    if own.tenant_id is not None:
        return BOUNDS
    return () if own.revoke_at is None else ("expires_at",)


def require_no_limits(own: ApiKey | None) -> None:
    """Raises Forbidden for a key with limits that would make a key, or rotate one."""
    limited = [name for name in LIMITS if current(own, name) is not None]
    if limited:
        raise Forbidden(
            f"This key is limited by {', '.join(limited)}, and a new key is counted anew; use "
            "a key with manage access and no limits, or an admin's session.",
            code="limited_key",
        )


def inherited(own: ApiKey | None, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A new key's bounds: what it does not name, it takes from the key that makes it.

    Raises Forbidden (`beyond_own_key`, the field's name) for what is looser.
    """
    bounds = {
        name: wanted[name] if wanted.get(name) is not None else current(own, name)
        for name in BOUNDS
    }
    require_within(own, bounds)
    return bounds


def left(key: ApiKey, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A key's bounds once it is changed: all of them, for wider access to a key that is bound less
    tightly would be more than its changer has."""
    return {name: changes.get(name, current(key, name)) for name in BOUNDS}


def require_within(own: ApiKey | None, bounds: Mapping[str, Any]) -> None:
    """Raises Forbidden for the first of these bounds that is looser than the key's own."""
    if own is None:
        return
    for name in handed_on(own):
        if name in bounds and not _is_within(own, name, bounds[name]):
            raise Forbidden(
                f"{name} would be looser than that of the key lmx_{own.public_id}_… that asks; "
                "send what lies within it, or use a key without that bound.",
                code="beyond_own_key",
                param=name,
            )


def require_unbound(own: ApiKey | None) -> None:
    """Raises Forbidden for a bound key that would let a person in."""
    bound = [name for name in handed_on(own) if current(own, name) is not None]
    if bound:
        raise Forbidden(
            f"This key is bound by {', '.join(bound)}, and a user of the console would not be; use "
            "a key without such a bound, or the console.",
            code="bound_key",
        )


def current(key: ApiKey | None, name: str) -> Any:
    """One of a key's bounds; None where it has none."""
    if key is None:
        return None
    if name == "expires_at":
        return min(filter(None, (key.expires_at, key.revoke_at)), default=None)
    return key.scopes.get("networks") if name == "networks" else getattr(key, name)


def _is_within(own: ApiKey, name: str, value: Any) -> bool:
    most = current(own, name)
    if most is None:
        return True
    if value is None:
        return False
    if name == "networks":
        return _all_covered(networks_of(own.scopes) or (), parse_networks(value))
    if name in ("ttft_ms", "tpot_ms"):
        return bool(value >= most)  # a later first token is less of a promise
    return bool(value <= most)


def _all_covered(held: tuple[Network, ...], wanted: tuple[Network, ...]) -> bool:
    return all(any(covers(outer, network) for outer in held) for network in wanted)
