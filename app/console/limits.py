"""What the tenant may use, and how much of it is used now."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from app.auth import SessionUser
from app.console.adapters import tenant_only
from app.console.figures import size
from app.console.render import render
from app.deps import PlatformDep
from app.limits.routes import read_limits
from app.limits.schemas import LimitsObject

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
    async with platform.db.reading() as session:
        standing = await read_limits(caller, platform, session, Response())
    return render(request, "limits.html", meters=_meters(standing), fixed=_fixed(standing))


def _meters(standing: LimitsObject) -> list[Meter]:
    meters = [
        Meter(
            f"{level.name.capitalize()} in the last minute",
            level.used,
            level.limit,
            f"all of it is free again in {max(1, round(level.reset_ms / 1000))} s"
            if level.used
            else "",
        )
        for level in standing.per_minute
    ]
    meters.append(Meter("Requests at once", standing.concurrent, standing.max_concurrent))
    for month in standing.monthly_tokens:
        held = f"{month.reserved:,} more are held by running requests" if month.reserved else ""
        meters.append(Meter("Tokens this month (UTC)", month.used, month.limit, held))
    return meters


def _fixed(standing: LimitsObject) -> list[tuple[str, str]]:
    def count(value: int | None) -> str:
        return "no limit" if value is None else f"{value:,}"

    def budget(value: float | None) -> str:
        return "none" if value is None else f"{value:g} ms"

    stored = standing.max_stored_bytes
    return [
        ("Longest answer", f"{count(standing.max_tokens)} tokens"),
        ("Adapters", count(standing.max_adapters)),
        ("Stored adapters", "no limit" if stored is None else size(stored)),
        ("Highest rank", count(standing.max_rank)),
        ("Time to first token", budget(standing.ttft_ms)),
        ("Time per output token", budget(standing.tpot_ms)),
    ]
