"""Making, verifying, rotating and revoking API keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller, KeyBudget, KeyLimits, TenantLimits
from app.crypto import KeyedHash, Secrets
from app.db import Database
from app.errors import Conflict, InvalidRequest, NotFound
from app.grouping import Grouped
from app.ids import new_id
from app.keys import repository, token
from app.keys.cache import KeyEntry
from app.keys.models import ApiKey
from app.keys.restrictions import (
    access_of,
    check_key_budget,
    check_key_limits,
    key_scopes,
    networks_of,
)
from app.settings import Settings
from app.tables import Table, TableQuery
from app.tenants.models import Tenant
from app.tenants.service import BUDGET_PERCENTILE, effective_limits, require_kept

READ_TOGETHER = 100
KeyState = Literal["active", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key's row and, this once, its text."""

    row: ApiKey
    secret: token.KeyText


async def create_key(
    session: AsyncSession,
    *,
    secrets: Secrets,
    now: datetime,
    actor: Caller | str,
    tenant: Tenant | None,
    name: str = "",
    adapters: Sequence[str] | None = None,
    access: str = "full",
    networks: Sequence[str] | None = None,
    expires_at: datetime | None = None,
    limits: KeyLimits | None = None,
    budget: KeyBudget | None = None,
    settings: Settings | None = None,
) -> NewKey:
    """A key of a tenant, or with `tenant=None` an operator's key (never accepted on /v1).

    `adapters` restricts the key to adapters of these names, `access` to reading or to inference,
    `networks` (CIDRs) to where it is used from; None restricts nothing. `budget` loosens the
    tenant's latency budget. With `settings`, `limits` are also held to the platform's defaults
    where the tenant has none of its own.
    """
    check_expiry(expires_at, now)
    scopes = await key_scopes(session, tenant, adapters=adapters, access=access, networks=networks)
    limits, budget = limits or KeyLimits(), budget or KeyBudget()
    if tenant is None and (limits != KeyLimits() or budget != KeyBudget()):
        raise InvalidRequest("An operator key never calls models, so it has no limits.")
    if tenant is not None:
        require_kept(tenant)
        most = _ceiling(tenant, settings)
        check_key_limits(limits, most)
        check_key_budget(budget, most)
    made = _mint(
        session,
        secrets,
        now=now,
        actor=actor,
        tenant_id=None if tenant is None else tenant.id,
        name=name.strip(),
        scopes=scopes,
        expires_at=expires_at,
        limits=limits,
        budget=budget,
    )
    await record(session, "key.create", made.row, actor=actor, now=now, detail={"scopes": scopes})
    return made


async def require_room(session: AsyncSession, tenant_id: str, *, most: int, now: datetime) -> None:
    """Raises Conflict when a tenant has that many working keys; its row is locked meanwhile."""
    if await repository.count_working(session, tenant_id, now) >= most:
        raise Conflict(
            f"A tenant has at most {most} working keys; revoke one that is no longer needed.",
            code="too_many_keys",
        )


async def rotate_key(
    session: AsyncSession,
    key_id: str,
    *,
    secrets: Secrets,
    now: datetime,
    actor: Caller | str,
    tenant_id: str | None,
    overlap: timedelta,
) -> NewKey:
    """A new key with the old one's name, scope, limits and budget; the old one works until the
    overlap ends. Raises NotFound, or Conflict when the key no longer works or is being rotated."""
    old = await find_key(session, key_id, tenant_id=tenant_id, lock=True)
    if state(old, now) != "active":
        raise Conflict(
            f"Key {old.public_id} is {state(old, now)}, so it cannot be rotated; create a new key.",
            code="key_not_active",
        )
    if old.revoke_at is not None:
        raise Conflict(
            f"Key {old.public_id} was already rotated; rotate its successor, or revoke it.",
            code="key_already_rotated",
        )
    made = _mint(
        session,
        secrets,
        now=now,
        actor=actor,
        tenant_id=old.tenant_id,
        name=old.name,
        scopes=dict(old.scopes),
        expires_at=old.expires_at,
        limits=key_limits(old),
        budget=key_budget(old),
    )
    old.revoke_at = now + overlap
    await record(
        session,
        "key.rotate",
        old,
        actor=actor,
        now=now,
        detail={"successor": made.row.id, "revoke_at": old.revoke_at.isoformat()},
    )
    return made


async def revoke_key(
    session: AsyncSession,
    key_id: str,
    *,
    now: datetime,
    actor: Caller | str,
    tenant_id: str | None,
) -> ApiKey:
    """The key stops working; revoking it again changes nothing."""
    key = await find_key(session, key_id, tenant_id=tenant_id, lock=True)
    if key.revoked_at is None:
        key.revoked_at = now
        await record(session, "key.revoke", key, actor=actor, now=now, detail={})
    return key


async def find_key(
    session: AsyncSession, key_id: str, *, tenant_id: str | None, lock: bool = False
) -> ApiKey:
    """Raises NotFound, also for another tenant's key. `tenant_id=None`: an operator asks."""
    key = await repository.get(session, key_id, tenant_id=tenant_id, lock=lock)
    if key is None:
        raise NotFound(f"There is no key {key_id[:40]!r}; list the keys to see their ids.")
    return key


async def list_keys(
    session: AsyncSession, *, tenant_id: str | None, after: str | None = None, limit: int = 100
) -> list[ApiKey]:
    """Newest first, nameless and revoked ones too."""
    return await repository.page(session, tenant_id=tenant_id, after=after, limit=limit)


async def key_table(
    session: AsyncSession, wanted: TableQuery, *, tenant_id: str | None
) -> Table[tuple[ApiKey, str | None]]:
    """A page of keys, each with its tenant's name; sorted by name, tenant, created_at, expires_at
    or last_used_at. `tenant_id=None`: an operator asks."""
    return await repository.table(session, wanted, tenant_id=tenant_id)


def state(key: ApiKey, now: datetime) -> KeyState:
    """`active`, `expired` or `revoked`."""
    if key.revoked_at is not None or (key.revoke_at is not None and key.revoke_at <= now):
        return "revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    return "active"


def key_limits(key: ApiKey) -> KeyLimits:
    return KeyLimits(
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrent=key.max_concurrent,
        monthly_tokens=key.monthly_tokens,
    )


def key_budget(key: ApiKey) -> KeyBudget:
    return KeyBudget(key.ttft_ms, key.tpot_ms, key.budget_percentile)


def entry_reads(db: Database, settings: Settings) -> Grouped[str, KeyEntry]:
    """Loads entries by public id; requests that wait together share the reading."""

    async def read(asked: list[str]) -> list[KeyEntry | Exception]:
        async with db.reading() as session:
            found = {id_: await load_entry(session, id_, settings) for id_ in set(asked)}
        return [found[id_] for id_ in asked]

    return Grouped(read, READ_TOGETHER)


async def load_entry(session: AsyncSession, public_id: str, settings: Settings) -> KeyEntry:
    """What the key's cache holds: the caller that the key stands for, and when it ends."""
    found = await repository.by_public_id(session, public_id)
    if found is None:
        return KeyEntry(None, KeyedHash("0" * 64, 0), False, None, None, None)
    key, tenant = found
    scope = key.scopes.get("adapters")
    caller = Caller(
        tenant_id="" if tenant is None else tenant.id,
        tenant_name="" if tenant is None else tenant.name,
        tenant_salt="" if tenant is None else tenant.salt,
        role="operator" if key.role == "operator" else "api_key",
        key_id=key.id,
        label=key.public_id,
        adapter_scope=None if scope is None else frozenset(scope),
        limits=effective_limits(tenant, settings),
        key_limits=key_limits(key),
        key_budget=key_budget(key),
        access=access_of(key.scopes),
    )
    return KeyEntry(
        caller=caller,
        stored=KeyedHash(key.secret_hash, key.hash_version),
        tenant_active=tenant is None or tenant.status == "active",
        expires_at=key.expires_at,
        revoke_at=key.revoke_at,
        revoked_at=key.revoked_at,
        networks=networks_of(key.scopes),
    )


def _ceiling(tenant: Tenant, settings: Settings | None) -> TenantLimits:
    if settings is not None:
        return effective_limits(tenant, settings)
    return TenantLimits(
        **{name: getattr(tenant, name) for name in KeyLimits.__dataclass_fields__},
        ttft_ms=tenant.ttft_ms,
        tpot_ms=tenant.tpot_ms,
        budget_percentile=tenant.budget_percentile or BUDGET_PERCENTILE,
    )


def _mint(
    session: AsyncSession,
    secrets: Secrets,
    *,
    now: datetime,
    actor: Caller | str,
    tenant_id: str | None,
    name: str,
    scopes: dict[str, Any],
    expires_at: datetime | None,
    limits: KeyLimits,
    budget: KeyBudget,
) -> NewKey:
    text = token.mint()
    stored = secrets.hash("api-key", text.text)
    row = ApiKey(
        id=new_id("key"),
        tenant_id=tenant_id,
        role="operator" if tenant_id is None else "api_key",
        name=name,
        public_id=text.public_id,
        secret_hash=stored.digest,
        hash_version=stored.version,
        last4=text.last4,
        scopes=scopes,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        max_concurrent=limits.max_concurrent,
        monthly_tokens=limits.monthly_tokens,
        ttft_ms=budget.ttft_ms,
        tpot_ms=budget.tpot_ms,
        budget_percentile=budget.budget_percentile,
        created_by=audit.actor_id(actor),
        created_at=now,
        expires_at=expires_at,
    )
    repository.add(session, row)
    return NewKey(row, text)


def check_expiry(expires_at: datetime | None, now: datetime) -> None:
    """Raises InvalidRequest for a time that has passed."""
    if expires_at is not None and expires_at <= now:
        raise InvalidRequest("expires_at must lie in the future.", param="expires_at")


async def record(
    session: AsyncSession,
    action: str,
    key: ApiKey,
    *,
    actor: Caller | str,
    now: datetime,
    detail: dict[str, Any],
) -> None:
    """The audit event of something that was done to a key."""
    await audit.record(
        session,
        actor=actor,
        action=action,
        target=key.id,
        tenant_id=key.tenant_id,
        detail={"public_id": key.public_id, "name": key.name, **detail},
        at=now,
    )
