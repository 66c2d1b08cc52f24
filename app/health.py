"""/healthz (the process lives), /readyz (it can serve), /metrics."""

import asyncio
import hmac
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError

from app.auth import authenticate_key, bearer, client_address, open_session
from app.db import Database, head_revision, schema_revision
from app.deps import PlatformDep
from app.errors import AppError, Forbidden
from app.metrics import render
from app.platform import CheckResult, Platform, ReadinessCheck
from app.settings import is_loopback_host

CHECK_TIMEOUT_S = 3.0
router = APIRouter()


@router.get("/healthz", include_in_schema=False)
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", include_in_schema=False)
async def readyz(request: Request, platform: PlatformDep) -> Response:
    """200 when calls can be served, else 503, with the names of the parts that are missing.

    What is wrong with each is told to operators alone.
    """
    found = await run_checks(platform)
    missing = [name for name, result in found.items() if result.needed and not result.ok]
    degraded = [name for name, result in found.items() if not result.needed and not result.ok]
    ready = not missing and not platform.drain.begun
    body: dict[str, Any] = {"status": "ready" if ready else "not ready"}
    if platform.drain.begun:
        body["status"] = "draining"
    if missing:
        body["missing"] = missing
    if degraded:
        body["degraded"] = degraded
    if await _is_operator(request, platform):
        body["checks"] = {
            name: {"ok": result.ok, "needed": result.needed, "detail": result.detail}
            for name, result in found.items()
        }
    return JSONResponse(body, status_code=200 if ready else 503)


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request, platform: PlatformDep) -> Response:
    """With LORAMUX_METRICS_TOKEN for its bearer, else for clients on this machine alone."""
    token = platform.settings.metrics_token
    if token is not None:
        if not hmac.compare_digest(bearer(request).encode(), token.get_secret_value().encode()):
            raise Forbidden("This is not LORAMUX_METRICS_TOKEN.", code="metrics_token")
    elif not _is_direct_loopback(request):
        raise Forbidden(
            "Set LORAMUX_METRICS_TOKEN to read metrics from another machine.", code="metrics_token"
        )
    await asyncio.gather(*(figures.read() for figures in platform.figures))
    return Response(render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def database_check(db: Database) -> ReadinessCheck:
    """Whether the database answers and has the schema that this code knows."""
    wanted = head_revision()

    async def check() -> CheckResult:
        try:
            found = await schema_revision(db)
        except (SQLAlchemyError, OSError) as error:
            return CheckResult(False, f"the database does not answer ({type(error).__name__})")
        if found != wanted:
            return CheckResult(
                False, f"the schema is at {found}, not {wanted}; run `loramux migrate`"
            )
        return CheckResult(True, f"schema {found}")

    return check


async def run_checks(platform: Platform) -> dict[str, CheckResult]:
    """What each part says, by its name in alphabetical order; none takes longer than its time."""
    names = sorted(platform.checks)
    results = await asyncio.gather(*(_run(platform.checks[name]) for name in names))
    return dict(zip(names, results, strict=True))


async def _run(check: ReadinessCheck) -> CheckResult:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check()
    except TimeoutError:
        return CheckResult(False, f"no answer within {CHECK_TIMEOUT_S:g} s")


async def _is_operator(request: Request, platform: Platform) -> bool:
    try:
        if "authorization" in request.headers:
            address = client_address(request)
            caller = await authenticate_key(platform, bearer(request), address)
            return caller.role == "operator"
        found = await open_session(request, platform)
    except (AppError, SQLAlchemyError, OSError):
        return False
    return found is not None and found.caller.role == "operator"


def _is_direct_loopback(request: Request) -> bool:
    forwarded = any(name in request.headers for name in ("x-forwarded-for", "forwarded"))
    return not forwarded and request.client is not None and is_loopback_host(request.client.host)
