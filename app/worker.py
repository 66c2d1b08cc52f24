"""The Celery application of `loramux worker` and `loramux beat`: which task runs what, and when.

    celery -A app.worker worker | beat

Tasks are plain coroutines of the domains. One bridge runs them: it opens what a process of the
control plane holds, in an event loop of its own, and closes it when the task has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from celery import Celery
from celery.beat import PersistentScheduler
from celery.signals import setup_logging, task_postrun, task_prerun, worker_ready

from app.adapters import tasks as adapter_tasks
from app.adapters.resources import Resources
from app.adapters.sweeps import VALIDATE_TASK
from app.inference.lifespan import load_codec, open_ledger, open_router
from app.logging import configure_logging
from app.platform import Platform, open_platform
from app.processes import WORKER_SIGN_S, beat_sign, worker_sign
from app.settings import Settings, get_settings
from app.task_queue import CeleryQueue, create_celery
from app.tenants import deletion
from app.usage.roll_up import roll_up
from app.usage.sweep import close_expired
from app.users import sessions
from app.webhooks import tasks as webhook_tasks
from app.webhooks.outbox import DELIVER_TASK
from engine.adapters.store import open_store
from engine.errors import EngineError, EngineUnavailable
from engine.types import ModelDescription

log = structlog.get_logger("loramux.worker")

SWEEP_S = 10.0
BASE_S = 30.0
USAGE_SWEEP_S = 30.0
ROLL_UP_S = 3600.0
WEBHOOK_SWEEP_S = 10.0
QUOTA_S = 30.0
CLEAN_S = 3600.0

Work = Callable[[Platform, Resources], Awaitable[object]]


def encoder(settings: Settings) -> Callable[[ModelDescription, str], Sequence[int]]:
    """Turns a probe's text into tokens, with the tokenizer that the engine has too."""

    def encode(description: ModelDescription, text: str) -> Sequence[int]:
        try:
            codecs = [load_codec(path) for path in settings.base_models]
        except (EngineError, OSError, ValueError) as error:
            raise EngineUnavailable(
                "the worker cannot read a base model's tokenizer; set LORAMUX_BASE_MODEL and "
                "LORAMUX_ENGINE_BASE_MODELS to the engines' files"
            ) from error
        codec = next(
            (c for c in codecs if c.tokenizer_digest == description.tokenizer_digest), None
        )
        if codec is None:
            raise EngineUnavailable(
                "the worker has not the tokenizer of the engine's base model; set "
                "LORAMUX_BASE_MODEL or LORAMUX_ENGINE_BASE_MODELS to the same files for both"
            )
        return codec.encode_chat([{"role": "user", "content": text}])

    return encode


@asynccontextmanager
async def worker_resources(
    settings: Settings, celery: Celery
) -> AsyncIterator[tuple[Platform, Resources]]:
    """Everything that a task works with; engines are connected in the background."""
    platform = open_platform(settings)
    router = platform.engines = open_router(platform)
    platform.ledger = open_ledger(platform, scraped=False)
    await router.start()
    try:
        yield (
            platform,
            Resources(
                settings=settings,
                db=platform.db,
                clock=platform.clock,
                store=open_store(settings.adapter_store_url),
                queue=CeleryQueue(celery),
                engines=router.links,
                encode=encoder(settings),
            ),
        )
    finally:
        await router.close()
        await platform.close()


def run(settings: Settings, celery: Celery, name: str, work: Work) -> None:
    """The bridge from a task to coroutines."""

    async def main() -> object:
        async with worker_resources(settings, celery) as (platform, resources):
            return await work(platform, resources)

    result = str(asyncio.run(main()))[:200]
    write = log.info if name == VALIDATE_TASK else log.debug  # sweeps come every few seconds
    write("task_done", result=result)


async def _clean_sessions(platform: Platform, _resources: Resources) -> str:
    async with platform.db.transaction() as session:
        await sessions.sweep(session, settings=platform.settings, now=platform.clock.now())
    return "sessions swept"


async def _sweep(_platform: Platform, resources: Resources) -> str:
    """Erasures first: a tenant is erased once all of its adapters' are complete."""
    found = await adapter_tasks.sweep(resources)
    return f"{found}, {await deletion.sweep(resources)} tenants being erased"


PERIODIC: dict[str, tuple[float, Work]] = {
    "adapters.sweep": (SWEEP_S, _sweep),
    "adapters.clean": (CLEAN_S, lambda _, resources: adapter_tasks.clean(resources)),
    "adapters.base": (BASE_S, lambda _, resources: adapter_tasks.follow_base(resources)),
    "usage.sweep": (USAGE_SWEEP_S, lambda platform, _: close_expired(platform)),
    "usage.roll_up": (ROLL_UP_S, lambda platform, _: roll_up(platform.db, platform.clock)),
    "users.clean": (CLEAN_S, _clean_sessions),
    "webhooks.sweep": (WEBHOOK_SWEEP_S, lambda platform, _: webhook_tasks.sweep(platform)),
    "webhooks.quotas": (QUOTA_S, lambda platform, _: webhook_tasks.tell_quotas(platform)),
    "webhooks.clean": (CLEAN_S, lambda platform, _: webhook_tasks.clean(platform)),
}
"""task -> (seconds between two runs, what it does)."""


def create_worker(settings: Settings) -> Celery:
    """Celery with the tasks and their timetable."""
    celery = create_celery(settings)

    @celery.task(name=VALIDATE_TASK)
    def validate(version_id: str) -> None:
        async def work(_platform: Platform, resources: Resources) -> str:
            return await adapter_tasks.validate_version(resources, version_id)

        run(settings, celery, VALIDATE_TASK, work)

    @celery.task(name=DELIVER_TASK)
    def deliver(delivery_id: str) -> None:
        async def work(platform: Platform, _resources: Resources) -> str:
            return await webhook_tasks.deliver(platform, delivery_id)

        run(settings, celery, DELIVER_TASK, work)

    for name, (every_s, work) in PERIODIC.items():
        _add_periodic(celery, settings, name, every_s, work)
    return celery


def _add_periodic(
    celery: Celery, settings: Settings, name: str, every_s: float, work: Work
) -> None:
    @celery.task(name=name)
    def periodic() -> None:
        run(settings, celery, name, work)

    schedule: dict[str, Any] = dict(celery.conf.beat_schedule or {})
    # A run that waited for longer than its period is of no use: the next one is there already.
    schedule[name] = {"task": name, "schedule": every_s, "options": {"expires": every_s}}
    celery.conf.beat_schedule = schedule


@worker_ready.connect
def _show_signs_of_life(sender: Any, **_: object) -> None:
    """On the consumer's own timer: a file that grows old means that the loop stands still."""
    sign = worker_sign(get_settings())
    _touch(sign)
    sender.timer.call_repeatedly(WORKER_SIGN_S, sign.touch)


class Timetable(PersistentScheduler):
    """Celery's timetable, which leaves a sign of life whenever it is looked at."""

    def tick(self, *arguments: Any, **options: Any) -> Any:
        _touch(beat_sign(get_settings()))
        return super().tick(*arguments, **options)


def _touch(sign: Path) -> None:
    sign.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sign.touch()


@task_prerun.connect
def _name_the_task(task_id: str, task: Any, **_: object) -> None:
    """Every line that the task writes carries its id."""
    structlog.contextvars.bind_contextvars(task_id=task_id, task=task.name)


@task_postrun.connect
def _forget_the_task(**_: object) -> None:
    structlog.contextvars.unbind_contextvars("task_id", "task")


@setup_logging.connect
def _log_as_the_rest_does(**_signal: Any) -> None:
    configure_logging(get_settings().log_level)


def __getattr__(name: str) -> Celery:
    """`celery -A app.worker` finds `celery`; nobody else's import reads the settings."""
    if name in ("app", "celery"):
        return _process_worker()
    raise AttributeError(name)


@lru_cache(maxsize=1)
def _process_worker() -> Celery:
    return create_worker(get_settings())
