"""What one process of the control plane holds: settings, clock, database, secrets, connections."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.adapters.last_used import AdapterUses
from app.adapters.resolution import Resolver
from app.audit.refusals import Refusals
from app.clock import Clock, SystemClock
from app.crypto import Passwords, Secrets
from app.db import Database
from app.draining import Drain
from app.grouping import Grouped
from app.inference.running import RunningCalls
from app.keys.cache import KeyCache, KeyEntry
from app.keys.last_used import LastUsed
from app.keys.service import entry_reads
from app.metrics import REGISTRY
from app.scrape import SqlFigures
from app.settings import Settings
from app.users.sessions import SignIn
from engine.tracing import Tracing

if TYPE_CHECKING:
    from app.inference.engines import EngineRouter
    from app.limits.service import Limits
    from app.usage.service import Ledger


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of /readyz; `detail` is for operators alone. Calls are served without a part that
    is not `needed`, and something else does not work."""

    ok: bool
    detail: str = ""
    needed: bool = True


ReadinessCheck = Callable[[], Awaitable[CheckResult]]


@dataclass
class Platform:
    """Made once by `open_platform`; routes get it from `app.state.platform`."""

    settings: Settings
    clock: Clock
    db: Database
    secrets: Secrets
    passwords: Passwords
    names: Resolver
    keys: KeyCache
    key_reads: Grouped[str, KeyEntry]
    last_used: LastUsed
    adapter_uses: AdapterUses
    sign_in: SignIn
    refusals: Refusals
    drain: Drain
    tracing: Tracing | None = field(default=None, kw_only=True)  # in an api that traces
    running: RunningCalls = field(default_factory=RunningCalls)
    checks: dict[str, ReadinessCheck] = field(default_factory=dict)
    figures: list[SqlFigures[Any]] = field(default_factory=list)  # read before each scrape
    # Set by app.inference.lifespan while the app runs; nothing asks for them before.
    engines: "EngineRouter" = None  # type: ignore[assignment]
    limits: "Limits" = None  # type: ignore[assignment]
    ledger: "Ledger" = None  # type: ignore[assignment]

    @asynccontextmanager
    async def shown(self, figures: SqlFigures[Any]) -> AsyncIterator[None]:
        """Shows them in /metrics meanwhile."""
        REGISTRY.register(figures)
        self.figures.append(figures)
        try:
            yield
        finally:
            self.figures.remove(figures)
            REGISTRY.unregister(figures)

    def forget_keys(self) -> None:
        """After a change to keys or tenants: this process asks the database again."""
        self.keys.clear()

    def forget_tenant(self, tenant_id: str) -> None:
        """After a tenant's deletion: this process refuses its calls and ends the running ones."""
        self.keys.clear()
        self.running.abort_tenant(tenant_id)

    async def close(self) -> None:
        await self.db.close()


def open_platform(
    settings: Settings, *, clock: Clock | None = None, passwords: Passwords | None = None
) -> Platform:
    """Opens what needs no running loop. The first start makes the data folder and the secret."""
    clock = clock or SystemClock()
    passwords = passwords or Passwords()
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = settings.root_secret
    secrets = Secrets.open(
        root_secret=None if secret is None else secret.get_secret_value(),
        path=settings.root_secret_file,
    )
    db = Database(settings.database_url)
    return Platform(
        settings=settings,
        clock=clock,
        db=db,
        secrets=secrets,
        passwords=passwords,
        names=Resolver(db),
        keys=KeyCache(settings.auth_cache_s),
        key_reads=entry_reads(db, settings),
        last_used=LastUsed(db, clock),
        adapter_uses=AdapterUses(db, clock),
        sign_in=SignIn(db, secrets, passwords, clock, settings),
        refusals=Refusals(db, clock),
        drain=Drain(clock, settings.drain_notice_s, settings.drain_grace_s),
    )
