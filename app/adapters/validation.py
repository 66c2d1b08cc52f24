"""One validation of one version, from claim to verdict. Safe to deliver twice, safe to kill.

claim (lease, attempt counted) > container > config > coverage > numbers   in a child process
  > behaviour   in the engine > ready | rejected
no verdict: the run goes back to the queue; after the last attempt the version is `failed`
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.adapters import base_models, repository, run_repository, states
from app.adapters.check_process import CheckCrashed
from app.adapters.file_checks import check_files
from app.adapters.live_alias import follow_live
from app.adapters.models import Check, ValidationRun
from app.adapters.notices import announce
from app.adapters.outcome import CheckOutcome, first_failure
from app.adapters.probes import Engine, ProbeInterrupted, Thresholds, probe
from app.adapters.resources import Resources
from app.audit import service as audit
from app.ids import new_id
from app.logging import where
from app.tenants import repository as tenants
from app.webhooks.outbox import deliver_soon
from engine.errors import (
    AdapterCorrupt,
    AdapterMissing,
    EngineError,
    EngineUnavailable,
    StoreUnavailable,
)
from engine.types import AdapterRef, ModelDescription, ResidentBytes

log = structlog.get_logger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
RENEWALS = 3
"""How often a lease is renewed in its own time."""
RETRY_AFTER_S = 15.0
"""Pause before a run without a verdict is taken up again."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the holder of a lease knows of its work."""

    run_id: str
    owner: str
    version_id: str
    adapter_id: str
    tenant_id: str
    number: int
    ref: AdapterRef
    max_rank: int
    max_resident_bytes: int | None
    last_attempt: bool


class LeaseLost(Exception):
    """Another worker holds the run, or the version was erased; nothing more may be written."""


class NoVerdict(Exception):
    """The attempt ended without one. `counts`: it is one of the attempts a version has."""

    def __init__(self, code: str, message: str, *, counts: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.counts = counts


async def validate(resources: Resources, version_id: str) -> str:
    """Works on the version's open run, if it can be had; returns what came of it, for the log."""
    claim = await _claim(resources, version_id)
    if claim is None:
        return "nothing to do"
    try:
        result = await _while_held(resources, claim)
    except LeaseLost:
        return "taken over"
    await deliver_soon(resources.db, resources.queue, claim.tenant_id, resources.clock.now())
    return result


async def _while_held(resources: Resources, claim: Claim) -> str:
    """Works on a claimed run, and gives up when its lease is lost.

    The lease is short and renewed while this process lives, so that what a killed worker leaves is
    taken up soon, however long a check may take.
    """
    working = asyncio.create_task(_work(resources, claim))
    beating = asyncio.create_task(_keep_lease(resources, claim))
    try:
        await asyncio.wait((working, beating), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        beating.result()  # raises LeaseLost
        raise LeaseLost
    finally:
        for task in (working, beating):
            task.cancel()
        await asyncio.gather(working, beating, return_exceptions=True)


async def _work(resources: Resources, claim: Claim) -> str:
    try:
        outcomes, description = await _check(resources, claim)
        return await _conclude(resources, claim, outcomes, description)
    except NoVerdict as reason:
        return await _put_back(resources, claim, reason)
    except (LeaseLost, SQLAlchemyError):
        raise  # nothing can or may be written now; the lease runs out
    except Exception as error:  # noqa: BLE001 - a fault of ours must not make a task that loops
        log.error("validation_broke", error=type(error).__name__, where=where(error))
        broke = NoVerdict(
            "validation_error",
            f"the validation stopped with {type(error).__name__}; this is a fault of the server's",
            counts=True,
        )
        return await _put_back(resources, claim, broke)


async def _keep_lease(resources: Resources, claim: Claim) -> None:
    while True:
        await asyncio.sleep(resources.settings.validation_lease_s / RENEWALS)
        try:
            await _renew(resources, claim)
        except SQLAlchemyError as error:  # the next renewal may still be in time
            log.warning("lease_not_renewed", error=type(error).__name__)


async def _claim(resources: Resources, version_id: str) -> Claim | None:
    """Takes the lease and moves the version to `validating`, in one transaction."""
    settings = resources.settings
    now = resources.clock.now()
    owner = new_id("wrk")
    async with resources.db.transaction() as session:
        run = await run_repository.open_run(session, version_id)
        if run is None or not await run_repository.claim(
            session,
            run.id,
            owner=owner,
            now=now,
            lease_until=now + timedelta(seconds=settings.validation_lease_s),
            max_attempts=settings.validation_attempts,
        ):
            return None
        await repository.move(session, version_id, states.VALIDATING, now=now)
        await run_repository.drop_checks(session, run.id)
        version = await repository.version_by_id(session, version_id)
        if version is None:
            return None
        tenant = await tenants.get(session, version.tenant_id)
        if tenant is None:
            return None
        return Claim(
            run_id=run.id,
            owner=owner,
            version_id=version_id,
            adapter_id=version.adapter_id,
            tenant_id=version.tenant_id,
            number=version.number,
            ref=AdapterRef(salt=tenant.salt, digest=version.digest),
            max_rank=min(tenant.max_rank or settings.max_rank, settings.max_rank),
            max_resident_bytes=tenant.max_resident_bytes or settings.tenant_max_resident_bytes,
            last_attempt=run.attempts >= settings.validation_attempts,
        )


# --------------------------------------------------------------------------- the checks


async def _check(resources: Resources, claim: Claim) -> tuple[list[CheckOutcome], ModelDescription]:
    """Runs the checks in order up to the first that fails, and writes each as it finishes."""
    engine, description = await _fitting_base(resources, claim)
    outcomes: list[CheckOutcome] = []
    try:
        async with aclosing(_file_checks(resources, claim, description)) as checks:
            async for outcome in checks:
                await _record(resources, claim, outcome)
                outcomes.append(outcome)
    except CheckCrashed as crash:
        raise NoVerdict(crash.code, crash.message, counts=True) from crash
    if first_failure(outcomes) is None:
        outcome = await _behaviour(resources, claim, engine, description)
    else:
        outcome = CheckOutcome("behaviour", "skipped")
    await _record(resources, claim, outcome)
    outcomes.append(outcome)
    return outcomes, description


async def _fitting_base(
    resources: Resources, claim: Claim
) -> tuple[Engine | None, ModelDescription]:
    """The base model that the adapter is for, where engines serve several: the first one whose
    checks its files pass, else the one with which they come furthest."""
    bases = await _bases(resources)
    furthest, most = bases[0], -1
    for base in bases if len(bases) > 1 else ():
        await _renew(resources, claim)
        passed = 0
        try:
            async with aclosing(_file_checks(resources, claim, base[1])) as checks:
                async for outcome in checks:
                    passed += outcome.status != "fail"
        except CheckCrashed:
            continue  # the recorded run meets it again and says so
        if passed > most:
            furthest, most = base, passed
    return furthest


async def _bases(resources: Resources) -> list[tuple[Engine | None, ModelDescription]]:
    """The base models of the engines that answer, each once; else the one that was last seen."""
    served: dict[str, tuple[Engine | None, ModelDescription]] = {}
    for engine in resources.engines:
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                description = await engine.describe()
        except (EngineError, TimeoutError):
            continue
        await base_models.remember(resources.db, description, resources.clock.now())
        served.setdefault(description.base_digest, (engine, description))
    if served:
        return list(served.values())
    known = await base_models.last_seen(resources.db)
    if known is None:
        raise NoVerdict(
            "engine_unavailable",
            "no engine has described its base model yet; the checks begin when one has",
            counts=False,
        )
    return [(None, known)]


async def _file_checks(
    resources: Resources, claim: Claim, description: ModelDescription
) -> AsyncGenerator[CheckOutcome]:
    try:
        files = await asyncio.to_thread(resources.store.open, claim.ref)
    except (AdapterMissing, AdapterCorrupt) as error:
        raise NoVerdict(error.code, error.message, counts=True) from error
    except StoreUnavailable as error:
        raise NoVerdict(error.code, error.message, counts=False) from error
    checks = check_files(
        files.weights_path.parent,
        description,
        max_rank=claim.max_rank,
        settings=resources.settings,
    )
    try:
        async with aclosing(checks) as outcomes:
            async for outcome in outcomes:
                yield outcome
    finally:
        await asyncio.to_thread(resources.store.release, files)


async def _behaviour(
    resources: Resources, claim: Claim, engine: Engine | None, description: ModelDescription
) -> CheckOutcome:
    settings = resources.settings
    if engine is None:
        raise NoVerdict(
            "engine_unavailable", "waiting for an engine to try the adapter in", counts=False
        )
    started_ms = resources.clock.monotonic_ms()
    try:
        outcome = await probe(
            engine,
            lambda text: resources.encode(description, text),
            claim.ref,
            Thresholds(
                divergence_nats=settings.validation_divergence_warn_nats,
                cost_ratio=settings.validation_cost_warn_ratio,
            ),
            resident=ResidentBytes(claim.max_resident_bytes),
            timeout_s=settings.validation_timeout_s,
            alive=lambda: _renew(resources, claim),
        )
    except ProbeInterrupted as error:
        raise NoVerdict("engine_unavailable", error.message, counts=error.adapter_ran) from error
    except EngineUnavailable as error:
        raise NoVerdict("engine_unavailable", error.message, counts=False) from error
    return CheckOutcome(
        group=outcome.group,
        status=outcome.status,
        findings=outcome.findings,
        figures=outcome.figures,
        duration_ms=int(resources.clock.monotonic_ms() - started_ms),
    )


# --------------------------------------------------------------------------- what is written


def _lease(resources: Resources) -> dict[str, Any]:
    now = resources.clock.now()
    return {"lease_until": now + timedelta(seconds=resources.settings.validation_lease_s)}


async def _renew(resources: Resources, claim: Claim) -> None:
    async with resources.db.transaction() as session:
        if not await run_repository.change_held(
            session, claim.run_id, claim.owner, **_lease(resources)
        ):
            raise LeaseLost


async def _record(resources: Resources, claim: Claim, outcome: CheckOutcome) -> None:
    """Writes one check and renews the lease; only the lease's holder may."""
    async with resources.db.transaction() as session:
        if not await run_repository.change_held(
            session, claim.run_id, claim.owner, **_lease(resources)
        ):
            raise LeaseLost
        session.add(
            Check(
                id=new_id("chk"),
                run_id=claim.run_id,
                version_id=claim.version_id,
                position=outcome.position,
                check_group=outcome.group,
                status=outcome.status,
                findings=outcome.findings,
                figures=outcome.figures,
                duration_ms=outcome.duration_ms,
                created_at=resources.clock.now(),
            )
        )


async def _conclude(
    resources: Resources,
    claim: Claim,
    outcomes: list[CheckOutcome],
    description: ModelDescription,
) -> str:
    failure = first_failure(outcomes)
    if failure is not None:
        return await _reject(resources, claim, failure, description)
    facts = _facts(outcomes)
    now = resources.clock.now()
    async with resources.db.transaction() as session:
        await repository.lock_tenant(session, claim.tenant_id)
        if not await _close_run(resources, session, claim, run_repository.DONE):
            raise LeaseLost
        moved = await repository.move(
            session,
            claim.version_id,
            states.READY,
            now=now,
            ready_at=now,
            code=None,
            reason=None,
            base_digest=description.base_digest,
            **facts,
        )
        if not moved:
            raise LeaseLost
        await follow_live(session, claim.adapter_id, claim.tenant_id, claim.version_id, now)
        await announce(session, claim.version_id, resources.settings, now)
        await _audit(session, claim, "adapter.ready", {})
    return states.READY


async def _reject(
    resources: Resources,
    claim: Claim,
    failure: tuple[str, str],
    description: ModelDescription,
) -> str:
    code, message = failure
    async with resources.db.transaction() as session:
        if not await _close_run(resources, session, claim, run_repository.DONE):
            raise LeaseLost
        moved = await repository.move(
            session,
            claim.version_id,
            states.REJECTED,
            now=resources.clock.now(),
            code=code,
            reason=message,
            base_digest=description.base_digest,
        )
        if not moved:
            raise LeaseLost
        await announce(session, claim.version_id, resources.settings, resources.clock.now())
        await _audit(session, claim, "adapter.rejected", {"code": code})
    return states.REJECTED


async def _put_back(resources: Resources, claim: Claim, reason: NoVerdict) -> str:
    """Queues the run for another attempt, or gives the version up after the last one."""
    log.warning("validation ended without a verdict", version_id=claim.version_id, code=reason.code)
    if reason.counts and claim.last_attempt:
        return await _fail(resources, claim, reason)
    now = resources.clock.now()
    values: dict[str, Any] = {}
    if not reason.counts:
        values["attempts"] = ValidationRun.attempts - 1
    async with resources.db.transaction() as session:
        held = await run_repository.change_held(
            session,
            claim.run_id,
            claim.owner,
            state=run_repository.QUEUED,
            owner=None,
            lease_until=None,
            not_before=now + timedelta(seconds=RETRY_AFTER_S),
            sent_at=None,
            code=reason.code,
            message=reason.message,
            **values,
        )
        if held:
            await repository.move(
                session, claim.version_id, states.UPLOADED, now=now, frm=states.VALIDATING
            )
    return "queued again"


async def _fail(resources: Resources, claim: Claim, reason: NoVerdict) -> str:
    async with resources.db.transaction() as session:
        closed = await _close_run(
            resources,
            session,
            claim,
            run_repository.FAILED,
            code=reason.code,
            message=reason.message,
        )
        if not closed:
            raise LeaseLost
        await repository.move(
            session,
            claim.version_id,
            states.FAILED,
            now=resources.clock.now(),
            code=reason.code,
            reason=reason.message,
        )
        await announce(session, claim.version_id, resources.settings, resources.clock.now())
        await _audit(session, claim, "adapter.failed", {"code": reason.code})
    return states.FAILED


async def _close_run(
    resources: Resources, session: Any, claim: Claim, state: str, **values: Any
) -> bool:
    return await run_repository.change_held(
        session,
        claim.run_id,
        claim.owner,
        state=state,
        finished_at=resources.clock.now(),
        lease_until=None,
        **values,
    )


async def _audit(session: Any, claim: Claim, action: str, detail: dict[str, Any]) -> None:
    await audit.record(
        session,
        actor="worker",
        action=action,
        target=claim.version_id,
        tenant_id=claim.tenant_id,
        detail={"adapter_id": claim.adapter_id, "version": claim.number, **detail},
    )


def _facts(outcomes: list[CheckOutcome]) -> dict[str, Any]:
    """The rank and targets of an accepted adapter, from the coverage check's figures."""
    figures = next(o.figures for o in outcomes if o.group == "coverage")
    return {"rank": figures.get("max_rank"), "targets": figures.get("targets")}
