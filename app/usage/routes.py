"""The ledger added up: /v1/usage for the caller's tenant, /admin/v1/usage for all of them."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from app.auth import ApiCaller, OperatorCaller
from app.deps import PlatformDep, ReadSession
from app.errors import InvalidRequest
from app.limits.service import Limits
from app.platform import Platform
from app.usage.csv_export import report_csv, requests_csv
from app.usage.parameters import Cursor, Id, Lines, UsageParameters, UsageParametersDep
from app.usage.report import MAX_LINES, report, span
from app.usage.schemas import UsageReport

router = APIRouter()

Of = Annotated[
    Literal["buckets", "requests"],
    Query(description="A line a bucket and group, or a line a request"),
]
CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}


@router.get("/v1/usage", tags=["usage"])
async def read_usage(
    caller: ApiCaller,
    platform: PlatformDep,
    session: ReadSession,
    response: Response,
    wanted: UsageParametersDep,
    after: Cursor = None,
    limit: Lines = MAX_LINES,
) -> UsageReport:
    """Requests that began in the span and have ended; times are UTC."""
    _refuse_tenants(wanted)
    response.headers.update(await _standing(platform, caller))
    now = platform.clock.now()
    return await report(
        session, caller.tenant_id, now=now, after=after, limit=limit, **wanted.options
    )


@router.get("/v1/usage/export", tags=["usage"], response_class=StreamingResponse, responses=CSV)
async def export_usage(
    caller: ApiCaller, platform: PlatformDep, wanted: UsageParametersDep, of: Of = "buckets"
) -> Response:
    """The report as CSV, or every request of the span."""
    _refuse_tenants(wanted)
    return await _export(platform, caller.tenant_id, wanted, of, await _standing(platform, caller))


@router.get("/admin/v1/usage", tags=["operator: usage"])
async def read_all_usage(
    _: OperatorCaller,
    platform: PlatformDep,
    session: ReadSession,
    wanted: UsageParametersDep,
    tenant_id: Id = None,
    after: Cursor = None,
    limit: Lines = MAX_LINES,
) -> UsageReport:
    """All tenants together, or one; `group_by=tenant` tells them apart."""
    now = platform.clock.now()
    return await report(session, tenant_id, now=now, after=after, limit=limit, **wanted.options)


@router.get(
    "/admin/v1/usage/export",
    tags=["operator: usage"],
    response_class=StreamingResponse,
    responses=CSV,
)
async def export_all_usage(
    _: OperatorCaller,
    platform: PlatformDep,
    wanted: UsageParametersDep,
    tenant_id: Id = None,
    of: Of = "buckets",
) -> Response:
    """The operator's report as CSV, or every request of the span."""
    return await _export(platform, tenant_id, wanted, of, {})


async def _export(
    platform: Platform,
    tenant_id: str | None,
    wanted: UsageParameters,
    of: str,
    headers: dict[str, str],
) -> Response:
    options, now = wanted.options, platform.clock.now()
    start, end = span(now, options["start"], options["end"], options["bucket"])
    body: AsyncIterator[bytes]
    if of == "requests":
        filters = {name: options[name] for name in ("key_id", "adapter_id", "model")}
        body = requests_csv(platform.db, tenant_id, start, end, filters)
    else:
        body = report_csv(platform.db, tenant_id, now=now, options=options)
    name = f"usage-{of}-{start:%Y%m%d}-{end:%Y%m%d}.csv"
    disposition = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(body, media_type="text/csv", headers=headers | disposition)


def _refuse_tenants(wanted: UsageParameters) -> None:
    if "tenant" in wanted.options["group_by"]:
        raise InvalidRequest(
            "group_by=tenant is the operator's, at /admin/v1/usage; use key, adapter or model",
            code="invalid_value",
            param="group_by",
        )


async def _standing(platform: Platform, caller: ApiCaller) -> dict[str, str]:
    limits: Limits = platform.limits
    return await limits.standing(caller)
