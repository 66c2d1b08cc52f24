"""/v1/adapters, /v1/uploads and /admin/v1/adapters."""

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from app.adapters import (
    alias_routes,
    archiving,
    erasure,
    events,
    operator,
    service,
    upload_routes,
    uploads,
)
from app.adapters.deps import GateDep, ResourcesDep
from app.adapters.resolution import scoped
from app.adapters.schemas import (
    AdapterList,
    AdapterObject,
    ErasureReceipt,
    OperatorAdapterList,
    ValidationList,
    VersionObject,
)
from app.auth import ApiCaller, OperatorCaller

router = APIRouter()
router.include_router(upload_routes.router)
router.include_router(alias_routes.router)

After = Annotated[str | None, Query(max_length=40, description="the `last_id` of the page before")]
Limit = Annotated[int, Query(ge=1, le=100)]
Name = Annotated[str, Path(max_length=200)]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]

UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": list(uploads.PARTS),
                    "properties": {
                        uploads.NAME_PART: {"type": "string"},
                        uploads.CONFIG_PART: {"type": "string", "format": "binary"},
                        uploads.WEIGHTS_PART: {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


@router.post(
    "/v1/adapters",
    tags=["adapters"],
    status_code=202,
    response_model=VersionObject,
    responses={200: {"model": VersionObject, "description": "the same content was here already"}},
    openapi_extra=UPLOAD_BODY,
)
async def upload(
    request: Request,
    caller: ApiCaller,
    resources: ResourcesDep,
    gate: GateDep,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Takes the two files that PEFT's save_pretrained writes, and queues their validation."""
    length = request.headers.get("content-length", "")
    received = await uploads.receive(
        resources,
        gate,
        caller,
        request.stream(),
        content_type=request.headers.get("content-type", ""),
        content_length=int(length) if length.isdigit() else None,
        idempotency_key=idempotency_key,
    )
    return upload_routes.version_answer(received)


@router.get("/v1/adapters", tags=["adapters"])
async def list_adapters(
    caller: ApiCaller, resources: ResourcesDep, after: After = None, limit: Limit = 20
) -> AdapterList:
    async with scoped(resources.db, caller) as session:
        return await service.list_adapters(session, caller, after=after, limit=limit)


@router.get("/v1/adapters/{name}", tags=["adapters"])
async def get_adapter(name: Name, caller: ApiCaller, resources: ResourcesDep) -> AdapterObject:
    async with scoped(resources.db, caller) as session:
        return await service.get_adapter(session, caller, name)


@router.get("/v1/adapters/{name}/versions/{number}", tags=["adapters"])
async def get_version(
    name: Name, number: Number, caller: ApiCaller, resources: ResourcesDep
) -> VersionObject:
    """The version with its validation report."""
    async with scoped(resources.db, caller) as session:
        return await service.get_version(session, caller, name, number)


@router.get(
    "/v1/adapters/{name}/versions/{number}/events",
    tags=["adapters"],
    response_class=StreamingResponse,
)
async def follow_version(
    name: Name, number: Number, caller: ApiCaller, resources: ResourcesDep
) -> StreamingResponse:
    """Server-sent events `state`, `check` and at last `done`, while the version is validated."""
    async with scoped(resources.db, caller) as session:
        _, version = await service.find_version(session, caller, name, number)
    return StreamingResponse(
        events.version_events(resources, version.id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.post("/v1/adapters/{name}/versions/{number}/archive", tags=["adapters"])
async def archive_version(
    name: Name, number: Number, caller: ApiCaller, resources: ResourcesDep
) -> VersionObject:
    """Takes a ready version out of service; its files stay and count as stored."""
    return await archiving.archive(resources, caller, name, number)


@router.post("/v1/adapters/{name}/versions/{number}/unarchive", tags=["adapters"])
async def unarchive_version(
    name: Name, number: Number, caller: ApiCaller, resources: ResourcesDep
) -> VersionObject:
    """Brings an archived version back, without an upload."""
    return await archiving.unarchive(resources, caller, name, number)


@router.delete("/v1/adapters/{name}", tags=["adapters"])
async def delete_adapter(
    name: Name, response: Response, caller: ApiCaller, resources: ResourcesDep
) -> ErasureReceipt:
    """Erases the adapter with all versions. 202 while an engine has yet to acknowledge."""
    return _with_status(response, await erasure.erase(resources, caller, name))


@router.delete("/v1/adapters/{name}/versions/{number}", tags=["adapters"])
async def delete_version(
    name: Name, number: Number, response: Response, caller: ApiCaller, resources: ResourcesDep
) -> ErasureReceipt:
    return _with_status(response, await erasure.erase(resources, caller, name, number))


def _with_status(response: Response, receipt: ErasureReceipt) -> ErasureReceipt:
    response.status_code = 200 if receipt.complete else 202
    return receipt


# --------------------------------------------------------------------------- operators


@router.get("/admin/v1/adapters", tags=["operator"])
async def list_all_adapters(
    caller: OperatorCaller,
    resources: ResourcesDep,
    tenant: Annotated[str | None, Query(max_length=40)] = None,
    after: After = None,
    limit: Limit = 20,
) -> OperatorAdapterList:
    """Every tenant's adapters, or one tenant's."""
    async with resources.db.reading() as session:
        return await operator.list_adapters(session, tenant_id=tenant, after=after, limit=limit)


@router.get("/admin/v1/adapters/validations", tags=["operator"])
async def list_validations(
    caller: OperatorCaller,
    resources: ResourcesDep,
    state: Annotated[
        Literal["queued", "running", "done", "failed", "cancelled"] | None, Query()
    ] = None,
    after: After = None,
    limit: Limit = 20,
) -> ValidationList:
    """The newest validation of each version, newest first, and how many wait, run and failed."""
    async with resources.db.reading() as session:
        return await operator.list_validations(session, state=state, after=after, limit=limit)


@router.get("/admin/v1/adapters/versions/{version_id}", tags=["operator"])
async def get_any_version(
    version_id: Name, caller: OperatorCaller, resources: ResourcesDep
) -> VersionObject:
    async with resources.db.reading() as session:
        return await operator.get_version(session, version_id)


@router.post("/admin/v1/adapters/versions/{version_id}/validate", tags=["operator"])
async def validate_again(
    version_id: Name, caller: OperatorCaller, resources: ResourcesDep
) -> VersionObject:
    """Queues a version again whose validation `failed`."""
    return await operator.validate_again(resources, caller, version_id)
