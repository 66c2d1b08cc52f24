"""What runs in the next step: membership is decided anew before every step.

Waiting sequences are admitted while there are places, KV blocks, and room in the tightest budget;
running decodes get their token; what is left of the step goes to prefill chunks, those whose time
to the first token runs out and then the tenant that was served least first. When blocks run out,
idle adapters give way, then the sequence that the policy values least is preempted and recomputed
later. How much one step may hold is `engine/step_budget.py`; time comes in as an argument.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.adapters.pool import AdapterPool
from engine.arrivals import NONE, Arrivals, Overtaking, Question
from engine.backlog import Backlogs
from engine.config import EngineConfig
from engine.forecast import AnswerLength, Standing
from engine.kv_blocks import KvBlocks, blocks_for
from engine.policy import OUTPUT_COST, URGENT_SHARE, Policy, serves_the_oldest, token_cost
from engine.request import Call, Sequence, SequenceState
from engine.step_budget import (
    PATIENCE_STEPS,
    Commitments,
    Draft,
    chunk_length,
    draft_decodes,
)
from engine.step_time import StepShape, StepTimes
from engine.types import (
    BLOCK_TOKENS,
    PENDING,
    AdapterRef,
    PlanRow,
    RowResult,
    SequenceStart,
    StepPlan,
)
from engine.waiting import FairQueue

PROTECTED_AFTER = 3
"""A sequence preempted so often is preempted last: each of them finishes in the end."""

BREACH_SHARE = 0.25
"""Of the aging bound: how long the batch rests after it has grown past a budget for an old one."""


@dataclass(slots=True)
class Demand:
    """What running sequences still need for the tokens they have."""

    tokens: int = 0  # whose KV is to be computed
    blocks: int = 0
    decode_blocks: int = 0  # of `blocks`, those without which a decode cannot go on
    commitments: Commitments = field(default_factory=Commitments)


class Scheduler:
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
        self._times = times or StepTimes()
        self._backlogs = Backlogs(policy)
        self._arrivals = Arrivals(policy)
        self._answers = AnswerLength()
        self._ready: FairQueue[Sequence] = FairQueue(policy)
        self._running: dict[int, Sequence] = {}
        self._closed: list[int] = []
        self._copies: dict[int, tuple[int, int]] = {}  # by the sequence that they are for
        self._calls_of: Counter[str] = Counter()  # by the tenant that is charged
        self._running_of: Counter[str] = Counter()
        self._choices_to_come = 0  # places kept for choices that will branch off running sequences
        self._admissions = 0
        self._next_seq = 0
        self._next_step = 0
        self._starved_steps = 0  # in a row in which prompts got nothing
        self._last_breach_ms = -math.inf  # when the batch last grew past a budget
        self._shape = StepShape()
        self.preemptions = 0

    # ------------------------------------------------------------------ what is here

    @property
    def running(self) -> int:
        """Sequences in progress."""
        return len(self._running)

    @property
    def sequences(self) -> Mapping[int, Sequence]:
        """The sequences in progress, by their number."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests of which nothing has run yet."""
        return self._backlogs.requests

    def waiting_of(self, tenant: str) -> int:
        return self._backlogs.of(tenant)

    @property
    def shape(self) -> StepShape:
        """What the step planned last contains."""
        return self._shape

    @property
    def runnable(self) -> bool:
        """Whether `schedule` may have something to plan."""
        return bool(self._running or self._ready or self._closed)

    def needed_blocks(self) -> int:
        """KV blocks that adapters must leave: what running sequences need now and next."""
        return self._demand().blocks + len(self._running)

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
        hurried = call.request.budget.ttft_ms is not None
        prompt = len(call.request.prompt)
        self._backlogs.add(call.tenant, call.weight, prompt, now_ms, hurried=hurried)
        self._arrivals.add(call.tenant, call.weight, prompt, now_ms)
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
            self._stop(sequence)
        else:
            self._ready.remove(sequence)
            if call.request.adapter is not None:
                self._pool.leave(sequence)
        sequence.state = SequenceState.FINISHED
        call.sequences.remove(sequence)
        if sequence.generated and not call.request.system:
            self._answers.observe(len(sequence.generated))
        if call.sequences:
            return
        if call.waiting:
            self._no_longer_waits(call)
        _take_one(self._calls_of, call.tenant)
        if not self._calls_of[call.tenant]:
            self._policy.deactivate(call.tenant)

    def _no_longer_waits(self, call: Call) -> None:
        hurried = call.request.budget.ttft_ms is not None
        prompt, started = len(call.request.prompt), call.admitted_ms is not None
        self._backlogs.take(call.tenant, prompt, hurried=hurried, started=started)

    # ------------------------------------------------------------------ the plan

    def schedule(self, now_ms: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        self._admit(self._keep_room_for_decodes(now_ms), now_ms)
        decodes = [s for s in self._running.values() if s.length - s.computed == 1]
        budgets = self._policy.keeps_budgets
        draft = draft_decodes(decodes, now_ms, self._times, budgets=budgets)
        rows = [self._row(sequence, 1) for sequence in draft.decodes]
        rows += self._prefill_rows(draft, now_ms)
        while not rows and self._running:
            self._break_deadlock(now_ms)
            rows = self._prefill_rows(draft, now_ms)
        if not rows and not self._closed and not self._copies:
            return None
        plan = StepPlan(
            step=self._next_step,
            closed=self._closed,
            started=self._introduce(rows),
            copies=list(self._copies.values()),
            rows=rows,
        )
        self._shape = draft.shape
        self._next_step += 1
        self._closed, self._copies = [], {}
        return plan

    def foresee(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, which runs now, where it follows without that one's tokens.

        So it does while nothing but decodes runs and nobody can start: each goes on with the token
        that `plan` draws for it, PENDING in its place. A decode that turns out to have ended with
        it is computed for nothing. None: the next step needs the tokens, or a decision.
        """
        if self._closed or self._copies:
            return None
        known = [(row, self._running[row.seq]) for row in plan.rows if row.seq in self._running]
        if len(known) < len(self._running):
            return None
        if not all(_goes_on(row, sequence) for row, sequence in known):
            return None
        # the others end with the token that is being drawn
        going = [s for _, s in known if len(s.generated) + 1 < s.call.max_tokens]
        if self._ready and len(going) < self._config.max_running:
            return None
        missing = sum(max(0, blocks_for(s.length + 1) - len(s.blocks)) for s in going)
        if not going or missing > self._blocks.available:
            return None
        rows = [self._row_beyond(sequence) for sequence in going]
        shape = self._shape
        kv_tokens = shape.kv_tokens + len(rows)
        self._shape = replace(shape, decode_rows=len(rows), kv_tokens=kv_tokens)
        self._next_step += 1
        return StepPlan(self._next_step - 1, [], [], [], rows)

    def _row_beyond(self, sequence: Sequence) -> PlanRow:
        """The decode of the token that is being drawn."""
        return PlanRow(
            seq=sequence.seq,
            start=sequence.length,
            tokens=[PENDING],
            new_blocks=self._announce_blocks(sequence, sequence.length + 1),
            slot=sequence.slot,
            sample=True,
        )

    def _demand(self) -> Demand:
        """What the running sequences need, in one pass."""
        demand = Demand()
        budgets = self._policy.keeps_budgets
        for sequence in self._running.values():
            length = sequence.length
            pending = length - sequence.computed
            missing = -(-length // BLOCK_TOKENS) - len(sequence.blocks)
            demand.tokens += pending
            demand.blocks += missing
            if budgets:
                demand.commitments.add(sequence)
            if pending == 1:
                demand.decode_blocks += missing
        return demand

    def _keep_room_for_decodes(self, now_ms: float) -> Demand:
        """Makes sure that every running decode can get its next block, preempting if need be."""
        while True:
            demand = self._demand()
            need, alone = demand.decode_blocks, len(self._running) == 1
            if need == 0 or self._pool.reclaim(need, force=alone):
                return demand
            self._preempt(self._least_valued(), now_ms)

    def _admit(self, demand: Demand, now_ms: float) -> None:
        while (choice := self._next_to_admit(now_ms)) is not None:
            sequence, by_age = choice
            places = len(self._running) + self._choices_to_come + _places(sequence)
            if places > self._config.max_running:
                return
            full = demand.tokens >= self._config.max_batch_tokens
            if full and self._running_of[sequence.tenant]:
                return
            if self._running and self._breaks_a_budget(demand, sequence):
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

    def _breaks_a_budget(self, demand: Demand, sequence: Sequence) -> bool:
        """Whether the batch must not grow: a decode's budget would break."""
        if not self._policy.keeps_budgets:
            return False
        return demand.commitments.breaks(sequence, self._times)

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
        adapter = call.request.adapter
        prefix: list[int] = []
        if not _wants_prompt_logprobs(sequence):
            # the last token is always computed: its logits are what is asked for
            full_blocks = (sequence.length - 1) // BLOCK_TOKENS
            prefix = self._blocks.match(sequence.block_hashes(full_blocks))
        final_blocks = blocks_for(len(call.request.prompt) + call.max_tokens)
        need = min(blocks_for(sequence.length) + 1, final_blocks) - len(prefix)
        taken = self._blocks.count_cached(prefix) + promised
        if not self._pool.reclaim(need + taken, force=not self._running, keep=adapter):
            return None
        self._ready.remove(sequence)
        self._blocks.share(prefix)
        sequence.blocks = prefix
        sequence.registered = len(prefix)
        sequence.computed = len(prefix) * BLOCK_TOKENS
        sequence.charged = max(sequence.charged, sequence.computed)
        if call.admitted_ms is None:
            call.admitted_ms = now_ms
            call.cached_tokens = sequence.computed
            self._no_longer_waits(call)
        if _wants_prompt_logprobs(sequence):
            call.prompt_logprobs = [None]
        self._run(sequence)
        self._choices_to_come += _places(sequence) - 1
        return need

    def _prefill_rows(self, draft: Draft, now_ms: float) -> list[PlanRow]:
        """Chunks of the prompts in progress, as many tokens as the step may hold."""
        prefilling = [s for s in self._running.values() if s.length - s.computed > 1]
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

    def _token_budget(self, draft: Draft) -> int:
        """Most prompt tokens of the step. Decodes without a budget are spared long chunks too."""
        budget = self._config.max_batch_tokens - len(draft.decodes)
        bounded = self._times.known and all(s.tpot_ms is not None for s in draft.decodes)
        if draft.decodes and not (bounded and self._policy.keeps_budgets):
            budget = min(budget, self._config.prefill_chunk)
        return budget

    def _ranked(self, prefilling: list[Sequence], now_ms: float) -> list[Sequence]:
        """Who gets the step's prompt tokens first."""
        if not self._policy.keeps_budgets:
            return sorted(prefilling, key=self._rank)
        policy = self._policy
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
        new_blocks = self._announce_blocks(sequence, end)
        decode = end == sequence.length and start >= sequence.prompt_tokens and count == 1
        logprobs = sequence.call.request.prompt_logprobs
        return PlanRow(
            seq=sequence.seq,
            start=start,
            tokens=sequence.generated[-1:] if decode else sequence.tokens(start, end),
            new_blocks=new_blocks,
            slot=sequence.slot,
            sample=end == sequence.length,
            prompt_logprobs=logprobs if _wants_prompt_logprobs(sequence) else None,
        )

    def _announce_blocks(self, sequence: Sequence, end: int) -> list[int]:
        """Takes what is missing for the first `end` tokens; the blocks new to the executor."""
        missing = -(-end // BLOCK_TOKENS) - len(sequence.blocks)
        if missing > 0:
            taken = self._blocks.take(missing)
            if taken is None:
                raise AssertionError("a row is planned only when its blocks are available")
            sequence.blocks += taken
        if sequence.announced_blocks == len(sequence.blocks):
            return []
        new_blocks = sequence.blocks[sequence.announced_blocks :]
        sequence.announced_blocks = len(sequence.blocks)
        return new_blocks

    def _introduce(self, rows: list[PlanRow]) -> list[SequenceStart]:
        started = []
        for row in rows:
            sequence = self._running[row.seq]
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

    # ------------------------------------------------------------------ after the step

    def commit(self, row: PlanRow, result: RowResult, now_ms: float) -> Sequence | None:
        """Takes in what a row computed; its sequence, or None when that is over already."""
        sequence = self._running.get(row.seq)
        if sequence is None:
            return None
        sequence.computed += len(row.tokens)
        if not result.finite:
            self._blocks.unregister(sequence.blocks)
            return sequence
        self._register_full_blocks(sequence)
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
            self._choices_to_come -= _places(sequence) - 1
            call.forked = True
            call.prompt_logprobs_due = call.request.prompt_logprobs is not None
            for choice in range(1, call.request.choices):
                self._fork(sequence, choice, now_ms)
        return sequence

    def undo(self, plan: StepPlan) -> list[Call]:
        """The step failed: the requests that had a part in it, whose KV is now in doubt."""
        self._closed = plan.closed + self._closed  # perhaps not carried out; twice does no harm
        touched = [self._running[row.seq] for row in plan.rows if row.seq in self._running]
        destinations = {destination for _, destination in plan.copies}
        touched += [s for s in self._running.values() if not destinations.isdisjoint(s.blocks)]
        return list(dict.fromkeys(sequence.call for sequence in touched))

    def _register_full_blocks(self, sequence: Sequence) -> None:
        full = sequence.computed // BLOCK_TOKENS
        if full == sequence.registered:
            return
        hashes = sequence.block_hashes(full)
        for index in range(sequence.registered, full):
            owner = sequence.call.request.adapter
            self._blocks.register(sequence.blocks[index], hashes[index], owner)
        sequence.registered = full

    def _charge(self, sequence: Sequence, drawn: int) -> None:
        prompt = min(sequence.computed, sequence.prompt_tokens)
        new = max(0, prompt - sequence.charged)
        sequence.charged += new
        cost = token_cost(new, drawn, sequence.rank)
        self._policy.charge(sequence.tenant, sequence.call.weight, cost)

    def _fork(self, leader: Sequence, choice: int, now_ms: float) -> None:
        """A further choice: shares the prompt's blocks, with a copy of the one it will write.

        It computes the last prompt token once more, to draw a first token of its own.
        """
        call = leader.call
        child = self._new_sequence(call, choice)
        call.sequences.append(child)
        child.charged = leader.charged
        child.turn_like(leader)
        child.hashes = list(leader.hashes)
        last = len(call.request.prompt) - 1
        shared = leader.blocks[: last // BLOCK_TOKENS]
        own = self._blocks.take(1)
        if own is None:
            self._wait_again(child, now_ms)
            return
        self._blocks.share(shared)
        child.blocks = shared + own
        child.registered = len(shared)
        child.computed = last
        if last % BLOCK_TOKENS:
            self._copies[child.seq] = (leader.blocks[last // BLOCK_TOKENS], own[0])
        self._run(child)

    # ------------------------------------------------------------------ running or not

    def _new_sequence(self, call: Call, choice: int) -> Sequence:
        self._next_seq += 1
        return Sequence(self._next_seq, call, choice)

    def _run(self, sequence: Sequence) -> None:
        adapter = sequence.call.request.adapter
        if adapter is not None:
            sequence.slot = self._pool.pin(sequence)
            sequence.rank = self._pool.rank(adapter)
            sequence.adapter_bytes = self._pool.nbytes(adapter)
        sequence.state = SequenceState.RUNNING
        self._running[sequence.seq] = sequence
        self._running_of[sequence.tenant] += 1

    def _stop(self, sequence: Sequence) -> None:
        del self._running[sequence.seq]
        self._choices_to_come -= _places(sequence) - 1
        _take_one(self._running_of, sequence.tenant)
        self._copies.pop(sequence.seq, None)
        self._blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.announced_blocks = 0
        sequence.computed = 0
        if sequence.started:
            self._closed.append(sequence.seq)
            sequence.started = False
        if sequence.call.request.adapter is not None:
            self._pool.unpin(sequence.call.request.adapter)

    def _preempt(self, sequence: Sequence, now_ms: float) -> None:
        """Takes back all blocks of a sequence; it waits, at its place by arrival, to start over."""
        self._stop(sequence)
        sequence.preemptions += 1
        sequence.call.preemptions += 1
        self.preemptions += 1
        self._wait_again(sequence, now_ms)

    def clear_adapter(self, adapter: AdapterRef, now_ms: float) -> None:
        """Whatever runs with the adapter is set aside until it is the adapter's turn again."""
        for sequence in [s for s in self._running.values() if s.call.request.adapter == adapter]:
            self._stop(sequence)
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

    def _break_deadlock(self, now_ms: float) -> None:
        """Nothing can run for want of blocks: the first gets those of the last."""
        if len(self._running) == 1 and self._pool.reclaim(1, force=True):
            return
        self._preempt(self._least_valued(), now_ms)

    def _rank(self, sequence: Sequence) -> tuple[float, tuple[int, int]]:
        return (self._policy.priority(sequence.tenant), sequence.order)

    def _least_valued(self) -> Sequence:
        """Whom to preempt: of the tenants served too much, then of those without a budget."""
        policy = self._policy
        least = min(policy.priority(s.tenant) for s in self._running.values())

        def value(s: Sequence) -> tuple[bool, bool, bool, float, tuple[int, int]]:
            priority = policy.priority(s.tenant)
            budget = s.call.request.budget
            promised = budget.ttft_ms is not None or budget.tpot_ms is not None
            return (
                s.preemptions < PROTECTED_AFTER,
                policy.keeps_budgets and priority - policy.lead(s.tenant) > least,
                policy.keeps_budgets and not promised,
                priority,
                s.order,
            )

        return max(self._running.values(), key=value)

    # ------------------------------------------------------------------ what a newcomer finds

    def standing(self, call: Call, now_ms: float, *, everybody: bool = False) -> Standing:
        """What stands between a new request and its first token.

        `everybody`: all that waits is counted as before it, which is quick to say; otherwise only
        what the policy serves first.
        """
        prompt = len(call.request.prompt)
        demand = self._demand()
        newcomer = Sequence(0, call, 0)
        drawn = sum(len(s.generated) for s in self._running.values())
        answer_tokens = self._answers.expected(drawn)
        running = len(self._running)
        free = self._config.max_running - running - self._choices_to_come
        blocks_each = blocks_for(prompt + int(answer_tokens))
        free = min(free, (self._blocks.available - demand.blocks) // max(1, blocks_each))
        if running and self._breaks_a_budget(demand, newcomer):
            free = 0
        if everybody or not self._policy.keeps_budgets:
            ahead = self._backlogs.everything()
        else:
            ahead = self._backlogs.before(call.tenant, call.weight, prompt, answer_tokens)
        everything, firm = demand.commitments.loose.shape(), demand.commitments.firm.shape()
        decodes = StepShape(
            0,
            everything.decode_rows + firm.decode_rows,
            everything.kv_tokens + firm.kv_tokens,
            0,
            everything.adapter_bytes + firm.adapter_bytes,
        )
        adapter = call.request.adapter
        chunk = self._usual_chunk(decodes, demand.commitments)
        token_ms = self._times.mean_ms(decodes.with_chunk(0, chunk)) / chunk
        return Standing(
            ahead=ahead,
            prefilling_tokens=sum(s.pending for s in self._running.values() if s.pending > 1),
            own_tokens=prompt,
            free_places=max(0, free),
            decodes=decodes,
            chunk=chunk,
            own_turn_ms=self._backlogs.own_turn_ms(call.tenant, prompt, now_ms, token_ms),
            answer_tokens=answer_tokens,
            adapter_ms=0.0 if adapter is None else self._pool.expected_ms(adapter),
            overtaking=self._overtaking(call, now_ms, token_ms, answer_tokens),
            percentile=call.request.budget.percentile,
        )

    def _overtaking(
        self, call: Call, now_ms: float, token_ms: float, answer_tokens: float
    ) -> Overtaking:
        ttft_ms = call.request.budget.ttft_ms
        if ttft_ms is None or not self._policy.keeps_budgets:
            return NONE
        left_ms = max(1.0, ttft_ms - call.request.waited_ms)
        asked = Question(token_ms, OUTPUT_COST * answer_tokens, left_ms)
        return self._arrivals.overtaking(call.tenant, call.weight, now_ms, asked)

    def _usual_chunk(self, decodes: StepShape, commitments: Commitments) -> int:
        """Prompt tokens of a step beside these decodes, as the budgets allow."""
        most = self._config.max_batch_tokens - decodes.decode_rows
        if commitments.loose.rows:
            most = min(most, self._config.prefill_chunk)
        if self._policy.keeps_budgets and commitments.firm.rows:
            most = self._times.largest_chunk(decodes, 0, most, commitments.tightest_ms)
        return max(1, most)

    def smallest_step_ms(self, call: Call) -> float:
        """A decode of the request alone, with half of its answer: no step can be shorter."""
        context = len(call.request.prompt) + call.max_tokens // 2
        return self._times.mean_ms(StepShape().with_decode(context))


def _places(sequence: Sequence) -> int:
    """Places among the running that the sequence takes, choices that will branch off included."""
    return 1 if sequence.call.forked else sequence.call.request.choices


def _goes_on(row: PlanRow, sequence: Sequence) -> bool:
    """Whether a row is the last known token of a decode that can be foreseen."""
    decode = len(row.tokens) == 1 and row.sample and row.start + 1 == sequence.length
    return decode and row.start >= sequence.prompt_tokens and sequence.call.foreseeable


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    call = sequence.call
    return call.request.prompt_logprobs is not None and not call.forked


def _take_one(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
