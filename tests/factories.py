"""One factory per model: a row with sensible values, stored through the services.

tenant = await make_tenant(platform)
key = await make_key(platform, tenant)          # key.secret.text is the bearer token
"""

import itertools
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository as adapter_rows
from app.adapters.models import Adapter
from app.caller import Caller, KeyLimits
from app.ids import new_id
from app.keys.service import NewKey, create_key
from app.platform import Platform
from app.tenants.models import Tenant
from app.tenants.service import create_tenant, effective_limits
from app.users.models import User
from app.users.service import UserRole, create_user

PASSWORD = "correct horse battery"
_numbers = itertools.count(1)


async def make_tenant(
    platform: Platform, name: str | None = None, *, suspended: bool = False, **limits: Any
) -> Tenant:
    """A tenant; limits by their names (`requests_per_minute=5`)."""
    async with platform.db.transaction() as session:
        tenant = await create_tenant(
            session,
            name=name or f"tenant-{next(_numbers)}",
            now=platform.clock.now(),
            actor="tests",
            limits=limits,
        )
        if suspended:
            tenant.status = "suspended"
    return tenant


async def make_key(
    platform: Platform,
    tenant: Tenant | None,
    *,
    name: str = "",
    adapters: list[str] | None = None,
    limits: KeyLimits | None = None,
    **restrictions: Any,
) -> NewKey:
    """A tenant's key, or an operator's with `tenant=None`; `.secret.text` is its text.

    `adapters` that the tenant does not have are made, without a version.
    """
    async with platform.db.transaction() as session:
        if tenant is not None:
            await _make_missing(session, platform, tenant, adapters or [])
        return await create_key(
            session,
            secrets=platform.secrets,
            now=platform.clock.now(),
            actor="tests",
            tenant=tenant,
            name=name,
            adapters=adapters,
            limits=limits,
            settings=platform.settings,
            **restrictions,
        )


async def _make_missing(
    session: AsyncSession, platform: Platform, tenant: Tenant, names: list[str]
) -> None:
    bases = {base.name for base in await adapter_rows.base_models(session)}
    for name in set(names) - bases:
        if await adapter_rows.live_adapter(session, tenant.id, name) is None:
            session.add(
                Adapter(
                    id=new_id("adp"),
                    tenant_id=tenant.id,
                    name=name,
                    created_by="tests",
                    created_at=platform.clock.now(),
                )
            )


async def make_user(
    platform: Platform,
    tenant: Tenant | None = None,
    *,
    email: str | None = None,
    role: UserRole | None = None,
    password: str | None = PASSWORD,
    must_change: bool = False,
) -> User:
    """A user with PASSWORD: an operator, or with a tenant its admin."""
    async with platform.db.transaction() as session:
        return await create_user(
            session,
            email=f"user-{next(_numbers)}@example.com" if email is None else email,
            role=role or ("operator" if tenant is None else "tenant_admin"),
            tenant=tenant,
            password=password,
            must_change=must_change,
            passwords=platform.passwords,
            settings=platform.settings,
            now=platform.clock.now(),
            actor="tests",
        )


def make_caller(platform: Platform, tenant: Tenant, **changes: Any) -> Caller:
    """The caller of a key of that tenant, without a key's row."""
    values: dict[str, Any] = {
        "tenant_id": tenant.id,
        "tenant_name": tenant.name,
        "tenant_salt": tenant.salt,
        "role": "api_key",
        "key_id": "key_test",
        "label": "test",
        "limits": effective_limits(tenant, platform.settings),
    }
    return Caller(**{**values, **changes})


def bearer(key: NewKey) -> dict[str, str]:
    """The headers that authenticate with a key."""
    return {"authorization": f"Bearer {key.secret.text}"}


async def sign_in(platform: Platform, user: User, password: str = PASSWORD) -> dict[str, str]:
    """The cookies of a new session of that user."""
    from app.auth import cookie_name

    signed_in = await platform.sign_in(
        email=user.email, password=password, address="127.0.0.1", user_agent="tests", old_token=None
    )
    return {cookie_name(platform.settings): signed_in.token}
