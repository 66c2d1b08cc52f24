"""The four groups that look at files alone, as the worker and `loramux adapters check` run them.

Both go through here, so a file gets one report: the same code in the same bounded process.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from app.adapters.check_process import Bounds, CheckCrashed, run_checks
from app.adapters.outcome import GROUPS, CheckOutcome
from app.settings import Settings
from engine.types import ModelDescription


async def check_files(
    folder: Path, description: ModelDescription, *, max_rank: int, settings: Settings
) -> AsyncGenerator[CheckOutcome]:
    """The groups' outcomes as each is known; files that bring the process down fail the group.

    Raises CheckCrashed when it ended without a verdict for another reason.
    """
    done = 0
    checks = run_checks(
        folder,
        description,
        max_rank=max_rank,
        max_bytes=settings.max_adapter_bytes,
        bounds=Bounds(
            memory_bytes=settings.validation_memory_bytes,
            cpu_s=max(1, int(settings.validation_timeout_s)),
            wall_s=settings.validation_timeout_s,
        ),
    )
    try:
        async with aclosing(checks) as outcomes:
            async for outcome in outcomes:
                yield outcome
                done += 1
    except CheckCrashed as crash:
        if not crash.files_fault:
            raise
        yield CheckOutcome.failed(GROUPS[done], crash.code, crash.message)


async def report(
    folder: Path, description: ModelDescription, *, max_rank: int, settings: Settings
) -> dict[str, Any]:
    """The whole report as plain JSON values: `status` is the worst of the groups'."""
    groups = [
        {
            "name": outcome.group,
            "status": outcome.status,
            "findings": outcome.findings,
            "figures": outcome.figures,
        }
        async for outcome in check_files(folder, description, max_rank=max_rank, settings=settings)
    ]
    found = {group["status"] for group in groups}
    worst = next((status for status in ("fail", "warn") if status in found), "pass")
    return {"status": worst, "groups": groups}
