"""The console's seed in a platform that runs: rows beside it, by its own database and secret."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from app.adapters import repository as adapter_rows
from app.platform import open_platform
from app.settings import Settings
from app.tenants import service as tenants
from app.users.service import create_user
from tests.console_seed import ADAPTERS, pages, seed
from tests.live import LivePlatform

PASSWORD = "a long enough password"
LIMITS = {
    "requests_per_minute": 600,
    "tokens_per_minute": 90_000,
    "monthly_tokens": 50_000_000,
    "max_adapters": 5000,
    "max_stored_bytes": 2**40,
    "ttft_ms": 60_000,
}


@dataclass(frozen=True)
class Seeded:
    """An admin and a viewer of the tenant, with PASSWORD; `pages`: name -> address."""

    email: str
    viewer: str
    pages: dict[str, str]


def seed_live(live: LivePlatform, name: str, *, adapters: int = ADAPTERS) -> Seeded:
    """A tenant of that name with everything in it; with no adapters, one with nothing."""
    with ThreadPoolExecutor(1) as elsewhere:  # playwright has a loop of its own in this thread
        return elsewhere.submit(asyncio.run, _seed(live, name, adapters)).result()


async def _seed(live: LivePlatform, name: str, adapters: int) -> Seeded:
    platform = open_platform(Settings(data_dir=live.data_dir))
    emails = {"tenant_admin": f"ann@{name}.example", "tenant_viewer": f"vera@{name}.example"}
    now = platform.clock.now()
    try:
        async with platform.db.transaction() as session:
            tenant = await tenants.create_tenant(
                session, name=name, now=now, actor="tests", limits=LIMITS
            )
            base_digest = (await adapter_rows.base_models(session))[0].base_digest
            for role, email in emails.items():
                await create_user(
                    session,
                    email=email,
                    role=role,  # type: ignore[arg-type]
                    tenant=tenant,
                    password=PASSWORD,
                    must_change=False,
                    passwords=platform.passwords,
                    settings=platform.settings,
                    now=now,
                    actor="tests",
                )
        made = {}
        if adapters:
            made = pages(await seed(platform, tenant, base_digest, adapters=adapters))
    finally:
        await platform.close()
    return Seeded(emails["tenant_admin"], emails["tenant_viewer"], made)
