"""/v1/uploads: adapters in parts, for large files and lines that break."""

from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from fastapi.responses import JSONResponse

from app.adapters import resumable, upload_completion
from app.adapters.deps import GateDep, ResourcesDep
from app.adapters.resolution import scoped
from app.adapters.schemas import (
    PartObject,
    UploadGone,
    UploadIn,
    UploadList,
    UploadObject,
    VersionObject,
)
from app.adapters.uploads import Received
from app.audit.service import actor_id
from app.auth import ApiCaller
from app.deps import IdempotencyKey, PlatformDep
from app.idempotency.service import create_once

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])

UploadId = Annotated[str, Path(max_length=200)]
PartNumber = Annotated[int, Path(ge=0, le=2**31 - 1)]
PART_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("", status_code=201)
async def begin_upload(
    body: UploadIn,
    caller: ApiCaller,
    resources: ResourcesDep,
    platform: PlatformDep,
    key: IdempotencyKey = None,
) -> UploadObject:
    """Reserves the bytes of both files and says how the weights are cut into parts."""
    async with resources.db.transaction() as session:
        return await create_once(
            session,
            lambda: resumable.begin(resources, session, caller, body),
            UploadObject,
            key=key,
            caller_id=actor_id(caller),
            route="uploads",
            body=body,
            secrets=platform.secrets,
            now=resources.clock.now(),
        )


@router.get("")
async def list_uploads(caller: ApiCaller, resources: ResourcesDep) -> UploadList:
    """The uploads that wait for parts."""
    async with scoped(resources.db, caller) as session:
        return await resumable.list_open(resources, session, caller)


@router.get("/{upload_id}")
async def get_upload(
    upload_id: UploadId, caller: ApiCaller, resources: ResourcesDep
) -> UploadObject:
    """Which parts are there, with their sha256, and which are missing."""
    async with scoped(resources.db, caller) as session:
        return await resumable.get(resources, session, caller, upload_id)


@router.put("/{upload_id}/parts/{number}", openapi_extra=PART_BODY)
async def put_part(
    upload_id: UploadId,
    number: PartNumber,
    request: Request,
    caller: ApiCaller,
    resources: ResourcesDep,
    gate: GateDep,
    content_digest: Annotated[
        str | None, Header(description="`sha-256=:<base64>:` (RFC 9530) of this part")
    ] = None,
) -> PartObject:
    """Takes one part: 0 is adapter_config.json, 1 and on are the weights. It may be sent again:
    the same bytes change nothing, others take their place until the upload is complete."""
    length = request.headers.get("content-length", "")
    return await resumable.put_part(
        resources,
        gate,
        caller,
        upload_id,
        number,
        request.stream(),
        content_length=int(length) if length.isdigit() else None,
        content_digest=content_digest,
    )


@router.post(
    "/{upload_id}/complete",
    status_code=202,
    response_model=VersionObject,
    responses={200: {"model": VersionObject, "description": "the same content was here already"}},
)
async def complete_upload(
    upload_id: UploadId, caller: ApiCaller, resources: ResourcesDep, gate: GateDep
) -> JSONResponse:
    """Makes the parts a version and queues its validation; asked again, it answers the same."""
    return version_answer(await upload_completion.complete(resources, gate, caller, upload_id))


@router.delete("/{upload_id}")
async def give_up_upload(
    upload_id: UploadId, caller: ApiCaller, resources: ResourcesDep
) -> UploadGone:
    """Drops the parts and gives back the reserved bytes. A version it became stays."""
    await resumable.give_up(resources, caller, upload_id)
    return UploadGone(id=upload_id)


def version_answer(received: Received) -> JSONResponse:
    """202 with a version that is new or queued again, 200 with one that was here before."""
    version = received.version
    return JSONResponse(
        version.model_dump(mode="json"),
        status_code=202 if received.created else 200,
        headers={"Location": f"/v1/adapters/{version.adapter}/versions/{version.version}"},
    )
