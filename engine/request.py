"""One call inside the engine: its sequences, its stop rules, its counts, its stream of events."""

import math
from dataclasses import dataclass, field
from enum import Enum

from engine.attribution import Cost
from engine.kv_blocks import block_hash
from engine.policy import SYSTEM_TENANT, URGENT_TOKENS
from engine.types import (
    BLOCK_TOKENS,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    RequestUsage,
    TokenLogprobs,
)


class SequenceState(Enum):
    WAITING = "waiting"  # could run as far as its adapter is concerned
    LOADING = "loading"  # its adapter is on its way
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: what is computed, what is generated, which blocks hold it.

    Of the `length` tokens (prompt, then generated) the first `computed` have their KV in `blocks`.
    After a preemption nothing is computed and everything generated so far is kept.
    """

    seq: int
    call: "Call"
    choice: int
    generated: list[int] = field(default_factory=list)
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    charged: int = 0  # positions that were paid for; a recomputation is free
    blocks: list[int] = field(default_factory=list)
    announced_blocks: int = 0  # of `blocks`, those the executor knows
    registered: int = 0  # of `blocks`, those offered to the prefix cache
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks, as far as needed
    started: bool = False  # whether the executor knows it
    slot: int = -1  # of its adapter while it runs; -1 for the base model alone
    rank: int = 0  # of its adapter
    adapter_bytes: int = 0  # of its adapter while it runs
    preemptions: int = 0
    first_token_ms: float | None = None
    last_token_ms: float = 0.0
    skipped: int = 0  # steps in a row that went without its decode
    turn_ms: float = 0.0  # its place among its tenant's; see engine/waiting.py
    urgent_ms: float = math.inf
    lost_ms: float = math.inf
    patience_ms: float = 0.0  # the turn of one without a budget
    prompt_tokens: int = field(init=False)
    length: int = field(init=False)  # of prompt and generated; read some thousand times a step
    tpot_ms: float | None = field(init=False)  # its budget

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.call.request.prompt)
        self.length = self.prompt_tokens + len(self.generated)
        self.tpot_ms = self.call.request.budget.tpot_ms

    @property
    def order(self) -> tuple[int, int]:
        """Arrival of the request, then the choice; a preempted sequence keeps its place."""
        return (self.call.index, self.choice)

    @property
    def tenant(self) -> str:
        return self.call.tenant

    @property
    def arrival_ms(self) -> float:
        return self.call.arrival_ms

    def turn_by_first_token(
        self, patience_ms: float, prefill_ms: float, urgent_share: float
    ) -> None:
        """Its place by the time to its first token: when it would have to start at the latest.

        `prefill_ms`: what its prompt takes. One without a budget is as patient as `patience_ms`.
        """
        self.turn_ms = self.patience_ms = self.arrival_ms + patience_ms
        request = self.call.request
        ttft_ms = request.budget.ttft_ms
        if ttft_ms is None:
            return
        due_ms = self.arrival_ms - request.waited_ms + ttft_ms
        self.turn_ms = self.lost_ms = due_ms - prefill_ms
        self.urgent_ms = self.lost_ms - urgent_share * ttft_ms

    def turn_by_next_token(self) -> None:
        """Its place when it was set aside after its first token: when its next one is due.

        It is never lost: what is left of its budget is by token.
        """
        if self.first_token_ms is None:
            return
        self.give_up_hurry()
        if self.tpot_ms is not None:
            self.turn_ms = self.first_token_ms + self.tpot_ms * len(self.generated)
            self.urgent_ms = self.turn_ms - URGENT_TOKENS * self.tpot_ms

    def turn_like(self, leader: "Sequence") -> None:
        """The place of the choice that it branches off; never lost, for a first token is out."""
        self.turn_ms, self.patience_ms = leader.turn_ms, leader.patience_ms
        self.urgent_ms = leader.urgent_ms

    def give_up_hurry(self) -> None:
        """Its first token will be late whatever is done: no longer before others' that need not."""
        self.turn_ms = max(self.turn_ms, self.patience_ms)
        self.urgent_ms = self.lost_ms = math.inf

    def gap_ms(self, now_ms: float) -> float:
        """How long the next step may take for this decode; infinite without a budget.

        Token k is due k budgets after the first. One that is behind may catch up in steps of half
        its budget; one that is ahead still gets no longer gap than its budget.
        """
        tpot_ms = self.tpot_ms
        if tpot_ms is None or self.first_token_ms is None:
            return math.inf
        due_ms = self.first_token_ms + tpot_ms * len(self.generated)
        return min(tpot_ms - (now_ms - self.last_token_ms), max(due_ms - now_ms, 0.5 * tpot_ms))

    @property
    def places(self) -> int:
        """Places among the running that it takes, choices that will branch off included."""
        return 1 if self.call.forked else self.call.request.choices

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.call.request.prompt_logprobs is not None and not self.call.forked

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 is a decode."""
        return self.length - self.computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions [start, end)."""
        prompt = self.call.request.prompt
        if start >= len(prompt):
            return self.generated[start - len(prompt) : end - len(prompt)]
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + self.generated[: end - len(prompt)]

    def block_hashes(self, count: int) -> list[bytes]:
        """The chain of the first `count` full blocks."""
        while len(self.hashes) < count:
            first = len(self.hashes) * BLOCK_TOKENS
            previous = self.hashes[-1] if self.hashes else self.call.prefix_seed
            self.hashes.append(block_hash(previous, self.tokens(first, first + BLOCK_TOKENS)))
        return self.hashes[:count]

    def append(self, token: int) -> FinishReason | None:
        """Takes a drawn token by the stop rules; what it finished, if anything."""
        sampling = self.call.request.sampling
        drawn_before = len(self.generated)
        self.generated.append(token)
        self.length += 1
        if drawn_before >= sampling.min_tokens and self.call.stops_at(token):
            return "stop"
        if len(self.generated) >= self.call.max_tokens:
            return "length"
        return None


def charged_tenant(request: GenerateRequest) -> str:
    """Who is charged for a request."""
    return SYSTEM_TENANT if request.system else request.tenant


@dataclass(slots=True, eq=False)
class Call:
    """A request and everything the engine remembers about it."""

    index: int  # in the order of arrival
    request: GenerateRequest
    tenant: str  # who is charged
    weight: float
    arrival_ms: float
    max_tokens: int  # of one choice: what was asked for, as far as the context allows
    prefix_seed: bytes
    eos_token_ids: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)  # those not finished
    forked: bool = False
    emitted: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    admitted_ms: float | None = None
    adapter_ready_ms: float | None = None
    first_token_ms: float | None = None
    cost: Cost = field(default_factory=Cost)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs_due: bool = False
    compiling: bool = False  # its grammar is on its way

    @property
    def ttft_met(self) -> bool | None:
        """Whether the first token came in time; None without a budget or a token."""
        ttft_ms = self.request.budget.ttft_ms
        if ttft_ms is None or self.first_token_ms is None:
            return None
        return self.first_token_ms - self.arrival_ms + self.request.waited_ms <= ttft_ms

    @property
    def foreseeable(self) -> bool:
        """Whether a decode of it can begin before the token that it takes is known here."""
        request = self.request
        return self.forked and request.grammar is None and not request.sampling.remembers

    @property
    def waiting(self) -> bool:
        """Whether nothing of it has run yet."""
        return self.admitted_ms is None

    @property
    def running(self) -> bool:
        return any(sequence.state is SequenceState.RUNNING for sequence in self.sequences)

    def stops_at(self, token: int) -> bool:
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            return True
        return token in self.eos_token_ids and not sampling.ignore_eos

    def usage(self, now_ms: float) -> RequestUsage:
        """What the request has used so far; waits are counted from receipt."""
        ready_ms = now_ms if self.adapter_ready_ms is None else self.adapter_ready_ms
        admitted_ms = now_ms if self.admitted_ms is None else self.admitted_ms
        first_ms = self.first_token_ms
        return RequestUsage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_ms=admitted_ms - self.arrival_ms,
            adapter_wait_ms=ready_ms - self.arrival_ms,
            ttft_ms=None if first_ms is None else first_ms - self.arrival_ms,
            total_ms=now_ms - self.arrival_ms,
            preemptions=self.preemptions,
            prefill_ms=self.cost.prefill_ms,
            decode_ms=self.cost.decode_ms,
            adapter_byte_seconds=self.cost.adapter_byte_seconds,
        )

    def token_event(
        self,
        sequence: Sequence,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        now_ms: float,
    ) -> RequestOutput:
        """The event of one step of one choice. A stop token is counted but is no output."""
        stop_token = tokens[-1] if finish == "stop" else None
        shown = len(tokens) - (stop_token is not None)
        prompt_logprobs = None
        if self.prompt_logprobs_due and sequence.choice == 0:
            prompt_logprobs = self.prompt_logprobs
            self.prompt_logprobs_due = False
        self.emitted += 1
        return RequestOutput(
            self.request.request_id,
            self.emitted - 1,
            sequence.choice,
            tokens if stop_token is None else tokens[:shown],
            None if logprobs is None else logprobs[:shown],
            prompt_logprobs,
            finish,
            stop_token,
            None if self.sequences else self.usage(now_ms),
        )

    def end_events(
        self,
        choices: list[int],
        finish: FinishReason,
        now_ms: float,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> list[RequestOutput]:
        """The last events of the choices that an error or a cancellation ends."""
        last = len(choices) - 1 if not self.sequences else None  # nothing else of it runs
        return [
            self._event(
                choice=choice,
                finish=finish,
                usage=self.usage(now_ms) if index == last else None,
                error_code=error_code,
                error_message=error_message,
            )
            for index, choice in enumerate(choices)
        ]

    def _event(self, **values: object) -> RequestOutput:
        event = RequestOutput(self.request.request_id, self.emitted, **values)  # type: ignore[arg-type]
        self.emitted += 1
        return event
