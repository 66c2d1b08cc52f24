"""What /metrics says of webhooks: attempts are counted in SQL, for workers make them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy.ext.asyncio import AsyncSession

from app.tallies import service as tallies
from app.webhooks import repository
from app.webhooks.repository import Waiting

ATTEMPTS = "webhook_attempts"


@dataclass(frozen=True, slots=True)
class Figures:
    attempts: Mapping[tuple[str, str], int]
    waiting: Waiting
    now: datetime


async def count_attempt(session: AsyncSession, outcome: str) -> None:
    """In the transaction that writes how it ended."""
    connection = await session.connection()
    await connection.run_sync(tallies.count, {(ATTEMPTS, outcome): 1})


async def read(session: AsyncSession, now: datetime) -> Figures:
    return Figures(
        await tallies.read(session, ATTEMPTS), await repository.waiting(session, now), now
    )


def families(found: Figures) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "loramux_webhook_attempts", "Attempts to deliver, by how they ended", labels=["outcome"]
    )
    for (_, outcome), count in sorted(found.attempts.items()):
        attempts.add_metric([outcome], count)
    yield attempts
    yield GaugeMetricFamily(
        "loramux_webhook_pending", "Deliveries that wait for an attempt", found.waiting.count
    )
    yield GaugeMetricFamily(
        "loramux_webhook_oldest_pending_seconds",
        "Since the event of the oldest of them",
        _age_s(found.waiting.oldest, found.now),
    )
    yield GaugeMetricFamily(
        "loramux_webhook_overdue_seconds",
        "By how much the most overdue attempt is late; what receivers delay is not counted",
        _age_s(found.waiting.due_since, found.now),
    )


def _age_s(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())
