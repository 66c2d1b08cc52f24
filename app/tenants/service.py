"""Creating, changing and suspending tenants; the limits in force."""

import re
import secrets as random
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller, TenantLimits
from app.errors import Conflict, InvalidRequest, NotFound
from app.ids import new_id
from app.settings import Settings
from app.tables import Table, TableQuery
from app.tenants import repository
from app.tenants.models import Tenant

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
LIMITS = (
    "weight",
    "ttft_ms",
    "tpot_ms",
    "budget_percentile",
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "monthly_tokens",
    "max_adapters",
    "max_stored_bytes",
    "max_resident_bytes",
    "reserved_resident_bytes",
    "max_rank",
    "max_tokens",
)
"""What `update_tenant` may change."""
BUDGET_PERCENTILE = 0.95
"""The share of a tenant's requests that keep its latency budget, unless it has its own."""
MAY_BE_ZERO = ("max_adapters", "max_stored_bytes", "reserved_resident_bytes")
LEAST_PERCENTILE, MOST_PERCENTILE = 0.5, 0.999


def effective_limits(tenant: Tenant | None, settings: Settings) -> TenantLimits:
    """The tenant's own limits where it has them, else the platform's."""
    if tenant is None:
        return TenantLimits(max_rank=settings.max_rank)

    def own(value: int | None, default: int | None) -> int | None:
        return default if value is None else value

    return TenantLimits(
        requests_per_minute=own(tenant.requests_per_minute, settings.tenant_requests_per_minute),
        tokens_per_minute=own(tenant.tokens_per_minute, settings.tenant_tokens_per_minute),
        max_concurrent=own(tenant.max_concurrent, settings.tenant_max_concurrent),
        monthly_tokens=own(tenant.monthly_tokens, settings.tenant_monthly_tokens),
        max_adapters=own(tenant.max_adapters, settings.tenant_max_adapters),
        max_stored_bytes=own(tenant.max_stored_bytes, settings.tenant_max_stored_bytes),
        max_resident_bytes=own(tenant.max_resident_bytes, settings.tenant_max_resident_bytes),
        reserved_resident_bytes=tenant.reserved_resident_bytes or 0,
        max_rank=min(tenant.max_rank or settings.max_rank, settings.max_rank),
        max_tokens=own(tenant.max_tokens, settings.tenant_max_tokens),
        weight=tenant.weight,
        ttft_ms=tenant.ttft_ms,
        tpot_ms=tenant.tpot_ms,
        budget_percentile=tenant.budget_percentile or BUDGET_PERCENTILE,
    )


async def create_tenant(
    session: AsyncSession,
    *,
    name: str,
    now: datetime,
    actor: Caller | str,
    limits: Mapping[str, Any] | None = None,
) -> Tenant:
    """Raises Conflict when the name is taken, InvalidRequest when it is no name."""
    if NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "A tenant's name has 1 to 63 lower-case letters, digits and hyphens, and neither "
            "begins nor ends with a hyphen.",
            param="name",
        )
    tenant = Tenant(
        id=new_id("ten"),
        name=name,
        status="active",
        salt=random.token_hex(16),
        weight=1.0,
        created_at=now,
        updated_at=now,
    )
    _apply(tenant, limits or {})
    if await repository.by_name(session, name) is not None:
        raise _taken(name)
    repository.add(session, tenant)
    try:
        await session.flush()
    except IntegrityError:
        raise _taken(name) from None
    await _record(session, "tenant.create", tenant, actor=actor, now=now, detail=limits or {})
    return tenant


async def update_tenant(
    session: AsyncSession,
    tenant_id: str,
    *,
    changes: Mapping[str, Any],
    now: datetime,
    actor: Caller | str,
) -> Tenant:
    """Changes limits (see LIMITS); None returns a limit to the platform's default."""
    tenant = require_kept(await find_tenant(session, tenant_id, lock=True))
    before = {name: getattr(tenant, name) for name in changes if name in LIMITS}
    _apply(tenant, changes)
    tenant.updated_at = now
    detail = {name: {"from": before[name], "to": changes[name]} for name in before}
    await _record(session, "tenant.update", tenant, actor=actor, now=now, detail=detail)
    return tenant


async def set_status(
    session: AsyncSession, tenant_id: str, *, active: bool, now: datetime, actor: Caller | str
) -> Tenant:
    """Suspends a tenant (its keys and users are refused) or resumes it."""
    tenant = require_kept(await find_tenant(session, tenant_id, lock=True))
    wanted = "active" if active else "suspended"
    if tenant.status != wanted:
        tenant.status = wanted
        tenant.updated_at = now
        action = "tenant.resume" if active else "tenant.suspend"
        await _record(session, action, tenant, actor=actor, now=now, detail={})
    return tenant


async def find_tenant(session: AsyncSession, tenant: str, *, lock: bool = False) -> Tenant:
    """By id. Raises NotFound."""
    found = await repository.get(session, tenant, lock=lock)
    if found is None:
        raise NotFound(f"There is no tenant {tenant[:64]!r}; list the tenants to see their ids.")
    return found


def require_kept(tenant: Tenant) -> Tenant:
    """The tenant itself. Raises Conflict when it is being or has been deleted."""
    if tenant.deleted_at is not None:
        raise Conflict(
            f"The tenant {tenant.id} is {tenant.state}, which cannot be undone; create another.",
            code="tenant_deleted",
        )
    return tenant


async def find_by_name(session: AsyncSession, name: str) -> Tenant:
    """By name or id (the command line takes either). Raises NotFound."""
    found = await repository.by_name(session, name) or await repository.get(session, name)
    if found is None:
        raise NotFound(
            f"There is no tenant {name[:64]!r}; `loramux tenants list` shows those there are."
        )
    return found


async def list_tenants(
    session: AsyncSession, *, after: str | None = None, limit: int = 100, deleted: bool = False
) -> list[Tenant]:
    """Newest first; with `deleted`, also those that are gone."""
    return await repository.page(session, after=after, limit=limit, deleted=deleted)


async def last_used(session: AsyncSession, tenants: Iterable[Tenant]) -> dict[str, datetime]:
    """By tenant's id; at most a minute behind."""
    return await repository.last_used(session, [tenant.id for tenant in tenants])


async def tenant_table(
    session: AsyncSession, wanted: TableQuery, *, deleted: bool = False
) -> Table[tuple[Tenant, datetime | None]]:
    """A page of tenants, each with when it was last used; sorted by name, status, weight,
    created_at or last_used_at."""
    return await repository.table(session, wanted, deleted=deleted)


async def named(session: AsyncSession, keys: Iterable[str]) -> dict[str, Tenant]:
    """For an operator: the tenants that have these ids or salts, by either."""
    wanted = sorted(set(keys))
    return await repository.named(session, wanted) if wanted else {}


def _apply(tenant: Tenant, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if name not in LIMITS:
            raise InvalidRequest(f"A tenant has no limit {name[:40]!r}.", param=name)
        if value is not None and value <= 0 and name not in MAY_BE_ZERO:
            raise InvalidRequest(f"{name} must be above 0; {value!r} was given.", param=name)
        if (
            name == "budget_percentile"
            and value is not None
            and not LEAST_PERCENTILE <= value <= MOST_PERCENTILE
        ):
            raise InvalidRequest(
                f"{name} must be from {LEAST_PERCENTILE} to {MOST_PERCENTILE}; {value!r} was "
                "given.",
                param=name,
            )
        if value is not None and value < 0:
            raise InvalidRequest(f"{name} must not be negative; {value!r} was given.", param=name)
        setattr(tenant, name, 1.0 if name == "weight" and value is None else value)
    most, reserved = tenant.max_resident_bytes, tenant.reserved_resident_bytes
    if most is not None and reserved is not None and reserved > most:
        raise InvalidRequest(
            f"reserved_resident_bytes is {reserved} and max_resident_bytes {most}; more cannot be "
            "kept than may be held.",
            param="reserved_resident_bytes",
        )


def _taken(name: str) -> Conflict:
    return Conflict(
        f"There already is a tenant {name!r}; choose another name.", code="name_taken", param="name"
    )


async def _record(
    session: AsyncSession,
    action: str,
    tenant: Tenant,
    *,
    actor: Caller | str,
    now: datetime,
    detail: Mapping[str, Any],
) -> None:
    await audit.record(
        session,
        actor=actor,
        action=action,
        target=tenant.id,
        tenant_id=tenant.id,
        detail={"name": tenant.name, **detail},
        at=now,
    )
