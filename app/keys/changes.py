"""Changing what a key is restricted to, while its secret stays the same."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.caller import Caller, KeyBudget, KeyLimits
from app.errors import Conflict, InvalidRequest
from app.keys import service
from app.keys.models import ApiKey
from app.keys.restrictions import (
    check_key_budget,
    check_key_limits,
    key_scopes,
    require_whole_tenant,
)
from app.settings import Settings
from app.tenants.models import Tenant
from app.tenants.service import effective_limits, find_tenant

SCOPES = ("adapters", "access", "networks")
LIMITS = tuple(KeyLimits.__dataclass_fields__)
BUDGETS = tuple(KeyBudget.__dataclass_fields__)
CHANGEABLE = ("name", "expires_at", *SCOPES, *LIMITS, *BUDGETS)
"""What `update_key` may change."""


async def update_key(
    session: AsyncSession,
    key_id: str,
    *,
    changes: Mapping[str, Any],
    now: datetime,
    actor: Caller | str,
    tenant_id: str | None,
    settings: Settings,
) -> ApiKey:
    """Changes what is named: see CHANGEABLE; None ends a restriction. Its secret stays.

    Raises NotFound, Conflict when the key no longer works, InvalidRequest as for a new key.
    """
    key = await service.find_key(session, key_id, tenant_id=tenant_id, lock=True)
    state = service.state(key, now)
    if state != "active":
        raise Conflict(
            f"Key {key.public_id} is {state}, so it cannot be changed; create a new key.",
            code="key_not_active",
        )
    tenant = None
    if key.tenant_id is not None:
        tenant = await find_tenant(session, key.tenant_id)
    before = {name: _current(key, name) for name in changes}
    if "name" in changes:
        key.name = str(changes["name"] or "").strip()
    if "expires_at" in changes:
        service.check_expiry(changes["expires_at"], now)
        key.expires_at = changes["expires_at"]
    if set(changes) & set(SCOPES):
        wanted = {name: changes.get(name, _current(key, name)) for name in SCOPES}
        require_whole_tenant(wanted["access"] or "full", wanted["adapters"])
        known = wanted["adapters"] if "adapters" in changes else None  # what stays is not checked
        checked = await key_scopes(
            session,
            tenant,
            adapters=known,
            access=wanted["access"] or "full",
            networks=wanted["networks"],
        )
        if "adapters" not in changes and wanted["adapters"] is not None:
            checked["adapters"] = wanted["adapters"]
        key.scopes = checked
    _change_limits(key, tenant, changes, settings)
    after = {name: _current(key, name) for name in changes}
    await service.record(
        session,
        "key.update",
        key,
        actor=actor,
        now=now,
        detail={
            name: {"from": _plain(before[name]), "to": _plain(after[name])}
            for name in changes
            if before[name] != after[name]
        },
    )
    return key


def _current(key: ApiKey, name: str) -> Any:
    if name in SCOPES:
        return key.scopes.get(name, "full" if name == "access" else None)
    return getattr(key, name)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _change_limits(
    key: ApiKey, tenant: Tenant | None, changes: Mapping[str, Any], settings: Settings
) -> None:
    """Only what is sent is held against the tenant's limits: a later lower one wins anyway, as does
    a later looser budget."""
    sent = {name: changes[name] for name in (*LIMITS, *BUDGETS) if name in changes}
    if not sent:
        return
    if tenant is None:
        raise InvalidRequest("An operator key never calls models, so it has no limits.")
    most = effective_limits(tenant, settings)
    check_key_limits(KeyLimits(**{n: sent[n] for n in LIMITS if n in sent}), most)
    check_key_budget(KeyBudget(**{n: sent[n] for n in BUDGETS if n in sent}), most)
    for name, value in sent.items():
        setattr(key, name, value)
