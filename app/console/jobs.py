"""The operator's page of jobs: validations that run, wait and have failed; webhooks that fail."""

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from app.adapters import operator as validations
from app.adapters.deps import ResourcesDep
from app.adapters.schemas import ValidationObject
from app.console.figures import moment
from app.console.operator import Operator
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError
from app.platform import Platform
from app.tenants import service as tenants
from app.webhooks.failing_repository import failing

router = APIRouter(prefix="/console/jobs", include_in_schema=False)

MOST = 25
STATES = (
    ("failed", "Failed", "None has failed. One that fails every attempt waits here for you."),
    ("running", "Running", "None runs now."),
    ("queued", "Waiting", "None waits."),
)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """The newest runs of one state; `empty` is said where there is none."""

    title: str
    empty: str
    runs: list[ValidationObject]
    more: bool


@router.get("")
async def jobs_page(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    return await _page(request, platform)


@router.post("/{version_id}/retry")
async def retry(
    version_id: Annotated[str, Path(max_length=40)],
    request: Request,
    caller: Operator,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> Response:
    """Gives a failed version another run, with all its attempts."""
    try:
        await validations.validate_again(resources, caller, version_id)
    except AppError as error:
        return await _page(request, platform, error=error)
    return RedirectResponse("/console/jobs", status_code=303)


async def _page(request: Request, platform: Platform, *, error: AppError | None = None) -> Response:
    groups: list[RunGroup] = []
    async with platform.db.reading() as session:
        counts = await validations.count_validations(session)
        for state, title, empty in STATES:
            rows, more = await validations.page_validations(session, state=state, limit=MOST)
            groups.append(RunGroup(title, empty, rows, more))
        names = await tenants.named(
            session, {run.tenant_id for group in groups for run in group.runs}
        )
        hooks = await failing(session, MOST)
    return render(
        request,
        "jobs.html",
        counts=counts,
        groups=groups,
        attempts=platform.settings.validation_attempts,
        names={id_: tenant.name for id_, tenant in names.items()},
        hooks=[(hook, urlsplit(hook.url).hostname or "") for hook in hooks],
        moment=moment,
        error=error,
    )
