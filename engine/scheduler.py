"""What runs in the next step: membership is decided anew before every step.

A step has one token budget. Every running decode gets its token; then waiting sequences are
admitted while there are places and KV blocks; what is left of the budget goes to prefill chunks,
the tenant that was served least first. When blocks run out, idle adapters give way, then the
sequence that the policy values least is preempted and recomputed later.
"""

from collections import Counter
from dataclasses import dataclass

from engine.adapters.pool import AdapterPool
from engine.config import EngineConfig
from engine.kv_blocks import KvBlocks, blocks_for
from engine.policy import Policy, serves_the_oldest, token_cost
from engine.request import Call, Sequence, SequenceState
from engine.types import BLOCK_TOKENS, PlanRow, RowResult, SequenceStart, StepPlan
from engine.waiting import FairQueue

PROTECTED_AFTER = 3
"""A sequence preempted so often is preempted last: each of them finishes in the end."""


@dataclass(slots=True)
class Demand:
    """What running sequences still need for the tokens they have."""

    tokens: int = 0  # whose KV is to be computed
    blocks: int = 0
    decode_blocks: int = 0  # of `blocks`, those without which a decode cannot go on


class Scheduler:
    def __init__(
        self, config: EngineConfig, blocks: KvBlocks, pool: AdapterPool, policy: Policy
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._pool = pool
        self._policy = policy
        self._ready: FairQueue[Sequence] = FairQueue(policy)
        self._running: dict[int, Sequence] = {}
        self._closed: list[int] = []
        self._copies: dict[int, tuple[int, int]] = {}  # by the sequence that they are for
        self._calls_of: Counter[str] = Counter()  # by the tenant that is charged
        self._running_of: Counter[str] = Counter()
        self._waiting_of: Counter[str] = Counter()  # requests of which nothing has run yet
        self._choices_to_come = 0  # places kept for choices that will branch off running sequences
        self._admissions = 0
        self._next_seq = 0
        self._next_step = 0
        self.preemptions = 0

    # ------------------------------------------------------------------ what is here

    @property
    def running(self) -> int:
        """Sequences in progress."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests of which nothing has run yet."""
        return self._waiting_of.total()

    def waiting_of(self, tenant: str) -> int:
        return self._waiting_of[tenant]

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
        usable = True
        if call.request.adapter is not None:
            usable = self._pool.enqueue(sequence, now_ms)
        call.sequences.append(sequence)
        self._calls_of[call.tenant] += 1
        if self._calls_of[call.tenant] == 1:
            self._policy.activate(call.tenant)
        self._waiting_of[call.tenant] += 1
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
        if call.sequences:
            return
        if call.waiting:
            _take_one(self._waiting_of, call.tenant)
        _take_one(self._calls_of, call.tenant)
        if not self._calls_of[call.tenant]:
            self._policy.deactivate(call.tenant)

    # ------------------------------------------------------------------ the plan

    def schedule(self, now_ms: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        self._admit(self._keep_room_for_decodes(now_ms), now_ms)
        rows = self._decode_rows()
        budget = self._config.max_batch_tokens - len(rows)
        if rows:
            budget = min(budget, self._config.prefill_chunk)
        rows += self._prefill_rows(budget)
        while not rows and self._running:
            self._break_deadlock(now_ms)
            rows = self._prefill_rows(budget)
        if not rows and not self._closed and not self._copies:
            return None
        plan = StepPlan(
            step=self._next_step,
            closed=self._closed,
            started=self._introduce(rows),
            copies=list(self._copies.values()),
            rows=rows,
        )
        self._next_step += 1
        self._closed, self._copies = [], {}
        return plan

    def _demand(self) -> Demand:
        """What the running sequences need, in one pass."""
        demand = Demand()
        for sequence in self._running.values():
            length = sequence.length
            pending = length - sequence.computed
            missing = blocks_for(length) - len(sequence.blocks)
            demand.tokens += pending
            demand.blocks += missing
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
            blocks = self._start(sequence, demand.blocks, now_ms)
            if blocks is None:
                return
            demand.blocks += blocks
            demand.tokens += sequence.pending
            self._admissions += 1
            if not by_age:
                self._policy.admitted(sequence.tenant)

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
            _take_one(self._waiting_of, call.tenant)
        if _wants_prompt_logprobs(sequence):
            call.prompt_logprobs = [None]
        self._run(sequence)
        self._choices_to_come += _places(sequence) - 1
        return need

    def _decode_rows(self) -> list[PlanRow]:
        return [self._row(s, 1) for s in self._running.values() if s.pending == 1]

    def _prefill_rows(self, budget: int) -> list[PlanRow]:
        rows: list[PlanRow] = []
        prefilling = [s for s in self._running.values() if s.pending > 1]
        for sequence in sorted(prefilling, key=self._rank):
            room = (len(sequence.blocks) + self._blocks.available) * BLOCK_TOKENS
            chunk = min(sequence.pending, budget, room - sequence.computed)
            if chunk > 0:
                rows.append(self._row(sequence, chunk))
                budget -= chunk
        return rows

    def _row(self, sequence: Sequence, count: int) -> PlanRow:
        """The next `count` tokens of a sequence; its new blocks must be available."""
        start, end = sequence.computed, sequence.computed + count
        missing = blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            taken = self._blocks.take(missing)
            if taken is None:
                raise AssertionError("a row is planned only when its blocks are available")
            sequence.blocks += taken
        new_blocks = sequence.blocks[sequence.announced_blocks :]
        sequence.announced_blocks = len(sequence.blocks)
        logprobs = sequence.call.request.prompt_logprobs
        return PlanRow(
            seq=sequence.seq,
            start=start,
            tokens=sequence.tokens(start, end),
            new_blocks=new_blocks,
            slot=sequence.slot,
            sample=end == sequence.length,
            prompt_logprobs=logprobs if _wants_prompt_logprobs(sequence) else None,
        )

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
        touched = [self._running[row.seq] for row in plan.rows]
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
        prompt = min(sequence.computed, len(sequence.call.request.prompt))
        cost = token_cost(max(0, prompt - sequence.charged), drawn, sequence.rank)
        sequence.charged = max(sequence.charged, prompt)
        self._policy.charge(sequence.tenant, sequence.call.weight, cost)

    def _fork(self, leader: Sequence, choice: int, now_ms: float) -> None:
        """A further choice: shares the prompt's blocks, with a copy of the one it will write.

        It computes the last prompt token once more, to draw a first token of its own.
        """
        call = leader.call
        child = self._new_sequence(call, choice)
        call.sequences.append(child)
        child.charged = leader.charged
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

    def _wait_again(self, sequence: Sequence, now_ms: float) -> None:
        adapter = sequence.call.request.adapter
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
        return max(
            self._running.values(),
            key=lambda s: (s.preemptions < PROTECTED_AFTER, *self._rank(s)),
        )


def _places(sequence: Sequence) -> int:
    """Places among the running that the sequence takes, choices that will branch off included."""
    return 1 if sequence.call.forked else sequence.call.request.choices


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    call = sequence.call
    return call.request.prompt_logprobs is not None and not call.forked


def _take_one(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
