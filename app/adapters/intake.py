"""What has arrived becomes a version: quotas, files, rows and the validation's run, in one commit.

The tenant's lock spans all of it, so an erasure of the same content comes before or after.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, run_repository, states, upload_repository
from app.adapters.models import Adapter, AdapterVersion, UploadKey, ValidationRun
from app.adapters.resources import Resources
from app.adapters.schemas import VersionObject
from app.adapters.service import with_report
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, Forbidden
from app.ids import new_id
from engine.adapters.store import Staging

NAME = "name"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Arrived:
    """An adapter whose two files are whole in a staging."""

    name: str
    config_bytes: int
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The version that holds the content now. `run`: its validation, unless it was here before."""

    adapter: Adapter
    version: AdapterVersion
    run: ValidationRun | None


async def lock_living_tenant(session: AsyncSession, caller: Caller) -> None:
    """Takes the tenant's lock. Raises Forbidden when the tenant is being deleted."""
    if not await repository.lock_tenant(session, caller.tenant_id):
        raise Forbidden("This tenant was deleted; nothing was kept.", code="tenant_deleted")


async def keep(
    resources: Resources,
    session: AsyncSession,
    caller: Caller,
    arrived: Arrived,
    staging: Staging,
    *,
    upload_id: str | None = None,
) -> Kept:
    """Puts the files in the store and adds their rows; the caller holds the tenant's lock.

    `upload_id`: the upload that they came by, whose reservation they use up.
    """
    now = resources.clock.now()
    await check_name(session, caller, arrived.name)
    adapter = await repository.live_adapter(session, caller.tenant_id, arrived.name)
    version = None
    if adapter is not None:
        version = await repository.version_with_digest(session, adapter.id, staging.digest)
    if version is None:
        await _check_quotas(
            session, caller, staging.digest, arrived, now, new=adapter is None, upload_id=upload_id
        )
    await asyncio.to_thread(staging.commit, caller.tenant_salt)
    if adapter is None:
        adapter = Adapter(
            id=new_id("adp"),
            tenant_id=caller.tenant_id,
            name=arrived.name,
            created_by=audit.actor_id(caller),
            created_at=now,
        )
        session.add(adapter)
        await session.flush()
    run = None
    if version is None:
        version = await _new_version(session, caller, adapter, arrived, staging.digest, now)
        run = open_run(session, version, resources)
    elif await _deserves_another_try(session, version):
        await repository.move(
            session, version.id, states.UPLOADED, frm=version.state, now=now, code=None, reason=None
        )
        await session.refresh(version)
        run = open_run(session, version, resources)
    if run is not None:
        await audit.record(
            session,
            actor=caller,
            action="adapter.upload",
            target=version.id,
            tenant_id=caller.tenant_id,
            detail={"adapter_id": adapter.id, "name": arrived.name, "version": version.number},
        )
    await session.flush()
    return Kept(adapter, version, run)


async def _new_version(
    session: AsyncSession,
    caller: Caller,
    adapter: Adapter,
    arrived: Arrived,
    digest: str,
    now: datetime,
) -> AdapterVersion:
    version = AdapterVersion(
        id=new_id("ver"),
        adapter_id=adapter.id,
        tenant_id=caller.tenant_id,
        number=await repository.last_number(session, adapter.id) + 1,
        digest=digest,
        state=states.UPLOADED,
        config_bytes=arrived.config_bytes,
        weights_bytes=arrived.weights_bytes,
        created_by=audit.actor_id(caller),
        created_at=now,
        updated_at=now,
    )
    session.add(version)
    await session.flush()
    return version


async def _deserves_another_try(session: AsyncSession, version: AdapterVersion) -> bool:
    """Sent again, a version that failed is validated anew; a rejected one only on another base."""
    if version.state == states.FAILED:
        return True
    if version.state != states.REJECTED or version.base_digest is None:
        return False
    known = await repository.base_models(session)
    return bool(known) and known[0].base_digest != version.base_digest


async def view(session: AsyncSession, kept: Kept) -> VersionObject:
    """The version as the API shows it."""
    return await with_report(session, kept.adapter, kept.version)


def open_run(session: AsyncSession, version: AdapterVersion, resources: Resources) -> ValidationRun:
    """Queues a validation of the version in the caller's transaction."""
    run = ValidationRun(
        id=new_id("run"),
        version_id=version.id,
        tenant_id=version.tenant_id,
        state=run_repository.QUEUED,
        attempts=0,
        created_at=resources.clock.now(),
    )
    session.add(run)
    return run


# --------------------------------------------------------------------------- may it be kept?


async def check_name(session: AsyncSession, caller: Caller, name: str) -> None:
    """Raises Conflict for the base model's name, Forbidden for one beyond the key's scope."""
    for base in await repository.base_models(session):
        if base.name.lower() == name:
            raise Conflict(
                f"{name!r} is the base model's name; choose another one",
                code="name_of_base_model",
                param=NAME,
            )
    if not caller.may_call(name):
        raise Forbidden(
            f"this key may only use some adapters, and {name!r} is not among them",
            code="adapter_out_of_scope",
            param=NAME,
        )


async def check_count(session: AsyncSession, caller: Caller) -> None:
    """Raises Forbidden when the tenant may have no further adapter."""
    most = caller.limits.max_adapters
    if most is None:
        return
    count = await repository.count_adapters(session, caller.tenant_id)
    if count >= most:
        raise Forbidden(
            f"your tenant has {count} adapters of the {most} it may have; delete one or upload "
            "a new version of an existing one",
            code="adapters_exceeded",
            param=NAME,
        )


async def check_stored(
    session: AsyncSession,
    caller: Caller,
    more: int,
    now: datetime,
    *,
    upload_id: str | None = None,
) -> None:
    """Raises Forbidden when stored and reserved bytes leave no room for `more`."""
    most = caller.limits.max_stored_bytes
    if most is None:
        return
    held = await repository.stored_bytes(session, caller.tenant_id)
    reserved = await upload_repository.reserved_bytes(
        session, caller.tenant_id, now, besides=upload_id
    )
    if held + reserved + max(0, more) > most:
        raise Forbidden(
            f"your adapters would take {held + reserved + max(0, more)} bytes of the {most} that "
            f"your tenant may store ({reserved} of them are reserved by uploads that are not "
            "complete); delete versions you no longer call, or uploads you will not finish",
            code="stored_bytes_exceeded",
            param=WEIGHTS,
        )


async def _check_quotas(
    session: AsyncSession,
    caller: Caller,
    digest: str,
    arrived: Arrived,
    now: datetime,
    *,
    new: bool,
    upload_id: str | None,
) -> None:
    """Content that the tenant has already takes no further room."""
    if new:
        await check_count(session, caller)
    if not await repository.others_with_digest(session, caller.tenant_id, digest, besides=[]):
        more = arrived.config_bytes + arrived.weights_bytes
        await check_stored(session, caller, more, now, upload_id=upload_id)


# --------------------------------------------------------------------------- idempotency keys


def fingerprint(name: str, digest: str) -> str:
    """What an Idempotency-Key stands for: this content under this name."""
    return _hash(f"{name}\n{digest}")


async def seen_key(
    session: AsyncSession, caller: Caller, fingerprint: str, key: str | None
) -> VersionObject | None:
    """What an earlier upload with this Idempotency-Key made."""
    if key is None:
        return None
    row = await repository.upload_key(session, caller.tenant_id, _hash(key))
    if row is None:
        return None
    if row.fingerprint != fingerprint:
        raise Conflict(
            "this Idempotency-Key came with another upload before; use a new one",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )
    version = await repository.version_by_id(session, row.version_id)
    if version is None:
        return None
    return await with_report(session, await repository.adapter_of(session, version), version)


def remember_key(
    resources: Resources,
    session: AsyncSession,
    caller: Caller,
    kept: Kept,
    fingerprint: str,
    key: str,
) -> None:
    session.add(
        UploadKey(
            tenant_id=caller.tenant_id,
            key_hash=_hash(key),
            version_id=kept.version.id,
            fingerprint=fingerprint,
            created_at=resources.clock.now(),
        )
    )


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()
