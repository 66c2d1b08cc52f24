"""The two seams of the engine as plain data: messages between processes, and the step.

    api ──GenerateRequest──> EngineCore ──StepPlan──> Executor
    api <──RequestOutput──── EngineCore <─StepResult─ Executor

Nothing here imports torch; every type can be written as msgpack. Token ids are ints, times are
milliseconds, sizes are bytes.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

PROTOCOL_VERSION = 2
BLOCK_TOKENS = 16
"""Tokens in one KV block."""

LAYER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of one transformer block that an adapter may change, in the order of the forward."""
EDGE_TARGETS = ("embed_tokens", "lm_head")
"""The modules outside the blocks that an adapter may change."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


# --------------------------------------------------------------------------- the base model


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module that an adapter may target. `norm` is the Frobenius norm of its weight.

    `sketch` (engine/adapters/sketch.py) tells whether a weight that somebody stored beside an
    adapter is this one; the loader fills it for embed_tokens and lm_head. Empty: not known.
    """

    name: str  # "model.layers.3.self_attn.q_proj", "model.embed_tokens", "lm_head"
    target: str  # "q_proj"
    layer: int  # -1 outside the blocks
    in_features: int  # an embedding's is the vocabulary
    out_features: int
    norm: float
    sketch: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `engine.describe()` answers; adapters, routing and /v1/models key on `base_digest`."""

    name: str
    architecture: str
    base_digest: str
    tokenizer_digest: str
    modules: tuple[ModuleSpec, ...]  # an adapter blob names modules by their index here
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    max_rank: int
    eos_token_ids: tuple[int, ...]
    kv_block_bytes: int
    adapter_dtype: Literal["bf16", "fp32"]
    backend: str


# --------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One tenant's adapter: `salt` is opaque and per tenant, so tenants share nothing by digest."""

    salt: str
    digest: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Random numbers depend only on (seed, choice, position)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; k: the drawn token's and the k most likely
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def remembers(self) -> bool:
        """Whether a draw looks at the tokens before it, beside what the model made of them."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class LatencyBudget:
    """What the tenant was promised; None means no promise, not zero."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percentile: float = 0.95


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """Bytes of a tenant's adapters in each tier (device, host): at most, and kept from others."""

    most: int | None = None  # no limit
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a JSON schema as JSON, or a grammar in llguidance's Lark."""

    kind: Literal["json_schema", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call as the engine sees it: no names, no text, no credentials."""

    request_id: str
    tenant: str  # opaque; fairness and quarantine key on it
    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str  # seeds the prefix-cache chain with the base and adapter digests
    adapter: AdapterRef | None = None
    choices: int = 1
    weight: float = 1.0
    budget: LatencyBudget = LatencyBudget()
    resident: ResidentBytes = ResidentBytes()
    deadline_ms: float | None = None  # remaining, counted from receipt
    waited_ms: float = 0.0  # from the last byte at the gateway until it was sent on
    prompt_logprobs: int | None = None  # k most likely at every prompt position (validation)
    system: bool = False  # a validation probe: charged to the system's share
    grammar: Grammar | None = None  # of every choice
    traceparent: str | None = None  # W3C trace context of the gateway's span


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The engine's own counts. Sent once, with the last output of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # over all choices
    queue_ms: float
    adapter_wait_ms: float
    ttft_ms: float | None
    total_ms: float
    preemptions: int = 0
    prefill_ms: float = 0.0  # its part of the steps' time (engine/attribution.py)
    decode_ms: float = 0.0
    adapter_byte_seconds: float = 0.0  # while it pinned its adapter


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One event of a request. `sequence` counts from 0 without gaps; a gap means a lost message."""

    request_id: str
    sequence: int
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None  # of this choice
    stop_token: int | None = None  # the stop token that ended the choice (not among token_ids)
    usage: RequestUsage | None = None  # set on the last event of the request, and only there
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Token counts of one request as the engine last wrote them to disk."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    finish: FinishReason | None
    wall_ms: int
    cached_tokens: int = 0  # these are known once the request has ended
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    adapter_byte_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Residency:
    """Where one adapter is held."""

    adapter: AdapterRef
    tier: Literal["device", "host", "loading", "quarantined"]
    nbytes: int
    pins: int


@dataclass(frozen=True, slots=True)
class TenantResidency:
    """Bytes of one tenant's adapters, and what it was promised."""

    device_bytes: int
    host_bytes: int
    most_bytes: int | None
    reserved_bytes: int  # as far as the device keeps it


STEP_BOUNDS_MS = (2.0, 5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
"""Upper bounds of the buckets in which steps are counted by their time."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Sums over all steps since the engine started."""

    buckets: list[int] = field(default_factory=list)  # by STEP_BOUNDS_MS, and one above; not summed
    ms: float = 0.0
    decode_rows: int = 0  # of one token each
    prefill_rows: int = 0
    prefill_tokens: int = 0
    adapter_rows: int = 0  # rows of either kind that run with an adapter
    adapters: int = 0  # different adapters, added up over the steps


@dataclass(frozen=True, slots=True)
class TenantAttainment:
    """Requests with a budget that kept it and that did not, since the engine started.

    `margin`: what a predicted wait is multiplied with before it is held against the budget.
    """

    ttft_met: int
    ttft_missed: int
    tpot_met: int
    tpot_missed: int
    refused: int  # at once, because the budget could not have been kept
    margin: float


@dataclass(frozen=True, slots=True)
class EngineStatus:
    engine_id: str  # new at every start
    base_digest: str
    uptime_ms: float
    running: int
    waiting: int
    waiting_by_tenant: dict[str, int]
    steps: int
    step_ms_p50: float
    kv_blocks_used: int
    kv_blocks_cached: int  # unreferenced, kept for their prefix
    extents_total: int
    extent_bytes: int
    device_adapter_bytes: int
    host_adapter_bytes: int
    host_budget_bytes: int
    adapters: list[Residency]
    prompt_tokens_total: int
    completion_tokens_total: int
    preemptions_total: int
    draining: bool
    attainment: dict[str, TenantAttainment] = field(default_factory=dict)  # the rest is "other"
    held: bool = False  # drained by an operator's call, which `resume` takes back
    step_counts: StepCounts = StepCounts()
    loads_total: int = 0  # adapters read from the store
    resident: dict[str, TenantResidency] = field(default_factory=dict)  # by tenant
    evictions_total: int = 0  # adapters that left the device for another one or for KV blocks


# --------------------------------------------------------------------------- the step


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """Introduces a sequence to the executor (also after preemption, with what it had generated)."""

    seq: int
    prompt: list[int]
    generated: list[int]
    sampling: SamplingParams
    choice: int
    grammar: str | None = None  # the request under which the engine's grammars know its own


PENDING = -1
"""In a row's `tokens`: the one that the step before this draws for the sequence. Only an executor
that launches a step while another runs takes it (`engine.cuda.runner`)."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's part of the step: a decode has one token, a prefill chunk several."""

    seq: int
    start: int  # position of tokens[0]
    tokens: list[int]
    new_blocks: list[int]  # appended to this sequence's block table since its last row
    slot: int  # adapter slot, -1 for the base model alone
    sample: bool  # draw a token after the last position
    prompt_logprobs: int | None = None  # k most likely after each of `tokens`


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the executor applies closed, started, copies, then runs the rows as one batch."""

    step: int
    closed: list[int]
    started: list[SequenceStart]
    copies: list[tuple[int, int]]  # block (source, destination): copy-on-write
    rows: list[PlanRow]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row brought back; `finite` is False when a logit was not a finite number.

    `stuck` is True when its grammar outgrew its bounds: no token was drawn, and none can be.
    """

    seq: int
    token_ids: list[int]  # 0..k
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # entry i: after tokens[i]
    finite: bool = True
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    rows: list[RowResult]  # in the plan's order
    duration_ms: float


# --------------------------------------------------------------------------- adapters in memory


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One LoRA pair inside a blob: A [rank, in] at `a_offset`, B [out, rank] at `b_offset` (bytes).

    For `embed_tokens`, A is stored [vocab, rank] (a row a token) and B [hidden, rank].
    """

    module: int  # index into ModelDescription.modules
    rank: int
    scale: float
    a_offset: int
    b_offset: int


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Where everything lies inside an adapter's one buffer. Absent modules have rank 0."""

    modules: tuple[AdapterModule, ...]
    dtype: Literal["bf16", "fp32"]
    max_rank: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AdapterBlob:
    """An adapter in host memory, ready to be copied to the device in one transfer."""

    layout: AdapterLayout
    data: np.ndarray  # uint8 [nbytes], 64-byte aligned offsets inside


class Executor(Protocol):
    """Runs steps. One byte arena of `extent_count` extents holds KV blocks and adapters.

    KV block b is extent b. An adapter occupies consecutive extents from `first_extent`.
    """

    @property
    def description(self) -> ModelDescription: ...

    @property
    def extent_count(self) -> int: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; blocks until its tokens are known."""
        ...

    def start_copy(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        """Begins to copy an adapter to the device; usable once `poll_copies` names the slot."""
        ...

    def poll_copies(self, max_bytes: int) -> list[int]:
        """Moves copies on by at most `max_bytes` (CPU) or polls events (CUDA): slots now usable."""
        ...

    def move_adapter(self, slot: int, first_extent: int) -> None:
        """Moves an idle adapter inside the arena (ranges may overlap)."""
        ...

    def drop_adapter(self, slot: int) -> None:
        """Forgets a slot, complete or not. Its extents may be reused at once."""
        ...


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """An executor whose `execute` has two halves, so that the host works while the device does.

    At most two steps are launched and not collected; they are collected in their order.
    """

    def launch(self, plan: StepPlan) -> None:
        """Begins a step and returns. Its rows may take PENDING tokens of the step before."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step in flight; blocks until its tokens are known."""
        ...

    def abandon(self) -> None:
        """Forgets the steps in flight, after one of them failed."""
        ...
