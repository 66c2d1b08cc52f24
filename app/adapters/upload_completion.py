"""Completing an upload in parts: they become one adapter, and the adapter becomes a version."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import NoReturn

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import intake, repository, sweeps, upload_repository
from app.adapters.models import Upload, UploadPart
from app.adapters.resolution import scoped
from app.adapters.resources import Resources, storing
from app.adapters.resumable import drop_stored_parts, find, missing_parts, upload_not_found
from app.adapters.schemas import VersionObject
from app.adapters.service import require_writer
from app.adapters.uploads import Received, UploadGate
from app.caller import Caller
from app.errors import Conflict, InvalidRequest
from engine.adapters.store import Staging
from engine.errors import AdapterMissing

log = structlog.get_logger(__name__)


async def complete(
    resources: Resources, gate: UploadGate, caller: Caller, upload_id: str
) -> Received:
    """Puts the parts together and queues the validation. Asked again, it answers the same.

    The parts are read without any lock; they count only if they are still the ones that count
    when the version is committed. So it may be killed anywhere, and asked for twice at once.
    """
    require_writer(caller)
    async with scoped(resources.db, caller) as session:
        upload = await find(resources, session, caller, upload_id)
        if upload.state == upload_repository.COMPLETED:
            return Received(await _became(session, upload), created=False)
        parts = await upload_repository.parts_of(session, [upload_id])
    _require_all(upload, parts)
    with gate.enter(caller.tenant_id), storing():
        staging = await asyncio.to_thread(resources.store.stage)
        try:
            sha256 = await _assemble(resources, upload, parts, staging)
            if upload.weights_sha256 not in (None, sha256):
                raise InvalidRequest(
                    "the weights do not have the sha256 that was announced; compare the parts' "
                    "sha256 with your file's and send those again that differ",
                    code="digest_mismatch",
                    param="weights_sha256",
                )
            await asyncio.to_thread(staging.prepare)
            received, run_id = await _keep(resources, caller, upload, parts, staging)
        finally:
            await asyncio.to_thread(staging.abort)
    await drop_stored_parts(resources, upload_id)
    if run_id is not None:
        await sweeps.send(resources, run_id, received.version.id)
    return received


async def _keep(
    resources: Resources,
    caller: Caller,
    seen: Upload,
    parts: Sequence[UploadPart],
    staging: Staging,
) -> tuple[Received, str | None]:
    async with resources.db.transaction() as session:
        await intake.lock_living_tenant(session, caller)
        upload = await find(resources, session, caller, seen.id, lock=True)
        if upload.state == upload_repository.COMPLETED:
            return Received(await _became(session, upload), created=False), None
        now_there = await upload_repository.parts_of(session, [upload.id])
        if _names(now_there) != _names(parts):
            _changed()
        arrived = intake.Arrived(upload.name, upload.config_bytes, upload.weights_bytes)
        kept = await intake.keep(resources, session, caller, arrived, staging, upload_id=upload.id)
        upload.state = upload_repository.COMPLETED
        upload.version_id = kept.version.id
        await upload_repository.drop_parts(session, upload.id)
        await session.flush()
        view = await intake.view(session, kept)
    return Received(view, created=kept.run is not None), None if kept.run is None else kept.run.id


async def _assemble(
    resources: Resources, upload: Upload, parts: Sequence[UploadPart], staging: Staging
) -> str:
    """Writes the parts into the staging in order; the sha256 of the weights in hex.

    Parts that the store has lost are forgotten, so that they can be sent again.
    """
    hashed = hashlib.sha256()

    def copy(part: UploadPart) -> bool:
        found = hashlib.sha256()
        try:
            for chunk in resources.store.read_part(upload.id, part.stored_as):
                found.update(chunk)
                if part.number == 0:
                    staging.write_config(chunk)
                else:
                    hashed.update(chunk)
                    staging.write_weights(chunk)
        except AdapterMissing:
            return False
        return found.hexdigest() == part.sha256

    lost = [part for part in parts if not await asyncio.to_thread(copy, part)]
    if lost:
        await _forget_lost(resources, upload, lost)
        raise Conflict(
            f"{_numbers([part.number for part in lost])} no longer what was sent; send again what "
            f"GET /v1/uploads/{upload.id} says is missing, then complete",
            code="parts_lost",
            param="parts",
        )
    return hashed.hexdigest()


async def _forget_lost(resources: Resources, upload: Upload, lost: Sequence[UploadPart]) -> None:
    """Unless another sending of one counts by now, or the whole upload is complete."""
    log.error("upload_parts_lost", upload=upload.id, parts=[part.number for part in lost][:20])
    async with resources.db.transaction() as session:
        for part in lost:
            await upload_repository.drop_parts(session, upload.id, stored_as=part.stored_as)


def _require_all(upload: Upload, parts: Sequence[UploadPart]) -> None:
    missing = missing_parts(upload, parts)
    if missing:
        raise Conflict(f"{_numbers(missing)} missing", code="parts_missing", param="parts")


def _numbers(numbers: Sequence[int]) -> str:
    """`part 3 is`, `parts 1, 2 are`."""
    if len(numbers) == 1:
        return f"part {numbers[0]} is"
    shown = ", ".join(str(number) for number in numbers[:20])
    more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
    return f"parts {shown}{more} are"


def _changed() -> NoReturn:
    raise Conflict(
        "a part was sent again while the upload was being completed; complete it again",
        code="upload_changed",
        param="id",
    )


def _names(parts: Sequence[UploadPart]) -> list[tuple[int, str]]:
    return [(part.number, part.stored_as) for part in parts]


async def _became(session: AsyncSession, upload: Upload) -> VersionObject:
    """The version of a complete upload. Raises NotFound once it is erased."""
    version = None
    if upload.version_id is not None:
        version = await repository.version_by_id(session, upload.version_id)
    if version is None:
        raise upload_not_found(upload.id)
    adapter = await repository.adapter_of(session, version)
    return await intake.view(session, intake.Kept(adapter, version, None))
