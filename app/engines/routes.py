"""/admin/v1/engines."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.auth import OperatorCaller
from app.db import after_commit
from app.deps import PlatformDep, ReadSession, Session
from app.engines import service
from app.engines.models import EngineRecord
from app.engines.schemas import EngineOut, RefusedEngine
from app.engines.views import others, shown
from app.platform import Platform

router = APIRouter(prefix="/admin/v1/engines", tags=["operator: engines"])


@router.get("")
async def list_engines(
    session: ReadSession, platform: PlatformDep, _: OperatorCaller
) -> dict[str, Any]:
    """Every engine that was seen lately, with what it does now; and those that registered and are
    refused, with the reason."""
    rows = await service.list_engines(session)
    refused = platform.engines.refused.items()
    return {
        "object": "list",
        "data": [shown(platform, row) for row in rows],
        "refused": [RefusedEngine(address=address, reason=why) for address, why in refused],
        "has_more": False,
    }


@router.get("/{engine}")
async def get_engine(
    engine: str, session: ReadSession, platform: PlatformDep, _: OperatorCaller
) -> EngineOut:
    """By id or name."""
    return shown(platform, await service.find_engine(session, engine))


@router.post("/{engine}/drain")
async def drain_engine(
    engine: str,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
    force: Annotated[bool, Query()] = False,
) -> EngineOut:
    """It finishes what it has and gets nothing new, until it is resumed (also after a restart).

    The last engine of a base model is drained only with `force`.
    """
    row = await service.find_engine(session, engine)
    if not force:
        service.refuse_to_drain_the_last(row, others(platform, row))
    return await _set(session, platform, caller, row, drained=True)


@router.post("/{engine}/resume")
async def resume_engine(
    engine: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> EngineOut:
    """It takes requests again."""
    row = await service.find_engine(session, engine)
    return await _set(session, platform, caller, row, drained=False)


async def _set(
    session: Session,
    platform: Platform,
    caller: OperatorCaller,
    row: EngineRecord,
    *,
    drained: bool,
) -> EngineOut:
    row = await service.set_drained(session, row.id, drained=drained, actor=caller)
    after_commit(session, platform.engines.wake)
    return shown(platform, row)
