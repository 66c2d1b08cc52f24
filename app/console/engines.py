"""The operator's page of engines: state, lease, what lies in the pool, who waits, how steps go."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from app.caller import Caller
from app.console.charts import Chart, bar_chart
from app.console.figures import size
from app.console.forms import read_form
from app.console.operator import Operator
from app.console.render import render
from app.deps import PlatformDep
from app.engines import service
from app.engines.models import EngineRecord
from app.engines.schemas import EngineOut
from app.engines.views import known, others, shown
from app.errors import AppError
from app.inference.engines import StepSample
from app.platform import Platform
from app.tenants import service as tenants
from app.tenants.models import Tenant
from engine.types import EngineStatus

router = APIRouter(prefix="/console/engines", include_in_schema=False)

TOP = 8
"""So many tenants are shown by name; the rest is one line."""
TIERS = ("device", "host", "loading", "quarantined")
STRIP = 1000.0
"""Width of the arena's picture in its own units."""
EngineId = Annotated[str, Path(max_length=40)]


@dataclass(slots=True)
class PoolLine:
    """One tenant's adapters in one engine's pool, by tier."""

    name: str
    tenant_id: str | None = None  # None: the rest, or nobody that is known
    counts: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    pins: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the arena's picture. `kind` is its class, `x` and `width` of STRIP."""

    kind: str
    title: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The last minute, as far as this process has asked; averages are over its steps."""

    steps: int
    ms: float
    decode_rows: float
    prefill_tokens: float
    adapters: float
    chart: Chart


@dataclass(frozen=True, slots=True)
class EngineCard:
    """One engine as the page shows it; without figures while it does not answer."""

    out: EngineOut
    named: bool  # by the settings
    arena: list[Segment]
    arena_bytes: str
    kv_used: str
    kv_cached: str
    host: str
    pool: list[PoolLine]
    queue: list[tuple[str, int]]
    steps: Steps | None
    backend: str
    status: EngineStatus | None


@router.get("")
async def engines_page(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    return await _page(request, platform, "engines.html")


@router.get("/live")
async def live_fragment(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    """The engines alone, which the page asks for every two seconds."""
    return await _page(request, platform, "_engines.html")


@router.post("/{engine_id}/drain")
async def drain(
    engine_id: EngineId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    """`force` in the form: also the last engine of its base model."""
    form = await read_form(request)
    try:
        await _set_drained(
            platform, caller, engine_id, drained=True, force=form.text("force") == "yes"
        )
    except AppError as error:
        return await _page(request, platform, "engines.html", error=error, refused=engine_id)
    return RedirectResponse("/console/engines", status_code=303)


@router.post("/{engine_id}/resume")
async def resume(engine_id: EngineId, caller: Operator, platform: PlatformDep) -> Response:
    await _set_drained(platform, caller, engine_id, drained=False)
    return RedirectResponse("/console/engines", status_code=303)


async def _set_drained(
    platform: Platform, caller: Caller, engine_id: str, *, drained: bool, force: bool = False
) -> None:
    async with platform.db.transaction() as session:
        row = await service.find_engine(session, engine_id)
        if drained and not force:
            service.refuse_to_drain_the_last(row, others(platform, row))
        await service.set_drained(session, row.id, drained=drained, actor=caller)
    platform.engines.wake()


async def _page(
    request: Request,
    platform: Platform,
    template: str,
    *,
    error: AppError | None = None,
    refused: str = "",
) -> Response:
    async with platform.db.reading() as session:
        rows = await service.list_engines(session)
        names = await tenants.named(session, _tenants_shown(platform, rows))
    return render(
        request,
        template,
        engines=[_card(platform, row, names) for row in rows],
        turned_away=sorted(platform.engines.refused.items()),
        registry_problem=platform.engines.registry_problem,
        tiers=TIERS,
        size=size,
        error=error,
        last_engine=refused if error is not None and error.code == "last_engine" else "",
    )


def _tenants_shown(platform: Platform, rows: Sequence[EngineRecord]) -> set[str]:
    """Salts and ids of the tenants that any of the cards names."""
    wanted: set[str] = set()
    for row in rows:
        engine = known(platform, row)
        if engine is None or engine.status is None:
            continue
        wanted |= {salt for salt, _ in _largest(engine.status)}
        wanted |= {id_ for id_, _ in Counter(engine.status.waiting_by_tenant).most_common(TOP)}
    return wanted


def _largest(status: EngineStatus) -> list[tuple[str, int]]:
    """(salt, bytes) of the tenants with the most bytes in the pool."""
    nbytes: Counter[str] = Counter()
    for item in status.adapters:
        nbytes[item.adapter.salt] += max(1, item.nbytes)
    return nbytes.most_common(TOP)


def _card(platform: Platform, row: EngineRecord, names: Mapping[str, Tenant]) -> EngineCard:
    engine = known(platform, row)
    out = shown(platform, row)
    answers = engine is not None and engine.answers
    status = engine.status if engine is not None and answers else None
    description = engine.description if engine is not None else None
    pool = [] if status is None else pool_lines(status, names)
    return EngineCard(
        out=out,
        named=row.address in platform.settings.engines,
        arena=[] if status is None else arena(status, pool),
        arena_bytes="" if status is None else size(status.extents_total * status.extent_bytes),
        kv_used="" if status is None else size(status.kv_blocks_used * status.extent_bytes),
        kv_cached="" if status is None else size(status.kv_blocks_cached * status.extent_bytes),
        host=""
        if status is None
        else f"{size(status.host_adapter_bytes)} of {size(status.host_budget_bytes)}",
        pool=pool,
        queue=[] if status is None else queue_lines(status.waiting_by_tenant, names),
        steps=last_minute(engine.samples) if engine is not None and answers else None,
        backend="" if description is None else description.backend,
        status=status,
    )


def pool_lines(status: EngineStatus, names: Mapping[str, Tenant]) -> list[PoolLine]:
    """The tenants with the most bytes first, then one line for all others."""
    lines = {}
    for salt, _ in _largest(status):
        tenant = names.get(salt)
        lines[salt] = PoolLine(
            "a tenant that is gone" if tenant is None else tenant.name,
            None if tenant is None else tenant.id,
        )
    rest = PoolLine("other tenants")
    for item in status.adapters:
        line = lines.get(item.adapter.salt, rest)
        line.counts[item.tier] += 1
        line.nbytes[item.tier] += item.nbytes
        line.pins += item.pins
    return [*lines.values(), *([rest] if rest.counts else [])]


def queue_lines(waiting: Mapping[str, int], names: Mapping[str, Tenant]) -> list[tuple[str, int]]:
    """(tenant, requests that wait), the longest queue first, the rest together."""
    counts = Counter(waiting)
    top = [(id_, count) for id_, count in counts.most_common(TOP) if count]
    told = [(names[id_].name if id_ in names else id_, count) for id_, count in top]
    rest = counts.total() - sum(count for _, count in top)
    return [*told, *([("other tenants", rest)] if rest else [])]


def arena(status: EngineStatus, pool: Sequence[PoolLine]) -> list[Segment]:
    """The arena as one strip: KV blocks in use, those kept for their prefix, what is free, and
    adapters by tenant at the other end, as the memory is divided."""
    whole = max(1, status.extents_total * status.extent_bytes)
    used = status.kv_blocks_used * status.extent_bytes
    cached = status.kv_blocks_cached * status.extent_bytes
    held = [(line.name, line.nbytes["device"]) for line in pool if line.nbytes["device"]]
    free = max(0, whole - used - cached - sum(nbytes for _, nbytes in held))
    parts: list[tuple[str, str, int]] = [
        ("kv", "KV in use", used),
        ("kept", "KV kept for its prefix", cached),
        ("free", "free", free),
        *((f"holder h{index % TOP}", name, nbytes) for index, (name, nbytes) in enumerate(held)),
    ]
    segments, x = [], 0.0
    for kind, name, nbytes in parts:
        width = min(STRIP - x, STRIP * nbytes / whole)
        if width > 0:
            segments.append(Segment(kind, f"{name}: {size(nbytes)}", round(x, 2), round(width, 2)))
        x += width
    return segments


def last_minute(samples: Iterable[StepSample]) -> Steps | None:
    """What lay between the samples of one life of the engine; None without two of them."""
    kept = list(samples)
    kept = [sample for sample in kept if sample.engine_id == kept[-1].engine_id]
    if len(kept) < 2:
        return None
    columns = []
    for number, (before, after) in enumerate(pairwise(kept)):
        steps = after.steps - before.steps
        decode = after.counts.decode_rows - before.counts.decode_rows
        prefill = after.counts.prefill_rows - before.counts.prefill_rows
        age = len(kept) - 1 - number
        parts = (("prompt", _per(prefill, steps)), ("answer", _per(decode, steps)))
        columns.append((f"{age} s ago", parts))
    first, last = kept[0], kept[-1]
    steps = last.steps - first.steps
    return Steps(
        steps=steps,
        ms=(last.counts.ms - first.counts.ms) / max(1, steps),
        decode_rows=(last.counts.decode_rows - first.counts.decode_rows) / max(1, steps),
        prefill_tokens=(last.counts.prefill_tokens - first.counts.prefill_tokens) / max(1, steps),
        adapters=(last.counts.adapters - first.counts.adapters) / max(1, steps),
        chart=bar_chart(columns, unit=" rows a step"),
    )


def _per(count: int, steps: int) -> float:
    return round(count / steps, 2) if steps else 0.0
