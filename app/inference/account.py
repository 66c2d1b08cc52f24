"""What an admitted call holds, and the one settlement that ends it."""

import asyncio
from dataclasses import dataclass

from app.clock import Clock
from app.limits.service import Limits, Reservation
from app.usage.entries import FinalEntry, Status
from app.usage.service import Ledger

MAX_CODE_CHARACTERS = 64
"""What the ledger's column holds; engines may invent codes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended, in the counts that are billed."""

    status: Status
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    overshoot_tokens: int
    finish_reasons: list[str]
    error_code: str | None
    queue_ms: float | None
    adapter_wait_ms: float | None
    ttft_ms: float | None
    total_ms: float
    prefill_us: int = 0
    decode_us: int = 0
    adapter_byte_s: int = 0


class Account:
    """One ledger row and one reservation of limits."""

    def __init__(
        self,
        request_id: str,
        engine: str,
        ledger: Ledger,
        limits: Limits,
        held: Reservation,
        clock: Clock,
    ) -> None:
        self._request_id = request_id
        self._engine = engine
        self._ledger = ledger
        self._limits = limits
        self._held = held
        self._clock = clock
        self._settled = False

    async def move(self, engine: str) -> None:
        """Another engine runs the call: the sweep must ask that one's journal. Raises AppError."""
        await self._ledger.move(self._request_id, engine)
        self._engine = engine

    async def settle(self, outcome: Outcome) -> None:
        """Hands the row to the ledger and gives unused tokens back; later calls do nothing.

        The row is handed over before the first await, so a cancelled task cannot lose it.
        """
        if self._settled:
            return
        self._settled = True
        self._ledger.close_soon(
            FinalEntry(
                request_id=self._request_id,
                engine=self._engine,
                status=outcome.status,
                prompt_tokens=outcome.prompt_tokens,
                cached_tokens=outcome.cached_tokens,
                completion_tokens=outcome.completion_tokens,
                overshoot_tokens=outcome.overshoot_tokens,
                finish_reasons=outcome.finish_reasons,
                closed_at=self._clock.now(),
                error_code=outcome.error_code and outcome.error_code[:MAX_CODE_CHARACTERS],
                queue_ms=outcome.queue_ms,
                adapter_wait_ms=outcome.adapter_wait_ms,
                ttft_ms=outcome.ttft_ms,
                total_ms=outcome.total_ms,
                prefill_us=outcome.prefill_us,
                decode_us=outcome.decode_us,
                adapter_byte_s=outcome.adapter_byte_s,
            )
        )
        used = outcome.prompt_tokens + outcome.completion_tokens
        await asyncio.shield(self._limits.settle(self._held, tokens=used, refund_request=used == 0))
