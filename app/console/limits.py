"""What the tenant may use, and how much of it is used now."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from app.auth import SessionUser
from app.console.adapters import tenant_only
from app.console.figures import size
from app.console.render import render
from app.deps import PlatformDep
from app.limits.schemas import LimitsObject
from app.limits.standing import standing

router = APIRouter(prefix="/console/limits", include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit with its use; `limit` None: none is set."""

    title: str
    used: int
    limit: int | None
    note: str = ""

    @property
    def share(self) -> float:
        """0 to 1."""
        return min(1.0, self.used / self.limit) if self.limit else 0.0


@router.get("")
async def limits_page(request: Request, caller: SessionUser, platform: PlatformDep) -> Response:
    tenant_only(caller)
    decision = await platform.limits.peek(caller)
    async with platform.db.reading() as session:
        now = await standing(session, caller, decision, platform.clock.now())
    return render(request, "limits.html", meters=_meters(now), fixed=_fixed(now))


def _meters(now: LimitsObject) -> list[Meter]:
    meters = [
        Meter(
            f"{level.name.capitalize()} in the last minute",
            level.used,
            level.limit,
            f"all of it is free again in {max(1, round(level.reset_ms / 1000))} s"
            if level.used
            else "",
        )
        for level in now.per_minute
    ]
    meters.append(Meter("Requests at once", now.concurrent, now.max_concurrent))
    for month in now.monthly_tokens:
        held = f"{month.reserved:,} more are held by running requests" if month.reserved else ""
        meters.append(Meter("Tokens this month (UTC)", month.used, month.limit, held))
    return meters


def _fixed(now: LimitsObject) -> list[tuple[str, str]]:
    def count(value: int | None) -> str:
        return "no limit" if value is None else f"{value:,}"

    def budget(value: float | None) -> str:
        return "none" if value is None else f"{value:g} ms"

    stored = now.max_stored_bytes
    return [
        ("Longest answer", f"{count(now.max_tokens)} tokens"),
        ("Adapters", count(now.max_adapters)),
        ("Stored adapters", "no limit" if stored is None else size(stored)),
        ("Highest rank", count(now.max_rank)),
        ("Time to first token", budget(now.ttft_ms)),
        ("Time per output token", budget(now.tpot_ms)),
    ]
