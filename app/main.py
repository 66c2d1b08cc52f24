"""The api process: puts the domains' routes, the middleware and the background work together."""

import asyncio
import functools
import importlib
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType

import structlog
from fastapi import APIRouter, Depends, FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import BaseRoute
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app import api_docs, error_handlers, health, parts
from app.console.render import error_page
from app.crypto import SecretError
from app.db import to_its_end
from app.draining import DrainGate
from app.idempotency import service as idempotency
from app.last_used import FLUSH_EVERY_S
from app.logging import configure_logging
from app.middleware import BodyLimits, BodyRule, RequestContext, SameOrigin, SecurityHeaders
from app.platform import Platform, open_platform
from app.query import refuse_unknown_parameters
from app.settings import Settings, get_settings
from app.tracing import TraceRequests
from app.users import sessions
from engine.tracing import open_tracing

DOMAINS = (
    "inference",
    "tenants",
    "keys",
    "users",
    "audit",
    "adapters",
    "webhooks",
    "limits",
    "limit_requests",
    "usage",
    "engines",
    "console",
)
"""Each may have `routes.py` with a `router` (`tenant_routes.py`: those of /v1 where the others are
operators'), and `lifespan.py` with `lifespan(platform)`, an async context manager entered in this
order. Routes are looked through in this order too, so what is called most comes first."""
SWEEP_EVERY_S = 600.0
READ_SECRETS_EVERY_S = 60.0
MULTIPART_SLACK_BYTES = 2 * 1024 * 1024
_log = structlog.get_logger("loramux.api")


def create_app(settings: Settings | None = None, *, platform: Platform | None = None) -> FastAPI:
    """The application. Tests give a platform with a clock of their own."""
    if platform is None:
        settings = settings or get_settings()
        configure_logging(settings.log_level)
        platform = open_platform(settings)
        platform.tracing = open_tracing("loramux-api") if settings.tracing else None
    settings = platform.settings
    app = FastAPI(
        title="loramux",
        summary="Thousands of LoRA adapters on one quantized base model.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.platform = platform
    app.state.render_console_error = error_page
    platform.checks["database"] = health.database_check(platform.db)
    platform.checks |= parts.checks(platform)
    error_handlers.install(app)
    app.include_router(health.router)
    api_docs.install(app)
    app.router.routes.extend(_routes())
    _surround(app, platform)
    return app


@functools.cache
def _routes() -> list[BaseRoute]:
    """What the domains serve; analysed once, however many applications a process makes.

    They know no application: `dependency_overrides` does not reach them.
    """
    served = APIRouter()
    strict = [Depends(refuse_unknown_parameters)]
    for routes in (*_files("routes"), *_files("tenant_routes")):
        served.include_router(routes.router, dependencies=strict)
    return served.routes


def _files(kind: str) -> list[ModuleType]:
    """The domains' files of that name, in the order of DOMAINS."""
    here = Path(__file__).parent
    names = [name for name in DOMAINS if (here / name / f"{kind}.py").exists()]
    return [importlib.import_module(f"app.{name}.{kind}") for name in names]


def _surround(app: FastAPI, platform: Platform) -> None:
    """Adds the middleware; the last one added is the outermost."""
    settings = platform.settings
    app.add_middleware(
        BodyLimits,
        rules=body_rules(settings),
        idle_s=settings.body_idle_timeout_s,
        total_s=settings.body_timeout_s,
        pace_bytes=settings.max_body_bytes,
        clock=platform.clock,
    )
    app.add_middleware(SameOrigin, public_url=settings.public_url, paths=("/console", "/admin/"))
    app.add_middleware(DrainGate, drain=platform.drain)
    app.add_middleware(SecurityHeaders, https=settings.https)
    if platform.tracing is not None:
        app.add_middleware(TraceRequests, tracing=platform.tracing)
    app.add_middleware(RequestContext, clock=platform.clock)
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=settings.trusted_proxies)


def body_rules(settings: Settings) -> list[BodyRule]:
    """Uploads of adapters are large, and so are parts of them; everything else is small."""
    upload = BodyRule(
        re.compile(r"/(v1/adapters|console/adapters/upload)/?$"),
        settings.max_adapter_bytes + MULTIPART_SLACK_BYTES,
        "LORAMUX_MAX_ADAPTER_BYTES",
    )
    part = BodyRule(
        re.compile(r"/(v1|console)/uploads/[^/]+/parts/"),
        max(settings.upload_part_bytes, settings.max_body_bytes),
        "LORAMUX_UPLOAD_PART_BYTES",
    )
    other = BodyRule(re.compile(""), settings.max_body_bytes, "LORAMUX_MAX_BODY_BYTES")
    return [upload, part, other]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    platform: Platform = app.state.platform
    async with AsyncExitStack() as stack:
        stack.push_async_callback(platform.close)
        if platform.tracing is not None:
            stack.push_async_callback(asyncio.to_thread, platform.tracing.close)
        for module in _files("lifespan"):
            await stack.enter_async_context(module.lifespan(platform))
        stack.push_async_callback(_last_flush, platform)
        async with asyncio.TaskGroup() as background:
            tasks = [
                background.create_task(_write_last_used(platform)),
                background.create_task(_sweep(platform)),
                background.create_task(_read_secrets(platform)),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()


async def _write_last_used(platform: Platform) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        try:
            await to_its_end(platform.last_used.flush())
            await to_its_end(platform.adapter_uses.flush())
        except (SQLAlchemyError, OSError) as error:
            _log.warning("last_used_not_written", error=type(error).__name__)


async def _last_flush(platform: Platform) -> None:
    try:
        await platform.last_used.flush(everything=True)
        await platform.adapter_uses.flush(everything=True)
    except (SQLAlchemyError, OSError) as error:
        _log.warning("last_used_not_written", error=type(error).__name__)


async def _sweep(platform: Platform) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        try:
            await to_its_end(_sweep_once(platform))
        except (SQLAlchemyError, OSError) as error:
            _log.warning("not_swept", error=type(error).__name__)


async def _sweep_once(platform: Platform) -> None:
    async with platform.db.transaction() as session:
        now = platform.clock.now()
        await sessions.sweep(session, settings=platform.settings, now=now)
        await idempotency.sweep(session, now)


async def _read_secrets(platform: Platform) -> None:
    """Learns of a rotation, so that this process stops signing with the old root secret."""
    while True:
        await asyncio.sleep(READ_SECRETS_EVERY_S)
        try:
            platform.secrets.reload()
        except (SecretError, OSError) as error:
            _log.error("root_secret_unreadable", error=str(error))
