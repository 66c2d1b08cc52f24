"""Ledger rows that a worker closed: counted in SQL with the row, and shown by every api.

An api counts the rows that it closes itself (`app.usage.metrics`). What is left, rows whose api
died, is closed by the sweep in a worker. Both together are the ledger.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.bounded_labels import OTHER
from app.tallies import service as tallies
from app.usage.entries import FinalEntry
from app.usage.metrics import TENANTS, tokens_of

PREFIX = "swept_"
REQUESTS, TOKENS = "swept_requests", "swept_tokens"
ENGINE_US, ADAPTER = "swept_engine_us", "swept_adapter_byte_s"
TENANT_REQUESTS, TENANT_TOKENS = "swept_tenant_requests_", "swept_tenant_tokens_"
"""With the status or the kind after them; the label is the tenant."""


def count(
    connection: Connection, closed: Sequence[tuple[str, FinalEntry]], places: int = TENANTS
) -> None:
    """In the transaction that closes the rows, each with its tenant's id.

    The first tenants that have rows here keep a place of their own for good; later ones are
    counted together, so every series only ever grows. Two workers may give one place too many.
    """
    placed = tallies.labels(connection, TENANT_REQUESTS) - {OTHER}
    amounts: Counter[tuple[str, str]] = Counter()
    for tenant_id, entry in closed:
        if tenant_id not in placed and len(placed) < places:
            placed.add(tenant_id)
        tenant = tenant_id if tenant_id in placed else OTHER
        amounts[TENANT_REQUESTS + entry.status, tenant] += 1
        for kind, tokens in tokens_of(entry):
            amounts[TENANT_TOKENS + kind, tenant] += tokens
    for _, entry in closed:
        amounts[REQUESTS, entry.status] += 1
        for kind, tokens in tokens_of(entry):
            amounts[TOKENS, kind] += tokens
        amounts[ENGINE_US, "prefill"] += entry.prefill_us
        amounts[ENGINE_US, "decode"] += entry.decode_us
        amounts[ADAPTER, ""] += entry.adapter_byte_s
    tallies.count(connection, amounts)


async def read(session: AsyncSession) -> dict[tuple[str, str], int]:
    return await tallies.read(session, PREFIX)


def families(found: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """The counterparts of the api's own counters."""
    yield _family(
        "loramux_swept_requests", "Ledger rows closed by workers", "status", found, REQUESTS
    )
    yield _family("loramux_swept_tokens", "Tokens of these rows", "kind", found, TOKENS)
    yield _family(
        "loramux_swept_engine_seconds", "Engine time of these rows", "phase", found, ENGINE_US, 1e6
    )
    yield _by_tenant(
        "loramux_swept_tenant_requests",
        "The same as loramux_swept_requests",
        "status",
        found,
        TENANT_REQUESTS,
    )
    yield _by_tenant(
        "loramux_swept_tenant_tokens",
        "The same as loramux_swept_tokens",
        "kind",
        found,
        TENANT_TOKENS,
    )
    adapter = CounterMetricFamily(
        "loramux_swept_adapter_byte_seconds",
        "Bytes of adapters times the seconds for which these rows pinned them",
    )
    adapter.add_metric([], found.get((ADAPTER, ""), 0))
    yield adapter


def _by_tenant(
    name: str, about: str, label: str, found: Mapping[tuple[str, str], int], tally: str
) -> Metric:
    family = CounterMetricFamily(name, about, labels=["tenant", label])
    for (kind, tenant), amount in sorted(found.items()):
        if kind.startswith(tally):
            family.add_metric([tenant, kind.removeprefix(tally)], amount)
    return family


def _family(
    name: str,
    about: str,
    label: str,
    found: Mapping[tuple[str, str], int],
    tally: str,
    scale: float = 1,
) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for (kind, value), amount in sorted(found.items()):
        if kind == tally:
            family.add_metric([value], amount / scale)
    return family
