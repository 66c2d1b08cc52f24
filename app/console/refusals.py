"""Why a model did not answer, as the playground tells it to people, with the page to go on at."""

from dataclasses import dataclass

from app.adapters import service
from app.adapters.names import LIVE, ModelName, parse_model
from app.adapters.schemas import AdapterObject, VersionObject
from app.caller import Caller
from app.errors import AppError, NotFound
from app.platform import Platform

REASONS = {
    "uploaded": "still waits for its validation",
    "validating": "is still being validated",
    "rejected": "was rejected by its validation; the report says why",
    "failed": "could not be validated; upload it again",
    "archived": "is archived",
    "erased": "is erased",
}
"""What is so with a version that is not ready."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sentence, and where somebody goes on: `href` is "" where no page helps."""

    sentence: str
    href: str = ""
    label: str = ""

    def body(self, error: AppError) -> dict[str, object]:
        """The API's error object in these words, with `page` beside it."""
        told = AppError(self.sentence, code=error.code, param=error.param).body()
        page = {"href": self.href, "label": self.label} if self.href else None
        return told | {"page": page}


async def explain(platform: Platform, caller: Caller, model: object, error: AppError) -> Refusal:
    """`model`: what was asked for. A refusal about anything else stays as the API words it."""
    if not isinstance(error, NotFound) or error.param != "model" or not isinstance(model, str):
        return Refusal(error.message)
    wanted = parse_model(model)
    name = "" if wanted is None else wanted.name or wanted.adapter_id or ""
    try:
        async with platform.db.reading() as session:
            adapter = await service.get_adapter(session, caller, name)
    except NotFound:
        told = f"There is no model {model[:64]!r}. Choose one of the list, or upload it."
        return Refusal(told, "/console/adapters", "Your adapters")
    page = f"/console/adapters/{adapter.name}"
    version = None if wanted is None else _not_ready(adapter, wanted)
    if version is None:
        told = f"{adapter.name} has nothing that is called {model[:64]!r}."
        return Refusal(told, page, "Its versions and aliases")
    told = f"{adapter.name} v{version.version} {REASONS[version.state]}."
    report = f"{page}/versions/{version.version}"
    return Refusal(told, report, f"The report of v{version.version}")


def _not_ready(adapter: AdapterObject, wanted: ModelName) -> VersionObject | None:
    """What the name leads to and cannot be called; the newest where nothing is live yet."""
    alias = wanted.alias or LIVE
    pointing = [found for found in adapter.aliases if found.alias == alias]
    targets = [target.version for found in pointing for target in found.targets]
    if wanted.number is not None:
        targets = [wanted.number]
    elif not targets and alias == LIVE:
        targets = [max((one.version for one in adapter.versions), default=0)]
    led_to = [one for one in adapter.versions if one.version in targets]
    return next((one for one in led_to if one.state != "ready"), None)
