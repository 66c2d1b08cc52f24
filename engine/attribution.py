"""What each request costs the engine: its part of every step's time, and of adapter memory.

A step's measured time is split among its rows by their token cost (engine/policy.py), so the parts
of all requests add up to the time of all steps. An adapter's bytes are charged for as long as a
running request pins it, shared evenly by the sequences that pin it at the same time. Pure
arithmetic: no clock, no torch.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.policy import token_cost
from engine.types import AdapterRef, PlanRow, StepPlan

if TYPE_CHECKING:
    from engine.request import Sequence


@dataclass(slots=True)
class Cost:
    """What one request has cost so far."""

    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    adapter_byte_seconds: float = 0.0


def is_prefill(row: PlanRow, prompt_tokens: int) -> bool:
    """A decode computes the one token that was drawn last; everything else is prefill."""
    return row.start < prompt_tokens or len(row.tokens) > 1


def row_cost(row: PlanRow, prompt_tokens: int, rank: int) -> float:
    """A row's weight in its step: tokens of the prompt (or recomputed), and the one it draws."""
    computed = len(row.tokens) if is_prefill(row, prompt_tokens) else 0
    return token_cost(computed, int(row.sample), rank)


class Attribution:
    """Charges steps, before their results are taken in."""

    def __init__(self) -> None:
        self._charged_until_ms: dict[int, float] = {}  # by sequence, of those that pin an adapter

    def charge_step(
        self,
        plan: StepPlan,
        duration_ms: float,
        running: Mapping[int, "Sequence"],
        adapter_bytes: Callable[[AdapterRef], int],
        since_ms: float,
        now_ms: float,
    ) -> None:
        """`running`: everything that is, rows or not. The step lasted from `since_ms` to `now_ms`,
        of which `duration_ms` was the executor's.
        """
        self._split_time(plan, duration_ms, running)
        self._charge_memory(running, adapter_bytes, since_ms, now_ms)

    @staticmethod
    def _split_time(plan: StepPlan, duration_ms: float, running: Mapping[int, "Sequence"]) -> None:
        parts = []
        for row in plan.rows:
            sequence = running.get(row.seq)
            if sequence is None:  # it ended after the step was launched
                continue
            prompt_tokens = len(sequence.call.request.prompt)
            cost = row_cost(row, prompt_tokens, sequence.rank)
            parts.append((sequence.call.cost, is_prefill(row, prompt_tokens), cost))
        total = sum(weight for _, _, weight in parts)
        for cost_of_call, prefill, weight in parts:
            part_ms = duration_ms * weight / total
            if prefill:
                cost_of_call.prefill_ms += part_ms
            else:
                cost_of_call.decode_ms += part_ms

    def _charge_memory(
        self,
        running: Mapping[int, "Sequence"],
        adapter_bytes: Callable[[AdapterRef], int],
        since_ms: float,
        now_ms: float,
    ) -> None:
        """A sequence that was not here at the last step began to pin its adapter at `since_ms`."""
        pinning = [sequence for sequence in running.values() if sequence.slot >= 0]
        sharers = Counter(sequence.slot for sequence in pinning)
        known, self._charged_until_ms = self._charged_until_ms, {}
        for sequence in pinning:
            adapter = sequence.call.request.adapter
            if adapter is None:
                continue
            elapsed_s = max(0.0, now_ms - known.get(sequence.seq, since_ms)) / 1000.0
            part_bytes = adapter_bytes(adapter) / sharers[sequence.slot]
            sequence.call.cost.adapter_byte_seconds += part_bytes * elapsed_s
            self._charged_until_ms[sequence.seq] = now_ms
