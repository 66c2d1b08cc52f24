"""GET /v1/limits: what the caller may use and what of it is used."""

from fastapi import APIRouter, Response

from app.auth import ApiCaller
from app.deps import PlatformDep, ReadSession
from app.limits.schemas import LimitsObject
from app.limits.service import limit_headers
from app.limits.standing import standing

router = APIRouter(prefix="/v1", tags=["limits"])


@router.get("/limits")
async def read_limits(
    caller: ApiCaller, platform: PlatformDep, session: ReadSession, response: Response
) -> LimitsObject:
    """The tenant's limits, those of this key, and where both stand."""
    decision = await platform.limits.peek(caller)
    response.headers.update(limit_headers(decision))
    return await standing(session, caller, decision, platform.clock.now())
