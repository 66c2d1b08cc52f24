"""Celery as this project uses it: one queue, JSON messages, no results; the broker by URL."""

import asyncio
from pathlib import Path
from typing import Any

from celery import Celery
from kombu.exceptions import KombuError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from app.adapters.resources import QueueUnavailable
from app.settings import Settings

QUEUE = "loramux"
FOLDER_TRANSPORT = "app.folder_broker:Transport"
FILE_CHECKS = 1  # one child process runs them all
PROBE_BATCHES = 4
KILL_AFTER_S = 60.0
"""A task may outlive the sum of its own time-outs by this much before its process is killed."""
SEND_TIMEOUT_S = 5.0


def task_time_limit_s(settings: Settings) -> float:
    """All checks of one validation at their longest."""
    return settings.validation_timeout_s * (FILE_CHECKS + PROBE_BATCHES) + KILL_AFTER_S


def broker_folder(settings: Settings) -> Path:
    """Where the folder broker keeps its messages; made 0700."""
    root = settings.data_dir / "broker"
    for folder in (root, root / "messages", root / "control"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def create_celery(settings: Settings) -> Celery:
    """A Celery application for sending; `app.worker` adds the tasks."""
    limit_s = task_time_limit_s(settings)
    folder = settings.broker_url.startswith("filesystem:")
    broker_url = "filesystem://localhost" if folder else settings.broker_url
    celery = Celery("loramux", broker=broker_url, set_as_current=False)
    options: dict[str, Any]
    if folder:
        root = broker_folder(settings)
        options = {
            "data_folder_in": str(root / "messages"),
            "data_folder_out": str(root / "messages"),
            "control_folder": str(root / "control"),
        }
        celery.conf.broker_transport = FOLDER_TRANSPORT
    else:
        options = {
            "visibility_timeout": limit_s + KILL_AFTER_S,
            "socket_timeout": SEND_TIMEOUT_S,
            "socket_connect_timeout": SEND_TIMEOUT_S,
            "max_retries": 1,
        }
    celery.conf.update(
        broker_transport_options=options,
        broker_connection_timeout=SEND_TIMEOUT_S,
        broker_connection_retry_on_startup=True,
        task_default_queue=QUEUE,
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_time_limit=limit_s,
        worker_prefetch_multiplier=1,
        worker_max_tasks_per_child=200,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_proc_alive_timeout=60.0,
        enable_utc=True,
        timezone="UTC",
    )
    return celery


async def queue_depth(settings: Settings) -> int | None:
    """Messages that no worker has taken; None where the broker does not say."""
    if settings.broker_url.startswith("filesystem:"):
        messages = settings.data_dir / "broker" / "messages"
        return await asyncio.to_thread(lambda: sum(1 for _ in messages.glob(f"*.{QUEUE}.msg")))
    if not settings.broker_url.startswith(("redis://", "rediss://")):
        return None
    client: Redis = Redis.from_url(
        settings.broker_url, socket_connect_timeout=1.0, socket_timeout=1.0
    )
    try:
        return int(await client.llen(QUEUE))
    except (RedisError, OSError):
        return None
    finally:
        await client.aclose()


class CeleryQueue:
    """Sends tasks by name. Arguments are ids alone: the broker sees nothing of anybody's."""

    def __init__(self, celery: Celery) -> None:
        self._celery = celery

    async def send(self, task: str, *ids: str) -> None:
        try:
            async with asyncio.timeout(2 * SEND_TIMEOUT_S):
                await asyncio.to_thread(self._send, task, ids)
        except (KombuError, RedisError, OSError, TimeoutError) as error:
            raise QueueUnavailable(type(error).__name__) from error

    def _send(self, task: str, ids: tuple[str, ...]) -> None:
        self._celery.send_task(task, args=ids, retry=False, ignore_result=True)
