"""The next step from what runs: decodes get their token, prompts what is left of the step.

How much one step may hold is `engine/step_budget.py`; time comes in as an argument.
"""

from dataclasses import replace

from engine import sequence_blocks
from engine.config import EngineConfig
from engine.kv_blocks import KvBlocks, blocks_for
from engine.policy import Policy
from engine.request import Sequence
from engine.running import Running
from engine.step_budget import PATIENCE_STEPS, Draft, chunk_length, draft_decodes
from engine.step_time import StepShape, StepTimes
from engine.types import BLOCK_TOKENS, PENDING, PlanRow, SequenceStart, StepPlan


class StepPlanner:
    """`shape`: what the step planned last contains."""

    def __init__(
        self,
        config: EngineConfig,
        running: Running,
        blocks: KvBlocks,
        policy: Policy,
        times: StepTimes,
    ) -> None:
        self._config = config
        self._running = running
        self._blocks = blocks
        self._policy = policy
        self._times = times
        self._next_step = 0
        self._starved_steps = 0  # in a row in which prompts got nothing
        self.shape = StepShape()

    # ------------------------------------------------------------------ the plan

    def draft(self, now_ms: float) -> Draft:
        """The decodes that go; each has its block."""
        decodes = [s for s in self._running.sequences.values() if s.length - s.computed == 1]
        budgets = self._policy.keeps_budgets
        return draft_decodes(decodes, now_ms, self._times, budgets=budgets)

    def decode_rows(self, draft: Draft) -> list[PlanRow]:
        return [self._row(sequence, 1) for sequence in draft.decodes]

    def prefill_rows(self, draft: Draft, now_ms: float) -> list[PlanRow]:
        """Chunks of the prompts in progress, as many tokens as the step may hold."""
        running = self._running.sequences.values()
        prefilling = [s for s in running if s.length - s.computed > 1]
        if not prefilling:
            self._starved_steps = 0
            return []
        rows: list[PlanRow] = []
        budget = self._token_budget(draft)
        starved = self._starved_steps >= PATIENCE_STEPS
        for sequence in self._ranked(prefilling, now_ms):
            room = (len(sequence.blocks) + self._blocks.available) * BLOCK_TOKENS
            most = min(sequence.pending, budget, room - sequence.computed)
            if most <= 0:
                continue
            chunk = chunk_length(draft, sequence, most, self._times, starved=starved)
            if not chunk:
                break
            draft.take_chunk(sequence, chunk)
            rows.append(self._row(sequence, chunk))
            budget -= chunk
        self._starved_steps = 0 if rows else self._starved_steps + 1
        return rows

    def plan(self, draft: Draft, rows: list[PlanRow]) -> StepPlan | None:
        """The step of these rows, or None when there is nothing to do."""
        running = self._running
        if not rows and not running.closed and not running.copies:
            return None
        plan = StepPlan(
            step=self._next_step,
            closed=running.closed,
            started=self._introduce(rows),
            copies=list(running.copies.values()),
            rows=rows,
        )
        self.shape = draft.shape
        self._next_step += 1
        running.closed, running.copies = [], {}
        return plan

    def _token_budget(self, draft: Draft) -> int:
        """Most prompt tokens of the step. Decodes without a budget are spared long chunks too."""
        budget = self._config.max_batch_tokens - len(draft.decodes)
        bounded = self._times.known and all(s.tpot_ms is not None for s in draft.decodes)
        if draft.decodes and not (bounded and self._policy.keeps_budgets):
            budget = min(budget, self._config.prefill_chunk)
        return budget

    def _ranked(self, prefilling: list[Sequence], now_ms: float) -> list[Sequence]:
        """Who gets the step's prompt tokens first."""
        policy = self._policy
        if not policy.keeps_budgets:
            return sorted(prefilling, key=lambda s: (policy.priority(s.tenant), s.order))
        least = min(policy.priority(s.tenant) for s in prefilling)

        def rank(s: Sequence) -> tuple[int, float, float, tuple[int, int]]:
            priority = policy.priority(s.tenant)
            urgent = s.urgent_ms <= now_ms < s.lost_ms
            if urgent and priority - policy.lead(s.tenant) <= least:
                return (0, s.urgent_ms, 0.0, s.order)
            return (1, priority, s.turn_ms, s.order)

        return sorted(prefilling, key=rank)

    def _row(self, sequence: Sequence, count: int) -> PlanRow:
        """The next `count` tokens of a sequence; its new blocks must be available."""
        start, end = sequence.computed, sequence.computed + count
        new_blocks = sequence_blocks.extend(self._blocks, sequence, end)
        decode = end == sequence.length and start >= sequence.prompt_tokens and count == 1
        logprobs = sequence.call.request.prompt_logprobs
        return PlanRow(
            seq=sequence.seq,
            start=start,
            tokens=sequence.generated[-1:] if decode else sequence.tokens(start, end),
            new_blocks=new_blocks,
            slot=sequence.slot,
            sample=end == sequence.length,
            prompt_logprobs=logprobs if sequence.wants_prompt_logprobs else None,
        )

    def _introduce(self, rows: list[PlanRow]) -> list[SequenceStart]:
        started = []
        for row in rows:
            sequence = self._running.sequences[row.seq]
            if not sequence.started:
                sequence.started = True
                request = sequence.call.request
                started.append(
                    SequenceStart(
                        seq=sequence.seq,
                        prompt=request.prompt,
                        generated=list(sequence.generated),
                        sampling=request.sampling,
                        choice=sequence.choice,
                        grammar=request.request_id if request.grammar is not None else None,
                    )
                )
        return started

    # ------------------------------------------------------------------ one step further

    def foresee(self, plan: StepPlan, *, newcomers: bool) -> StepPlan | None:
        """The step after `plan`, which runs now, where it follows without that one's tokens.

        So it does while nothing but decodes runs and nobody can start (`newcomers`: somebody waits
        for a place): each goes on with the token that `plan` draws for it, PENDING in its place. A
        decode that turns out to have ended with it is computed for nothing. None: the next step
        needs the tokens, or a decision.
        """
        running = self._running
        if running.closed or running.copies:
            return None
        sequences = running.sequences
        known = [(row, sequences[row.seq]) for row in plan.rows if row.seq in sequences]
        if len(known) < len(running):
            return None
        if not all(_goes_on(row, sequence) for row, sequence in known):
            return None
        # the others end with the token that is being drawn
        going = [s for _, s in known if len(s.generated) + 1 < s.call.max_tokens]
        if newcomers and len(going) < self._config.max_running:
            return None
        missing = sum(max(0, blocks_for(s.length + 1) - len(s.blocks)) for s in going)
        if not going or missing > self._blocks.available:
            return None
        rows = [self._row_beyond(sequence) for sequence in going]
        kv_tokens = self.shape.kv_tokens + len(rows)
        self.shape = replace(self.shape, decode_rows=len(rows), kv_tokens=kv_tokens)
        self._next_step += 1
        return StepPlan(self._next_step - 1, [], [], [], rows)

    def _row_beyond(self, sequence: Sequence) -> PlanRow:
        """The decode of the token that is being drawn."""
        return PlanRow(
            seq=sequence.seq,
            start=sequence.length,
            tokens=[PENDING],
            new_blocks=sequence_blocks.extend(self._blocks, sequence, sequence.length + 1),
            slot=sequence.slot,
            sample=True,
        )


def _goes_on(row: PlanRow, sequence: Sequence) -> bool:
    """Whether a row is the last known token of a decode that can be foreseen."""
    decode = len(row.tokens) == 1 and row.sample and row.start + 1 == sequence.length
    return decode and row.start >= sequence.prompt_tokens and sequence.call.foreseeable
