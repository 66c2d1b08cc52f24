"""Uploads in parts, for adapters too large to send in one go over a line that breaks.

    begin ──> put_part 0 … n, in any order, again, on any api process ──> complete ──> a version

Part 0 is adapter_config.json; parts 1 to n are adapter_model.safetensors in pieces of `part_bytes`
(the last one may be shorter). Parts lie in the store, so that every api process reaches them; their
rows say which sending of a part counts. Nothing is in an api process's memory between two calls.
"""

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import intake, repository, upload_repository
from app.adapters.models import Upload, UploadPart
from app.adapters.names import adapter_name, clip
from app.adapters.resolution import OutOfScope, scoped
from app.adapters.resources import Resources, storing
from app.adapters.schemas import (
    PartObject,
    UploadIn,
    UploadList,
    UploadObject,
    UploadVersion,
)
from app.adapters.service import require_writer
from app.adapters.uploads import (
    CONFIG_PART,
    MAX_CONFIG_BYTES,
    WRITE_BYTES,
    UploadGate,
    check_ranks,
    config_too_large,
    too_large,
)
from app.adapters.views import unix
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, Forbidden, InvalidRequest, NotFound
from app.ids import new_id
from engine.errors import AdapterMissing

log = structlog.get_logger(__name__)

UPLOAD_ID = re.compile(r"upl_[0-9a-z]{26}", re.ASCII)
DIGEST = re.compile(r"\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*", re.ASCII)
"""RFC 9530's Content-Digest with the one algorithm that is taken."""


class UploadOutOfScope(OutOfScope):
    """The tenant has the upload and this key may not use its name; answers as for none."""

    def __init__(self, upload: Upload) -> None:
        super().__init__(upload.name, upload.id)
        refusal = upload_not_found(upload.id)
        self.message, self.code, self.param = refusal.message, refusal.code, refusal.param


def upload_not_found(upload_id: str) -> NotFound:
    """The one answer for unknown, foreign, dropped and expired uploads."""
    return NotFound(
        f"There is no upload {clip(upload_id, 40)!r}; it may have expired. GET /v1/uploads lists "
        "those that wait for parts.",
        code="upload_not_found",
        param="id",
    )


def part_count(upload: Upload) -> int:
    """How many parts the weights have; with the config, numbers run from 0 to this."""
    return -(-upload.weights_bytes // upload.part_bytes)


def part_size(upload: Upload, number: int) -> int:
    """The bytes that the part of that number has."""
    if number == 0:
        return upload.config_bytes
    if number < part_count(upload):
        return upload.part_bytes
    return upload.weights_bytes - (number - 1) * upload.part_bytes


# --------------------------------------------------------------------------- begin, look, give up


async def begin(
    resources: Resources, session: AsyncSession, caller: Caller, body: UploadIn
) -> UploadObject:
    """Reserves the bytes. Raises what the upload would be refused for, as far as is known."""
    require_writer(caller)
    settings, now = resources.settings, resources.clock.now()
    name = adapter_name(body.name)
    if body.config_bytes > MAX_CONFIG_BYTES:
        raise config_too_large("config_bytes")
    if body.config_bytes + body.weights_bytes > settings.max_adapter_bytes:
        raise too_large(settings.max_adapter_bytes, param="weights_bytes")
    await intake.lock_living_tenant(session, caller)
    await intake.check_name(session, caller, name)
    if await repository.live_adapter(session, caller.tenant_id, name) is None:
        await intake.check_count(session, caller)
    waiting = await upload_repository.open_of(session, caller.tenant_id, now)
    if len(waiting) >= settings.max_open_uploads:
        raise Forbidden(
            f"your tenant has {len(waiting)} uploads that are not complete, of "
            f"{settings.max_open_uploads} it may have; complete one, or DELETE "
            f"/v1/uploads/{waiting[0].id}",
            code="too_many_open_uploads",
        )
    await intake.check_stored(session, caller, body.config_bytes + body.weights_bytes, now)
    upload = Upload(
        id=new_id("upl"),
        tenant_id=caller.tenant_id,
        name=name,
        state=upload_repository.OPEN,
        config_bytes=body.config_bytes,
        weights_bytes=body.weights_bytes,
        part_bytes=settings.upload_part_bytes,
        weights_sha256=body.weights_sha256,
        created_by=audit.actor_id(caller),
        created_at=now,
        expires_at=now + timedelta(seconds=settings.upload_expiry_s),
    )
    session.add(upload)
    await session.flush()
    return upload_object(upload, [])


async def list_open(resources: Resources, session: AsyncSession, caller: Caller) -> UploadList:
    """The uploads that wait for parts and that this key may continue."""
    uploads = await upload_repository.open_of(
        session, caller.tenant_id, resources.clock.now(), caller.adapter_scope
    )
    parts = await upload_repository.parts_of(session, [upload.id for upload in uploads])
    return UploadList(
        data=[upload_object(u, [p for p in parts if p.upload_id == u.id]) for u in uploads]
    )


async def get(
    resources: Resources, session: AsyncSession, caller: Caller, upload_id: str
) -> UploadObject:
    """Which parts are there. Raises NotFound."""
    upload = await find(resources, session, caller, upload_id)
    parts = await upload_repository.parts_of(session, [upload.id])
    version = None
    if upload.version_id is not None:
        row = await repository.version_by_id(session, upload.version_id)
        if row is not None:
            version = UploadVersion(id=row.id, adapter=upload.name, version=row.number)
    return upload_object(upload, parts, version)


async def give_up(resources: Resources, caller: Caller, upload_id: str) -> None:
    """Forgets an upload; what it reserved is free at once. A version it became stays."""
    require_writer(caller)
    async with scoped(resources.db, caller, write=True) as session:
        upload = await find(resources, session, caller, upload_id, lock=True)
        await upload_repository.drop(session, upload.id)
    await drop_stored_parts(resources, upload_id)


async def find(
    resources: Resources,
    session: AsyncSession,
    caller: Caller,
    upload_id: str,
    *,
    lock: bool = False,
) -> Upload:
    """The caller's upload. Raises NotFound, UploadOutOfScope among them."""
    upload = None
    if UPLOAD_ID.fullmatch(upload_id):
        upload = await upload_repository.find(
            session, caller.tenant_id, upload_id, resources.clock.now(), lock=lock
        )
    if upload is None:
        raise upload_not_found(upload_id)
    if not caller.may_call(upload.name):
        raise UploadOutOfScope(upload)
    return upload


# --------------------------------------------------------------------------- one part


@dataclass(frozen=True, slots=True)
class _Stored:
    """A part as it lies in the store."""

    stored_as: str
    nbytes: int
    sha256: str


async def put_part(
    resources: Resources,
    gate: UploadGate,
    caller: Caller,
    upload_id: str,
    number: int,
    stream: AsyncIterator[bytes],
    *,
    content_length: int | None = None,
    content_digest: str | None = None,
) -> PartObject:
    """Keeps one part. Sent again, the same bytes change nothing and others take their place."""
    require_writer(caller)
    announced = _announced_digest(content_digest)
    async with scoped(resources.db, caller) as session:
        upload = await find(resources, session, caller, upload_id)
    _require_open(upload)
    if number > part_count(upload):
        raise InvalidRequest(
            f"there is no part {number}: part 0 is {CONFIG_PART}, and the weights are parts 1 to "
            f"{part_count(upload)}",
            code="part_out_of_range",
            param="number",
        )
    size = part_size(upload, number)
    if content_length is not None and content_length != size:
        raise _wrong_size(number, size, content_length)
    with gate.enter(caller.tenant_id), storing():
        max_rank = caller.limits.max_rank if number == 0 else None
        stored = await _store(resources, upload.id, number, size, stream, announced, max_rank)
        return await _record(resources, caller, upload.id, number, stored)


async def _store(
    resources: Resources,
    upload_id: str,
    number: int,
    size: int,
    stream: AsyncIterator[bytes],
    announced: bytes | None,
    max_rank: int | None,
) -> _Stored:
    """`max_rank`: the part is the config, which fits one piece, and its ranks are looked at."""
    writer = await asyncio.to_thread(resources.store.new_part, upload_id)
    try:
        hashed, taken = hashlib.sha256(), 0
        pending, pending_bytes = [], 0
        async for chunk in stream:
            taken += len(chunk)
            if taken > size:
                raise _wrong_size(number, size, taken)
            hashed.update(chunk)
            pending.append(chunk)
            pending_bytes += len(chunk)
            if pending_bytes >= WRITE_BYTES:
                await asyncio.to_thread(writer.write, b"".join(pending))
                pending, pending_bytes = [], 0
        if taken != size:
            raise _wrong_size(number, size, taken)
        if announced is not None and hashed.digest() != announced:
            raise InvalidRequest(
                f"part {number} does not have the sha-256 that Content-Digest announced; it was "
                "damaged on its way, so send it again",
                code="digest_mismatch",
                param="Content-Digest",
            )
        if max_rank is not None:
            check_ranks(b"".join(pending), max_rank)
        await asyncio.to_thread(writer.write, b"".join(pending))
        try:
            stored_as = await asyncio.to_thread(writer.finish)
        except AdapterMissing as error:  # its folder went with the upload
            raise upload_not_found(upload_id) from error
    finally:
        await asyncio.to_thread(writer.abort)
    return _Stored(stored_as, taken, hashed.hexdigest())


async def _record(
    resources: Resources, caller: Caller, upload_id: str, number: int, stored: _Stored
) -> PartObject:
    """Makes this sending the one that counts; the store loses whichever does not."""
    unwanted = stored.stored_as
    try:
        async with resources.db.transaction() as session:
            upload = await find(resources, session, caller, upload_id, lock=True)
            _require_open(upload)
            row = await upload_repository.part(session, upload_id, number)
            if row is None or row.sha256 != stored.sha256:
                replaced = None if row is None else row.stored_as
                if row is None:
                    row = UploadPart(upload_id=upload_id, number=number)
                    session.add(row)
                row.stored_as, row.sha256 = stored.stored_as, stored.sha256
                row.nbytes, row.created_at = stored.nbytes, resources.clock.now()
                await session.flush()
                unwanted = replaced or ""
            answer = part_object(row)
    finally:
        if unwanted:
            await asyncio.to_thread(resources.store.drop_part, upload_id, unwanted)
    return answer


def _announced_digest(header: str | None) -> bytes | None:
    if header is None:
        return None
    found = DIGEST.fullmatch(header)
    if found is not None:
        try:
            return base64.b64decode(found[1], validate=True)
        except binascii.Error:
            pass
    raise InvalidRequest(
        "Content-Digest must be sha-256=:<base64>: (RFC 9530), or be left out",
        code="digest_malformed",
        param="Content-Digest",
    )


def _require_open(upload: Upload) -> None:
    if upload.state != upload_repository.OPEN:
        raise Conflict(
            "this upload is complete; begin another one to send other bytes",
            code="upload_completed",
            param="id",
        )


def _wrong_size(number: int, size: int, got: int) -> InvalidRequest:
    return InvalidRequest(
        f"part {number} of this upload has {size} bytes, and {got} or more were sent"
        if got > size
        else f"part {number} of this upload has {size} bytes, and only {got} were sent",
        code="part_size_mismatch",
        param="number",
    )


# --------------------------------------------------------------------------- what is left behind


async def drop_of_tenant(resources: Resources, tenant_id: str) -> None:
    """Drops everything that a deleted tenant has sent and not completed."""
    async with resources.db.transaction() as session:
        upload_ids = await upload_repository.ids_of(session, tenant_id)
        for upload_id in upload_ids:
            await upload_repository.drop(session, upload_id)
    for upload_id in upload_ids:
        await drop_stored_parts(resources, upload_id)


async def drop_stored_parts(resources: Resources, upload_id: str) -> None:
    """Removes an upload's parts from the store; what fails here is left to the sweep."""
    try:
        with storing():
            await asyncio.to_thread(resources.store.drop_parts, upload_id)
    except Exception as error:  # noqa: BLE001 - the rows are right already
        log.warning("upload_parts_left", upload=upload_id, error=type(error).__name__)


# --------------------------------------------------------------------------- views


def missing_parts(upload: Upload, parts: Sequence[UploadPart]) -> list[int]:
    """Numbers of the parts that have not arrived."""
    there = {part.number for part in parts}
    return [number for number in range(part_count(upload) + 1) if number not in there]


def part_object(part: UploadPart) -> PartObject:
    return PartObject(number=part.number, bytes=part.nbytes, sha256=part.sha256)


def upload_object(
    upload: Upload, parts: Sequence[UploadPart], version: UploadVersion | None = None
) -> UploadObject:
    is_open = upload.state == upload_repository.OPEN
    return UploadObject(
        id=upload.id,
        name=upload.name,
        state="open" if is_open else "completed",
        config_bytes=upload.config_bytes,
        weights_bytes=upload.weights_bytes,
        part_bytes=upload.part_bytes,
        parts=part_count(upload),
        received=[part_object(part) for part in parts],
        missing=missing_parts(upload, parts) if is_open else [],
        version=version,
        created_at=unix(upload.created_at),
        expires_at=unix(upload.expires_at),
    )
