"""What a request that arrives now finds: what waits, what runs, what will overtake it.

It keeps count of what waits, of what has been arriving, and of how long answers are; a prediction
is made of it by `engine/forecast.py`, a verdict by `engine/admission.py`.
"""

from engine.adapters.pool import AdapterPool
from engine.arrivals import NONE, Arrivals, Overtaking, Question
from engine.backlog import Backlogs
from engine.config import EngineConfig
from engine.forecast import AnswerLength, Standing
from engine.kv_blocks import KvBlocks, blocks_for
from engine.policy import OUTPUT_COST, Policy
from engine.request import Call, Sequence
from engine.running import Running
from engine.step_budget import Commitments
from engine.step_time import StepShape, StepTimes


class Outlook:
    """`backlogs`: the requests of which nothing has run yet, by tenant."""

    def __init__(
        self,
        config: EngineConfig,
        running: Running,
        blocks: KvBlocks,
        pool: AdapterPool,
        policy: Policy,
        times: StepTimes,
    ) -> None:
        self._config = config
        self._running = running
        self._blocks = blocks
        self._pool = pool
        self._policy = policy
        self._times = times
        self.backlogs = Backlogs(policy)
        self._arrivals = Arrivals(policy)
        self._answers = AnswerLength()

    # ------------------------------------------------------------------ what it is told

    def arrived(self, call: Call, now_ms: float) -> None:
        """A request was taken in, and waits."""
        prompt = len(call.request.prompt)
        self.backlogs.add(call.tenant, call.weight, prompt, now_ms, hurried=_hurried(call))
        self._arrivals.add(call.tenant, call.weight, prompt, now_ms)

    def waits_no_more(self, call: Call) -> None:
        """The request has started, or left before it could."""
        prompt, started = len(call.request.prompt), call.admitted_ms is not None
        self.backlogs.take(call.tenant, prompt, hurried=_hurried(call), started=started)

    def ended(self, sequence: Sequence) -> None:
        """An answer is over; those of probes say nothing."""
        if sequence.generated and not sequence.call.request.system:
            self._answers.observe(len(sequence.generated))

    # ------------------------------------------------------------------ what it says

    def standing(self, call: Call, now_ms: float, *, everybody: bool = False) -> Standing:
        """What stands between a new request and its first token.

        `everybody`: all that waits is counted as before it, which is quick to say; otherwise only
        what the policy serves first.
        """
        prompt = len(call.request.prompt)
        running = self._running
        demand = running.demand()
        answer_tokens = self._answers.expected(running.drawn_tokens)
        free = self._config.max_running - running.places
        blocks_each = blocks_for(prompt + int(answer_tokens))
        free = min(free, (self._blocks.available - demand.blocks) // max(1, blocks_each))
        if running and demand.breaks_a_budget(Sequence(0, call, 0), self._times):
            free = 0
        if everybody or not self._policy.keeps_budgets:
            ahead = self.backlogs.everything()
        else:
            ahead = self.backlogs.before(call.tenant, call.weight, prompt, answer_tokens)
        decodes = _decodes(demand.commitments)
        adapter = call.request.adapter
        chunk = self._usual_chunk(decodes, demand.commitments)
        token_ms = self._times.mean_ms(decodes.with_chunk(0, chunk)) / chunk
        prefilling = (s.pending for s in running.sequences.values() if s.pending > 1)
        return Standing(
            ahead=ahead,
            prefilling_tokens=sum(prefilling),
            own_tokens=prompt,
            free_places=max(0, free),
            decodes=decodes,
            chunk=chunk,
            own_turn_ms=self.backlogs.own_turn_ms(call.tenant, prompt, now_ms, token_ms),
            answer_tokens=answer_tokens,
            adapter_ms=0.0 if adapter is None else self._pool.expected_ms(adapter),
            overtaking=self._overtaking(call, now_ms, token_ms, answer_tokens),
            percentile=call.request.budget.percentile,
        )

    def smallest_step_ms(self, call: Call) -> float:
        """A decode of the request alone, with half of its answer: no step can be shorter."""
        context = len(call.request.prompt) + call.max_tokens // 2
        return self._times.mean_ms(StepShape().with_decode(context))

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


def _hurried(call: Call) -> bool:
    return call.request.budget.ttft_ms is not None


def _decodes(commitments: Commitments) -> StepShape:
    """A step of everything that runs, if all of it were decodes."""
    loose, firm = commitments.loose.shape(), commitments.firm.shape()
    return StepShape(
        0,
        loose.decode_rows + firm.decode_rows,
        loose.kv_tokens + firm.kv_tokens,
        0,
        loose.adapter_bytes + firm.adapter_bytes,
    )
