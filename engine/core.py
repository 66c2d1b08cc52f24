"""The engine without its process: requests in, steps, events out. One thread calls everything."""

import logging
import secrets
import statistics
from collections import Counter, deque

from engine.adapters.loading import Loader
from engine.adapters.pool import AdapterPool, PoolEvents
from engine.admission import check_request, refuse_late
from engine.arena import Arena
from engine.attribution import Attribution
from engine.clock import Clock
from engine.config import EngineConfig
from engine.errors import EngineError, NotStarted, RequestRefused
from engine.grammar import GrammarSource
from engine.kv_blocks import KvBlocks, blocks_for, prefix_seed
from engine.policy import SYSTEM_WEIGHT, make_policy
from engine.request import Call, Sequence, charged_tenant
from engine.scheduler import Scheduler
from engine.step_counts import StepCounter
from engine.step_time import StepTimes
from engine.steps_ahead import Step, StepsAhead
from engine.types import (
    AdapterRef,
    EngineStatus,
    Executor,
    FinishReason,
    GenerateRequest,
    Grammar,
    RequestOutput,
    RowResult,
    StepPlan,
    StepResult,
)
from engine.waiting import LazyHeap

STEP_TIMES = 256
"""Steps over which the status takes its median."""

log = logging.getLogger(__name__)


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        loader: Loader,
        clock: Clock,
        step_times: StepTimes | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        """`step_times`: what is known of this device already; learned further with every step."""
        self._config = config
        self._grammars = grammars
        self._executor = executor
        self._clock = clock
        self._description = executor.description
        self._arena = Arena(executor.extent_count)
        self._blocks = KvBlocks(self._arena, prefix_caching=config.prefix_caching)
        self.step_times = step_times or StepTimes()
        self._policy = policy = make_policy(config.policy)
        self._pool = AdapterPool(config, self._arena, self._blocks, executor, loader, policy, clock)
        self._scheduler = Scheduler(config, self._blocks, self._pool, policy, self.step_times)
        self._ahead = StepsAhead(executor, self._scheduler)
        self._eos = frozenset(self._description.eos_token_ids)
        self._calls: dict[str, Call] = {}
        self._deadlines: LazyHeap[Call] = LazyHeap()  # of requests that have not started
        self._attribution = Attribution()
        self._outbox: list[RequestOutput] = []  # events that came about between steps
        self._arrivals = 0
        self._draining = False
        self._engine_id = secrets.token_hex(8)
        self._started_ms = clock.now_ms()
        self._step_ms: deque[float] = deque(maxlen=STEP_TIMES)
        self._steps = 0
        self._step_counts = StepCounter()
        self._prompt_tokens = 0
        self._completion_tokens = 0

    # ------------------------------------------------------------------ the step

    def step(self) -> list[RequestOutput]:
        """Moves everything on by one step; the events of it, in order."""
        now_ms = self._clock.now_ms()
        outputs, self._outbox = self._outbox, []
        outputs += self._take_in_adapters(now_ms)
        outputs += self._take_in_grammars(now_ms)
        outputs += self._expire(now_ms)
        step = self._ahead.begun or self._planned(now_ms)
        if step is None:
            return outputs
        try:
            result = self._ahead.run(step)
        except Exception:
            log.exception("step %d failed with %d rows", step.plan.step, len(step.plan.rows))
            return outputs + self._give_up([step, *self._ahead.abandon()])
        self._attribute(step.plan, result, now_ms)
        outputs += self._emit(step.plan, result)
        # all that lies between two tokens of a decode, not the device's part alone
        self.step_times.observe(step.shape, self._clock.now_ms() - now_ms)
        return outputs

    def _planned(self, now_ms: float) -> Step | None:
        plan = self._scheduler.schedule(now_ms)
        return None if plan is None else Step(plan, self._scheduler.planner.shape)

    @property
    def has_work(self) -> bool:
        """Whether `step` should be called again without waiting for a message."""
        return bool(
            self._calls
            or self._outbox
            or self._scheduler.runnable
            or self._pool.busy
            or self._ahead.begun
        )

    def _take_in_adapters(self, now_ms: float) -> list[RequestOutput]:
        config = self._config
        # nobody's tokens are held up by a copy when nobody is running
        copy_bytes = config.arena_bytes
        running = self._scheduler.running
        if running:
            step_ms = self.step_times.mean_ms(self._scheduler.planner.shape)
            copy_bytes = self._pool.places.pace.bytes_now(step_ms)
        events: PoolEvents = self._pool.advance(now_ms, running.needed_blocks, copy_bytes)
        for adapter in self._pool.places.overdue(now_ms):
            self._scheduler.clear_adapter(adapter, now_ms)
        for sequence in events.usable:
            self._scheduler.make_ready(sequence, now_ms)
        outputs: list[RequestOutput] = []
        for sequence, code, message in events.failed:
            outputs += self._end(sequence.call, "error", now_ms, code, message)
        return outputs

    def _take_in_grammars(self, now_ms: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        if self._grammars is None:
            return outputs
        for compiled in self._grammars.poll():
            call = self._calls.get(compiled.request_id)
            if call is None or not call.compiling:
                continue
            refused = compiled.refused
            if refused is None:
                self._scheduler.grammar_ready(call, now_ms)
            else:
                outputs += self._end(call, "error", now_ms, refused.code, refused.message)
        return outputs

    def _expire(self, now_ms: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while (call := self._deadlines.peek()) is not None and _deadline(call)[0] <= now_ms:
            self._deadlines.remove(_deadline(call))
            if call.waiting:
                message = "The deadline passed before the request could start."
                outputs += self._end(call, "error", now_ms, "deadline_exceeded", message)
        return outputs

    def _attribute(self, plan: StepPlan, result: StepResult, since_ms: float) -> None:
        """Charges the requests of a step for it, those that end with it too."""
        running, nbytes = self._scheduler.running.sequences, self._pool.nbytes
        now_ms = self._clock.now_ms()
        self._attribution.charge_step(plan, result.duration_ms, running, nbytes, since_ms, now_ms)

    def _emit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        self._steps += 1
        self._step_ms.append(result.duration_ms)
        self._step_counts.observe(plan, result.duration_ms)
        now_ms = self._clock.now_ms()
        outputs: list[RequestOutput] = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            sequence = self._scheduler.commit(row, row_result, now_ms)
            if sequence is None:
                continue
            if not row_result.finite:
                message = "The model's output was not finite for this request."
                outputs += self._end(sequence.call, "error", now_ms, "non_finite_logits", message)
            elif row_result.stuck:
                message = (
                    "The schema is too complex: while the answer was written it outgrew its "
                    "bounds. Use simpler patterns."
                )
                outputs += self._end(sequence.call, "error", now_ms, "schema_too_complex", message)
            elif row_result.token_ids:
                outputs.append(self._take_tokens(sequence, row_result, now_ms))
        return outputs

    def _take_tokens(self, sequence: Sequence, result: RowResult, now_ms: float) -> RequestOutput:
        call = sequence.call
        if call.first_token_ms is None:
            call.first_token_ms = now_ms
            self._note_first_token(call)
            self._prompt_tokens += len(call.request.prompt)
        taken: list[int] = []
        finish: FinishReason | None = None
        for token in result.token_ids:
            taken.append(token)
            finish = sequence.append(token)
            if finish is not None:
                break
        call.completion_tokens += len(taken)
        self._completion_tokens += len(taken)
        if finish is not None:
            self._note_finished(sequence, now_ms)
            self._scheduler.remove(sequence)
            self._forget_if_over(call)
        return call.token_event(sequence, taken, result.logprobs, finish, now_ms)

    def _note_first_token(self, call: Call) -> None:
        if (met := call.ttft_met) is not None:
            percentile = call.request.budget.percentile
            self._policy.attainment.first_token(call.tenant, percentile, met=met)

    def _note_finished(self, sequence: Sequence, now_ms: float) -> None:
        """The last token of a choice is due with as many budgets as tokens followed the first."""
        budget, first_ms = sequence.call.request.budget, sequence.first_token_ms
        if budget.tpot_ms is None or first_ms is None or len(sequence.generated) < 2:
            return
        met = now_ms <= first_ms + budget.tpot_ms * (len(sequence.generated) - 1)
        self._policy.attainment.finished(sequence.tenant, budget.percentile, met=met)

    def _give_up(self, steps: list[Step]) -> list[RequestOutput]:
        """A step that failed ends the requests it carried; nobody else's."""
        now_ms = self._clock.now_ms()
        outputs: list[RequestOutput] = []
        for step in steps:
            for call in self._scheduler.undo(step.plan):
                message = "The engine failed while it computed this request."
                outputs += self._end(call, "error", now_ms, "engine_step_failed", message)
        return outputs

    # ------------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest) -> None:
        """Takes in a request, whose events come from `step`.

        Raises RequestRefused or AdapterRefused, and then nothing of the request is kept.
        """
        now_ms = self._clock.now_ms()
        check_request(request, self._description, self._config)
        self._check_room(request)
        prompt_tokens = len(request.prompt)
        adapter_digest = "" if request.adapter is None else request.adapter.digest
        call = Call(
            index=self._arrivals,
            request=request,
            tenant=charged_tenant(request),
            weight=SYSTEM_WEIGHT if request.system else request.weight,
            arrival_ms=now_ms,
            max_tokens=min(
                request.sampling.max_tokens, self._description.context_length - prompt_tokens
            ),
            prefix_seed=prefix_seed(
                self._description.base_digest, adapter_digest, request.cache_salt
            ),
            eos_token_ids=self._eos,
        )
        self._check_size(call)
        self._check_budget(call, now_ms)
        if request.grammar is not None:
            self._begin_grammar(request, request.grammar)
            call.compiling = True
        try:
            self._scheduler.add(call, now_ms)
        except EngineError:
            self._drop_grammar(request)
            raise
        self._arrivals += 1
        self._calls[request.request_id] = call
        if request.deadline_ms is not None:
            self._deadlines.push(_deadline(call), call)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Ends a request, wherever it is, or one choice of it that has begun.

        Its last event comes with the next step; what is over already stays as it is.
        """
        call = self._calls.get(request_id)
        if call is None:
            return
        if choice is None:
            self._outbox += self._end(call, "cancelled", self._clock.now_ms())
            return
        for sequence in [s for s in call.sequences if call.forked and s.choice == choice]:
            self._scheduler.remove(sequence)
            self._forget_if_over(call)
            self._outbox += call.end_events([choice], "cancelled", self._clock.now_ms())

    def forget(self, ref: AdapterRef) -> bool:
        """Erases an adapter: ends its requests, drops it from device, host and prefix cache.

        True once nothing of it is held; False while a load is under way (ask again).
        """
        now_ms = self._clock.now_ms()
        for call in [c for c in self._calls.values() if c.request.adapter == ref]:
            message = "The adapter was deleted while the request ran."
            self._outbox += self._end(call, "error", now_ms, "adapter_deleted", message)
        return self._pool.forget(ref, now_ms)

    def drain(self) -> None:
        """Refuses new requests from now on; those that are here run to their end."""
        self._draining = True

    def _begin_grammar(self, request: GenerateRequest, grammar: Grammar) -> None:
        if self._grammars is None:
            raise RequestRefused(
                "This engine follows no grammars; ask for text.",
                code="grammar_unavailable",
                field="response_format",
            )
        self._grammars.compile(request.request_id, charged_tenant(request), grammar)

    def _drop_grammar(self, request: GenerateRequest) -> None:
        if self._grammars is not None and request.grammar is not None:
            self._grammars.drop(request.request_id)

    def _check_room(self, request: GenerateRequest) -> None:
        if self._draining:
            raise NotStarted(
                "This engine is shutting down; send the request again.", code="draining"
            )
        if request.request_id in self._calls:
            raise RequestRefused(
                "A request of this id is in progress.", code="duplicate_request", field="request_id"
            )
        tenant = charged_tenant(request)
        for waiting, most, whose in (
            (self._scheduler.waiting, self._config.max_waiting, ""),
            (self._scheduler.waiting_of(tenant), self._config.max_waiting_per_tenant, " of yours"),
        ):
            if waiting >= most:
                raise RequestRefused(
                    f"{waiting} requests{whose} wait already, which is the most; try again later.",
                    code="queue_full",
                )

    def _check_size(self, call: Call) -> None:
        """A request must fit into what adapters never take, so that it can always run alone."""
        need = blocks_for(len(call.request.prompt) + call.max_tokens)
        most = self._arena.extents - int(self._arena.extents * self._config.adapter_share)
        if need > most:
            raise RequestRefused(
                f"Prompt and max_tokens need {need} KV blocks; this engine has {most}. "
                "Shorten the prompt or lower max_tokens.",
                code="exceeds_memory",
                field="max_tokens",
            )

    def _check_budget(self, call: Call, now_ms: float) -> None:
        """Refuses at once what could only be late. Raises RequestRefused."""
        if not self._policy.keeps_budgets:
            return
        refusal = refuse_late(
            call,
            self._scheduler.outlook,
            self.step_times,
            self._policy.attainment.margin(call.tenant),
            now_ms,
        )
        if refusal is not None:
            self._policy.attainment.refused(call.tenant, call.request.budget.percentile)
            raise refusal

    def _end(
        self,
        call: Call,
        finish: FinishReason,
        now_ms: float,
        code: str | None = None,
        message: str | None = None,
    ) -> list[RequestOutput]:
        """Ends what is unfinished of a request; the last events of it (none if it is over)."""
        if call.request.request_id not in self._calls:
            return []
        choices = sorted(sequence.choice for sequence in call.sequences)
        if not call.forked:
            choices = list(range(call.request.choices))
        for sequence in list(call.sequences):
            self._scheduler.remove(sequence)
        self._forget_if_over(call)
        return call.end_events(choices, finish, now_ms, code, message)

    def _forget_if_over(self, call: Call) -> None:
        if call.sequences:
            return
        del self._calls[call.request.request_id]
        self._drop_grammar(call.request)
        if call.request.deadline_ms is not None:
            self._deadlines.remove(_deadline(call))

    # ------------------------------------------------------------------ status

    def status(self) -> EngineStatus:
        """Everything that operators and the router are shown. Counts requests, not choices."""
        now_ms = self._clock.now_ms()
        waiting = Counter(call.tenant for call in self._calls.values() if not call.running)
        return EngineStatus(
            engine_id=self._engine_id,
            base_digest=self._description.base_digest,
            uptime_ms=now_ms - self._started_ms,
            running=len(self._calls) - waiting.total(),
            waiting=waiting.total(),
            waiting_by_tenant=dict(waiting),
            steps=self._steps,
            step_ms_p50=statistics.median(self._step_ms) if self._step_ms else 0.0,
            kv_blocks_used=self._blocks.referenced,
            kv_blocks_cached=self._blocks.cached,
            extents_total=self._arena.extents,
            extent_bytes=self._description.kv_block_bytes,
            device_adapter_bytes=self._pool.device_bytes(),
            host_adapter_bytes=self._pool.host_bytes,
            host_budget_bytes=self._config.host_cache_bytes,
            adapters=self._pool.residency(now_ms),
            prompt_tokens_total=self._prompt_tokens,
            completion_tokens_total=self._completion_tokens,
            preemptions_total=self._scheduler.preemptions,
            draining=self._draining,
            attainment=self._policy.attainment.counts(),
            step_counts=self._step_counts.counts(),
            loads_total=self._pool.loads,
            resident=self._pool.by_tenant(),
            evictions_total=self._pool.evictions,
        )


def _deadline(call: Call) -> tuple[float, int]:
    """When the request must have started, on the engine's clock; unique by its index."""
    remaining_ms = call.request.deadline_ms
    if remaining_ms is None:
        raise AssertionError("a request without a deadline has no place among the deadlines")
    return (call.arrival_ms + remaining_ms, call.index)
