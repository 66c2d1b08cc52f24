"""What a new key is restricted to: each restriction is checked when it is given.

A key can only have less than its tenant: tighter limits, and a looser latency budget. What would
give it more, what restricts nothing and what nobody can meet is refused by the field's name.
"""

from collections.abc import Sequence
from typing import Any, cast, get_args

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository as adapter_rows
from app.caller import KeyAccess, KeyBudget, KeyLimits, TenantLimits
from app.errors import InvalidRequest
from app.keys.networks import Network, parse_networks
from app.tenants.models import Tenant
from app.tenants.service import LEAST_PERCENTILE

MAX_SCOPED_ADAPTERS = 100
MOST_MS = 3_600_000.0
_SHOWN_CHARACTERS = 64


async def key_scopes(
    session: AsyncSession,
    tenant: Tenant | None,
    *,
    adapters: Sequence[str] | None,
    access: str,
    networks: Sequence[str] | None,
) -> dict[str, Any]:
    """The row's `scopes`. Raises InvalidRequest for an adapter that the tenant does not have."""
    scopes: dict[str, Any] = {}
    if access not in get_args(KeyAccess):
        raise InvalidRequest(
            f"access must be one of {', '.join(get_args(KeyAccess))}.", param="access"
        )
    if tenant is None and adapters is not None:
        raise InvalidRequest(
            "An operator key has no adapter scope; leave it out.", param="adapters"
        )
    if tenant is None and access in ("inference", "manage"):
        raise InvalidRequest(
            "An operator key belongs to no tenant; give it full or read access.", param="access"
        )
    require_whole_tenant(access, adapters)
    if tenant is not None and adapters is not None:
        scopes["adapters"] = await _known(session, tenant.id, adapters)
    if access != "full":
        scopes["access"] = access
    if networks is not None:
        scopes["networks"] = [str(network) for network in parse_networks(networks)]
    return scopes


def require_whole_tenant(access: str, adapters: Sequence[str] | None) -> None:
    """Raises InvalidRequest for a managing key that would be limited to some adapters."""
    if access == "manage" and adapters is not None:
        raise InvalidRequest(
            "A key with manage access hands out keys to every adapter, so it cannot be limited to "
            "some; give it full access, or leave adapters out.",
            param="adapters",
        )


async def _known(session: AsyncSession, tenant_id: str, names: Sequence[str]) -> list[str]:
    """Sorted names of the tenant's adapters and of base models."""
    wanted = sorted(set(names))
    if not wanted:
        raise InvalidRequest(
            "adapters is empty, so the key could call nothing; name one, or leave it out for all.",
            param="adapters",
        )
    if len(wanted) > MAX_SCOPED_ADAPTERS:
        raise InvalidRequest(
            f"A key may be restricted to at most {MAX_SCOPED_ADAPTERS} adapters; "
            f"{len(wanted)} were given.",
            param="adapters",
        )
    rows = await adapter_rows.page_adapters(
        session, tenant_id, after=None, limit=len(wanted), names=wanted
    )
    known = {row.name for row in rows}
    known.update(base.name for base in await adapter_rows.base_models(session))
    missing = [name for name in wanted if name not in known]
    if missing:
        shown = ", ".join(repr(name[:_SHOWN_CHARACTERS]) for name in missing[:5])
        raise InvalidRequest(
            f"The tenant has no adapter {shown}; upload it first, or correct the name.",
            code="unknown_adapter",
            param="adapters",
        )
    return wanted


def check_key_limits(wanted: KeyLimits, tenant: TenantLimits) -> None:
    """Raises InvalidRequest (the limit's name) for a limit above the tenant's.

    A tenant's limit that is lowered later still wins: every call is held to both.
    """
    for name in KeyLimits.__dataclass_fields__:
        own, most = getattr(wanted, name), getattr(tenant, name)
        if own is not None and most is not None and own > most:
            raise InvalidRequest(
                f"{name} is {own} and the tenant's limit is {most}; a key may only tighten it.",
                code="limit_above_tenant",
                param=name,
            )


def check_key_budget(wanted: KeyBudget, tenant: TenantLimits) -> None:
    """Raises InvalidRequest (the field's name) for a promise beyond the tenant's.

    A tenant's budget that is loosened later still wins, and without one there is no promise.
    """
    for name, own, theirs in (
        ("ttft_ms", wanted.ttft_ms, tenant.ttft_ms),
        ("tpot_ms", wanted.tpot_ms, tenant.tpot_ms),
    ):
        if own is None:
            continue
        if theirs is None:
            told = f"{name}: the tenant has no such budget that a key could loosen; leave it out."
            raise InvalidRequest(told, code="budget_tightened", param=name)
        if not theirs <= own <= MOST_MS:
            raise InvalidRequest(
                f"{name} is {own:.12g} and the tenant's budget {theirs:.12g}; a key may only "
                f"loosen it, to at most {MOST_MS:.12g}.",
                code="budget_tightened",
                param=name,
            )
    share, most = wanted.budget_percentile, tenant.budget_percentile
    if share is not None and not LEAST_PERCENTILE <= share <= most:
        raise InvalidRequest(
            f"budget_percentile is {share:.12g} and the tenant's {most:.12g}; a key may only "
            f"loosen it, to at least {LEAST_PERCENTILE:g}.",
            code="budget_tightened",
            param="budget_percentile",
        )


def access_of(scopes: dict[str, Any]) -> KeyAccess:
    return cast(KeyAccess, scopes.get("access", "full"))


def networks_of(scopes: dict[str, Any]) -> tuple[Network, ...] | None:
    entries = scopes.get("networks")
    return None if entries is None else parse_networks(entries)
