"""What the steps of an engine were made of, added up since it started. Pure; no clock."""

from bisect import bisect_left

from engine.types import STEP_BOUNDS_MS, StepCounts, StepPlan


class StepCounter:
    def __init__(self) -> None:
        self._buckets = [0] * (len(STEP_BOUNDS_MS) + 1)
        self._ms = 0.0
        self._decode_rows = self._prefill_rows = self._prefill_tokens = 0
        self._adapter_rows = self._adapters = 0

    def observe(self, plan: StepPlan, duration_ms: float) -> None:
        """One step that ran; a row of one token is a decode, a longer one a prefill chunk."""
        self._buckets[bisect_left(STEP_BOUNDS_MS, duration_ms)] += 1
        self._ms += duration_ms
        slots = set()
        for row in plan.rows:
            if len(row.tokens) == 1:
                self._decode_rows += 1
            else:
                self._prefill_rows += 1
                self._prefill_tokens += len(row.tokens)
            if row.slot >= 0:
                self._adapter_rows += 1
                slots.add(row.slot)
        self._adapters += len(slots)

    def counts(self) -> StepCounts:
        return StepCounts(
            buckets=list(self._buckets),
            ms=self._ms,
            decode_rows=self._decode_rows,
            prefill_rows=self._prefill_rows,
            prefill_tokens=self._prefill_tokens,
            adapter_rows=self._adapter_rows,
            adapters=self._adapters,
        )
