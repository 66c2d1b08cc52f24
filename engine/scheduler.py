"""Who is in the batch: membership is decided anew before every step.

Waiting sequences are admitted while there are places, KV blocks, and room in the tightest budget.
When blocks run out, idle adapters give way, then the sequence that the policy values least is
preempted and recomputed later. The step itself is laid out by `engine/step_planner.py`; time comes
in as an argument.
"""

import math
from collections import Counter

from engine import sequence_blocks
from engine.adapters.pool import AdapterPool
from engine.config import EngineConfig
from engine.kv_blocks import KvBlocks, blocks_for
from engine.outlook import Outlook
from engine.policy import URGENT_SHARE, Policy, serves_the_oldest, token_cost
from engine.request import Call, Sequence, SequenceState
from engine.running import Demand, Running
from engine.step_planner import StepPlanner
from engine.step_time import StepShape, StepTimes
from engine.types import AdapterRef, PlanRow, RowResult, StepPlan
from engine.waiting import FairQueue

BREACH_SHARE = 0.25
"""Of the aging bound: how long the batch rests after it has grown past a budget for an old one."""


class Scheduler:
    """`running`: the batch. `planner`: what it does next. `outlook`: what a newcomer finds."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: KvBlocks,
        pool: AdapterPool,
        policy: Policy,
        times: StepTimes | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._pool = pool
        self._policy = policy
        self._times = times = times or StepTimes()
        self.running = Running(blocks, pool, policy)
        self.planner = StepPlanner(config, self.running, blocks, policy, times)
        self.outlook = Outlook(config, self.running, blocks, pool, policy, times)
        self._ready: FairQueue[Sequence] = FairQueue(policy)
        self._calls_of: Counter[str] = Counter()  # by the tenant that is charged
        self._admissions = 0
        self._next_seq = 0
        self._last_breach_ms = -math.inf  # when the batch last grew past a budget
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Requests of which nothing has run yet."""
        return self.outlook.backlogs.requests

    def waiting_of(self, tenant: str) -> int:
        return self.outlook.backlogs.of(tenant)

    @property
    def runnable(self) -> bool:
        """Whether `schedule` may have something to plan."""
        return bool(self.running or self._ready or self.running.closed)

    # ------------------------------------------------------------------ arrival and end

    def add(self, call: Call, now_ms: float) -> None:
        """Takes in a request. Raises AdapterRefused, and nothing is kept."""
        sequence = self._new_sequence(call, 0)
        if self._policy.keeps_budgets:
            prefill_ms = self._times.mean_ms(StepShape().with_chunk(0, sequence.length))
            share = min(0.5, URGENT_SHARE * self._policy.attainment.gain(call.tenant))
            sequence.turn_by_first_token(self._config.queue_aging_ms, prefill_ms, share)
        usable = True
        if call.request.adapter is not None:
            usable = self._pool.enqueue(sequence, now_ms)
        call.sequences.append(sequence)
        self._calls_of[call.tenant] += 1
        if self._calls_of[call.tenant] == 1:
            self._policy.activate(call.tenant)
        self.outlook.arrived(call, now_ms)
        sequence.state = SequenceState.LOADING
        if usable:
            self.make_ready(sequence, now_ms)

    def make_ready(self, sequence: Sequence, now_ms: float) -> None:
        """The sequence's adapter is usable: only a place is missing, and perhaps its grammar."""
        if sequence.state is not SequenceState.LOADING or sequence.call.compiling:
            return
        sequence.state = SequenceState.WAITING
        if sequence.call.adapter_ready_ms is None:
            sequence.call.adapter_ready_ms = now_ms
        self._ready.push(sequence)

    def grammar_ready(self, call: Call, now_ms: float) -> None:
        """The request's grammar is compiled; its adapter may still be on its way."""
        call.compiling = False
        adapter = call.request.adapter
        if adapter is None or self._pool.usable(adapter):
            for sequence in call.sequences:
                self.make_ready(sequence, now_ms)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over, whatever it was doing; all that it held is given back."""
        call = sequence.call
        if sequence.state is SequenceState.RUNNING:
            self.running.stop(sequence)
        else:
            self._ready.remove(sequence)
            if call.request.adapter is not None:
                self._pool.leave(sequence)
        sequence.state = SequenceState.FINISHED
        call.sequences.remove(sequence)
        self.outlook.ended(sequence)
        if call.sequences:
            return
        if call.waiting:
            self.outlook.waits_no_more(call)
        self._calls_of[call.tenant] -= 1
        if not self._calls_of[call.tenant]:
            del self._calls_of[call.tenant]
            self._policy.deactivate(call.tenant)

    def _new_sequence(self, call: Call, choice: int) -> Sequence:
        self._next_seq += 1
        return Sequence(self._next_seq, call, choice)

    # ------------------------------------------------------------------ the step

    def schedule(self, now_ms: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        self._admit(self._keep_room_for_decodes(now_ms), now_ms)
        draft = self.planner.draft(now_ms)
        rows = self.planner.decode_rows(draft)
        rows += self.planner.prefill_rows(draft, now_ms)
        while not rows and self.running:
            self._break_deadlock(now_ms)
            rows = self.planner.prefill_rows(draft, now_ms)
        return self.planner.plan(draft, rows)

    def foresee(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, which runs now, where it needs no token and no decision."""
        return self.planner.foresee(plan, newcomers=bool(self._ready))

    def _admit(self, demand: Demand, now_ms: float) -> None:
        while (choice := self._next_to_admit(now_ms)) is not None:
            sequence, by_age = choice
            if self.running.places + sequence.places > self._config.max_running:
                return
            full = demand.tokens >= self._config.max_batch_tokens
            if full and self.running.of(sequence.tenant):
                return
            if self.running and demand.breaks_a_budget(sequence, self._times):
                if not self._may_break_it(sequence, now_ms):
                    return
                self._last_breach_ms = now_ms
            blocks = self._start(sequence, demand.blocks, now_ms)
            if blocks is None:
                return
            demand.blocks += blocks
            demand.commitments.add(sequence)
            demand.tokens += sequence.pending
            self._admissions += 1
            if not by_age:
                self._policy.admitted(sequence.tenant)

    def _may_break_it(self, sequence: Sequence, now_ms: float) -> bool:
        """Nobody's budget keeps another out for ever; but the batch overgrows one by one."""
        aging_ms = self._config.queue_aging_ms
        rested_ms = now_ms - self._last_breach_ms
        return now_ms - sequence.arrival_ms > aging_ms and rested_ms > BREACH_SHARE * aging_ms

    def _next_to_admit(self, now_ms: float) -> tuple[Sequence, bool] | None:
        """Who is next, and whether by age. Those whose adapter has to leave wait aside."""
        while True:
            sequence, oldest = self._ready.peek(), self._ready.oldest()
            if sequence is None or oldest is None:
                return None
            waited_ms = now_ms - oldest.arrival_ms
            by_age = serves_the_oldest(self._admissions, waited_ms, self._config.queue_aging_ms)
            if by_age:
                sequence = oldest
            elif self._policy.keeps_budgets:
                sequence = self._ready.urgent(now_ms) or sequence
            adapter = sequence.call.request.adapter
            if adapter is None or self._pool.usable(adapter):
                return sequence, by_age
            self._ready.remove(sequence)
            sequence.state = SequenceState.LOADING

    def _start(self, sequence: Sequence, promised: int, now_ms: float) -> int | None:
        """Puts a waiting sequence among the running if its tokens fit into the KV cache.

        `promised`: blocks that others still need. The blocks that this one needs, None if too many.
        """
        call = sequence.call
        prefix = sequence_blocks.cached_prefix(self._blocks, sequence)
        final_blocks = blocks_for(len(call.request.prompt) + call.max_tokens)
        need = min(blocks_for(sequence.length) + 1, final_blocks) - len(prefix)
        taken = self._blocks.count_cached(prefix) + promised
        alone, adapter = not self.running, call.request.adapter
        if not self._pool.reclaim(need + taken, force=alone, keep=adapter):
            return None
        self._ready.remove(sequence)
        sequence_blocks.start_from(self._blocks, sequence, prefix)
        if call.admitted_ms is None:
            call.admitted_ms = now_ms
            call.cached_tokens = sequence.computed
            self.outlook.waits_no_more(call)
        if sequence.wants_prompt_logprobs:
            call.prompt_logprobs = [None]
        self.running.start(sequence)
        return need

    # ------------------------------------------------------------------ preemption

    def _keep_room_for_decodes(self, now_ms: float) -> Demand:
        """Makes sure that every running decode can get its next block, preempting if need be."""
        while True:
            demand = self.running.demand()
            need, alone = demand.decode_blocks, len(self.running) == 1
            if need == 0 or self._pool.reclaim(need, force=alone):
                return demand
            self._preempt(self.running.least_valued(), now_ms)

    def _break_deadlock(self, now_ms: float) -> None:
        """Nothing can run for want of blocks: the first gets those of the last."""
        if len(self.running) == 1 and self._pool.reclaim(1, force=True):
            return
        self._preempt(self.running.least_valued(), now_ms)

    def _preempt(self, sequence: Sequence, now_ms: float) -> None:
        """Takes back all blocks of a sequence; it waits, at its place by arrival, to start over."""
        self.running.stop(sequence)
        sequence.preemptions += 1
        sequence.call.preemptions += 1
        self.preemptions += 1
        self._wait_again(sequence, now_ms)

    def clear_adapter(self, adapter: AdapterRef, now_ms: float) -> None:
        """Whatever runs with the adapter is set aside until it is the adapter's turn again."""
        running = self.running.sequences.values()
        for sequence in [s for s in running if s.call.request.adapter == adapter]:
            self.running.stop(sequence)
            self._wait_again(sequence, now_ms)

    def _wait_again(self, sequence: Sequence, now_ms: float) -> None:
        adapter = sequence.call.request.adapter
        if self._policy.keeps_budgets:
            sequence.turn_by_next_token()
        sequence.state = SequenceState.LOADING
        if adapter is not None:
            self._pool.wait(sequence, now_ms)
        if adapter is None or self._pool.usable(adapter):
            self.make_ready(sequence, now_ms)

    # ------------------------------------------------------------------ after the step

    def commit(self, row: PlanRow, result: RowResult, now_ms: float) -> Sequence | None:
        """Takes in what a row computed; its sequence, or None when that is over already."""
        sequence = self.running.sequences.get(row.seq)
        if sequence is None:
            return None
        sequence.computed += len(row.tokens)
        if not result.finite:
            self._blocks.unregister(sequence.blocks)
            return sequence
        sequence_blocks.register_full(self._blocks, sequence)
        self._charge(sequence, len(result.token_ids))
        if result.token_ids:
            sequence.last_token_ms = now_ms
            if sequence.first_token_ms is None:
                sequence.first_token_ms = now_ms
        call = sequence.call
        if row.prompt_logprobs is not None and result.prompt_logprobs is not None:
            known = len(call.request.prompt) - len(call.prompt_logprobs)
            call.prompt_logprobs += result.prompt_logprobs[:known]
        if row.sample and not call.forked:
            self._fork(sequence, now_ms)
        return sequence

    def _charge(self, sequence: Sequence, drawn: int) -> None:
        prompt = min(sequence.computed, sequence.prompt_tokens)
        new = max(0, prompt - sequence.charged)
        sequence.charged += new
        cost = token_cost(new, drawn, sequence.rank)
        self._policy.charge(sequence.tenant, sequence.call.weight, cost)

    def _fork(self, leader: Sequence, now_ms: float) -> None:
        """The prompt is computed: the further choices branch off; who has no block waits again."""
        call = leader.call
        self.running.give_up_places(leader)
        call.forked = True
        call.prompt_logprobs_due = call.request.prompt_logprobs is not None
        for choice in range(1, call.request.choices):
            child = self._new_sequence(call, choice)
            call.sequences.append(child)
            child.charged = leader.charged
            child.turn_like(leader)
            child.hashes = list(leader.hashes)
            if not self.running.branch_off(leader, child):
                self._wait_again(child, now_ms)

    def undo(self, plan: StepPlan) -> list[Call]:
        """The step failed: the requests that had a part in it, whose KV is now in doubt."""
        running = self.running
        running.closed = plan.closed + running.closed  # perhaps not done; twice does no harm
        sequences = running.sequences
        touched = [sequences[row.seq] for row in plan.rows if row.seq in sequences]
        destinations = {destination for _, destination in plan.copies}
        touched += [s for s in sequences.values() if not destinations.isdisjoint(s.blocks)]
        return list(dict.fromkeys(sequence.call for sequence in touched))
