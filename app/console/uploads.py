"""Uploads in parts for a page's script: /v1/uploads under a console session, JSON both ways.

POST   /console/uploads                        {"name", "config_bytes", "weights_bytes"} -> upload
GET    /console/uploads                        the uploads that wait for parts
GET    /console/uploads/{id}                   which parts are there
PUT    /console/uploads/{id}/parts/{n}         the part's bytes
POST   /console/uploads/{id}/complete          -> {"location"} of the version's page
DELETE /console/uploads/{id}
"""

from collections.abc import Awaitable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from app.adapters import resumable, upload_completion
from app.adapters.deps import GateDep, ResourcesDep
from app.adapters.schemas import UploadGone, UploadIn
from app.adapters.upload_routes import PartNumber, UploadId
from app.auth import TenantAdmin
from app.console.adapters import tenant_only
from app.errors import AppError

router = APIRouter(prefix="/console/uploads", include_in_schema=False)


@router.post("")
async def begin(body: UploadIn, caller: TenantAdmin, resources: ResourcesDep) -> Response:
    tenant_only(caller)

    async def work() -> BaseModel:
        async with resources.db.transaction() as session:
            return await resumable.begin(resources, session, caller, body)

    return await _json(work(), 201)


@router.get("")
async def list_open(caller: TenantAdmin, resources: ResourcesDep) -> Response:
    tenant_only(caller)

    async def work() -> BaseModel:
        async with resources.db.reading() as session:
            return await resumable.list_open(resources, session, caller)

    return await _json(work())


@router.get("/{upload_id}")
async def get(upload_id: UploadId, caller: TenantAdmin, resources: ResourcesDep) -> Response:
    tenant_only(caller)

    async def work() -> BaseModel:
        async with resources.db.reading() as session:
            return await resumable.get(resources, session, caller, upload_id)

    return await _json(work())


@router.put("/{upload_id}/parts/{number}")
async def put_part(
    upload_id: UploadId,
    number: PartNumber,
    request: Request,
    caller: TenantAdmin,
    resources: ResourcesDep,
    gate: GateDep,
) -> Response:
    tenant_only(caller)
    length = request.headers.get("content-length", "")
    return await _json(
        resumable.put_part(
            resources,
            gate,
            caller,
            upload_id,
            number,
            request.stream(),
            content_length=int(length) if length.isdigit() else None,
            content_digest=request.headers.get("content-digest"),
        )
    )


class Location(BaseModel):
    """Where the page goes next."""

    location: str


@router.post("/{upload_id}/complete")
async def complete(
    upload_id: UploadId, caller: TenantAdmin, resources: ResourcesDep, gate: GateDep
) -> Response:
    tenant_only(caller)

    async def work() -> BaseModel:
        version = (await upload_completion.complete(resources, gate, caller, upload_id)).version
        return Location(location=f"/console/adapters/{version.adapter}/versions/{version.version}")

    return await _json(work())


@router.delete("/{upload_id}")
async def give_up(upload_id: UploadId, caller: TenantAdmin, resources: ResourcesDep) -> Response:
    tenant_only(caller)

    async def work() -> BaseModel:
        await resumable.give_up(resources, caller, upload_id)
        return UploadGone(id=upload_id)

    return await _json(work())


async def _json(work: Awaitable[BaseModel], status: int = 200) -> Response:
    """A refusal too is JSON here: the console's error page is for people."""
    try:
        answer = await work
    except AppError as error:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
    return JSONResponse(answer.model_dump(mode="json"), status_code=status)
