"""A fake executor and a fake loader: the engine without tensors, on a simulated clock.

The executor plays the GPU strictly. Every KV cell remembers the whole history that it stands for
(adapter, prompt and position), so a row that would read another sequence's cell, a stale one or an
unwritten one fails at once. The token drawn is a function of that history and the choice alone:
whatever happened to a request on its way, it must say the same.
"""

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.adapters.loading import Loaded, LoadEvent, LoadFailed, Measured
from engine.arena import Span
from engine.clock import SimulatedClock
from engine.config import EngineConfig
from engine.types import (
    BLOCK_TOKENS,
    AdapterBlob,
    AdapterLayout,
    AdapterModule,
    AdapterRef,
    ModelDescription,
    ModuleSpec,
    PlanRow,
    RowResult,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

EXTENT_BYTES = 1024
EOS = 1
VOCAB = 1000


def describe(
    *, context_length: int = 4096, base_digest: str = "base", max_rank: int = 64
) -> ModelDescription:
    """A model of one module."""
    return ModelDescription(
        name="fake",
        architecture="fake",
        base_digest=base_digest,
        tokenizer_digest="tokenizer",
        modules=(ModuleSpec("model.layers.0.self_attn.q_proj", "q_proj", 0, 8, 8, 1.0),),
        layers=1,
        hidden_size=8,
        vocab_size=VOCAB,
        context_length=context_length,
        max_rank=max_rank,
        eos_token_ids=(EOS,),
        kv_block_bytes=EXTENT_BYTES,
        adapter_dtype="bf16",
        backend="fake",
    )


def engine_config(**changes: object) -> EngineConfig:
    """The defaults, with the settings that a test names."""
    return EngineConfig(Path("model.gguf"), **changes)  # type: ignore[arg-type]


def adapter_history(blob: AdapterBlob) -> bytes:
    """What a KV cell remembers of the adapter it was computed with."""
    return hashlib.sha256(blob.data.tobytes()).digest()


def next_cell(previous: bytes, token: int) -> bytes:
    """The cell after `previous`; the first one follows the adapter's history (b"" for none)."""
    return hashlib.sha256(previous + token.to_bytes(4, "little")).digest()


def drawn_token(history: bytes, choice: int) -> int:
    """The token that follows a history; never the end of the text."""
    number = int.from_bytes(hashlib.sha256(history + bytes([choice])).digest()[:4], "little")
    return 2 + number % (VOCAB - 2)


def expected_tokens(
    prompt: list[int], count: int, *, blob: AdapterBlob | None = None, choice: int = 0
) -> list[int]:
    """What a request must answer, alone or among others."""
    cell = b"" if blob is None else adapter_history(blob)
    for token in prompt:
        cell = next_cell(cell, token)
    answer = []
    for _ in range(count):
        answer.append(drawn_token(cell, choice))
        cell = next_cell(cell, answer[-1])
    return answer


@dataclass
class _Copy:
    slot: int
    first: int
    blob: AdapterBlob
    left: int


@dataclass
class _Live:
    start: SequenceStart
    tokens: list[int]  # prompt, then everything drawn
    blocks: list[int] = field(default_factory=list)
    cells: list[bytes] = field(default_factory=list)  # [i]: after i tokens


class FakeExecutor:
    """An Executor that checks every plan and remembers every step.

    `script(seq_start, position)` may choose the token at a position instead (None: as usual).
    `step_ms` is what a step takes, or a function of its plan.
    """

    def __init__(
        self,
        extents: int = 64,
        *,
        description: ModelDescription | None = None,
        clock: SimulatedClock | None = None,
        step_ms: float | Callable[[StepPlan], float] = 10.0,
        script: Callable[[SequenceStart, int], int | None] | None = None,
    ) -> None:
        self._description = description or describe()
        self._extents = extents
        self._clock = clock
        self._step_ms = step_ms
        self._script = script
        self._cells: dict[tuple[int, int], bytes] = {}
        self._copies: list[_Copy] = []
        self._adapters: dict[int, tuple[Span, AdapterBlob]] = {}
        self.live: dict[int, _Live] = {}
        self.plans: list[StepPlan] = []
        self.copied_bytes = 0
        self.fail_on: Callable[[StepPlan], bool] = lambda _: False
        self.refuse_copy: Callable[[AdapterBlob], bool] = lambda _: False
        self.stuck: Callable[[SequenceStart, int], bool] = lambda *_: False
        self.not_finite: Callable[[SequenceStart], bool] = lambda _: False

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def extent_count(self) -> int:
        return self._extents

    # ------------------------------------------------------------------ steps

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        took_ms = self._step_ms(plan) if callable(self._step_ms) else self._step_ms
        if self._clock is not None:
            self._clock.advance(took_ms)
        if self.fail_on(plan):
            raise RuntimeError("the device failed")
        for seq in plan.closed:
            self.live.pop(seq, None)
        for start in plan.started:
            assert start.seq not in self.live, "a sequence is started once"
            self.live[start.seq] = _Live(start, start.prompt + start.generated)
        assert len({destination for _, destination in plan.copies}) == len(plan.copies)
        for source, destination in plan.copies:
            for offset in range(BLOCK_TOKENS):
                self._cells.pop((destination, offset), None)
                cell = self._cells.get((source, offset))
                if cell is not None:
                    self._cells[destination, offset] = cell
        for row in plan.rows:
            self.live[row.seq].blocks += row.new_blocks
        self._check_blocks(plan)
        results = [self._run(row) for row in plan.rows]
        return StepResult(plan.step, results, took_ms)

    def _run(self, row: PlanRow) -> RowResult:
        live = self.live[row.seq]
        start, end = row.start, row.start + len(row.tokens)
        assert row.tokens == live.tokens[start:end], "the executor knows every token"
        if not live.cells:
            live.cells = [b"" if row.slot < 0 else adapter_history(self._usable(row.slot))]
        while len(live.cells) <= end:
            live.cells.append(next_cell(live.cells[-1], live.tokens[len(live.cells) - 1]))
        for position in range(start):
            assert self._cells.get(self._at(live, position)) == live.cells[position + 1], (
                f"sequence {row.seq} reads a foreign cell at position {position}"
            )
        logprobs = []
        for position in range(start, end):
            self._cells[self._at(live, position)] = live.cells[position + 1]
            if row.prompt_logprobs is not None:
                following = [*live.start.prompt, 0][position + 1]
                logprobs.append(TokenLogprobs(following, -1.0, [(following, -1.0)]))
        if not row.sample:
            return RowResult(row.seq, [], prompt_logprobs=logprobs or None)
        if self.stuck(live.start, end):
            return RowResult(row.seq, [], stuck=True)
        token = None if self._script is None else self._script(live.start, end)
        if token is None:
            token = drawn_token(live.cells[end], live.start.choice)
        live.tokens.append(token)
        wants_logprobs = live.start.sampling.logprobs is not None
        return RowResult(
            row.seq,
            [token],
            logprobs=[TokenLogprobs(token, -0.5, [])] if wants_logprobs else None,
            prompt_logprobs=logprobs or None,
            finite=not self.not_finite(live.start),
        )

    @staticmethod
    def _at(live: _Live, position: int) -> tuple[int, int]:
        return live.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS

    def _check_blocks(self, plan: StepPlan) -> None:
        """What a row writes is nobody else's, and no adapter's."""
        for row in plan.rows:
            blocks = self.live[row.seq].blocks
            first, last = row.start // BLOCK_TOKENS, (row.start + len(row.tokens) - 1)
            for block in blocks[first : last // BLOCK_TOKENS + 1]:
                for seq, other in self.live.items():
                    assert seq == row.seq or block not in other.blocks, "a shared block is written"
            for span in self.spans():
                for block in blocks:
                    assert not span.first <= block < span.end, "a block lies inside an adapter"

    # ------------------------------------------------------------------ adapters

    def start_copy(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        if self.refuse_copy(blob):
            raise RuntimeError("the blob cannot be copied")
        assert slot not in self._adapters, "a slot holds one adapter"
        span = self._span(first_extent, blob)
        self._require_free(span)
        self._adapters[slot] = (span, blob)
        self._copies.append(_Copy(slot, first_extent, blob, blob.layout.nbytes))

    def poll_copies(self, max_bytes: int) -> list[int]:
        done = []
        while self._copies and max_bytes > 0:
            copy = self._copies[0]
            moved = min(copy.left, max_bytes)
            copy.left -= moved
            max_bytes -= moved
            self.copied_bytes += moved
            if copy.left == 0:
                done.append(copy.slot)
                self._copies.pop(0)
        return done

    def move_adapter(self, slot: int, first_extent: int) -> None:
        _, blob = self._adapters.pop(slot)
        span = self._span(first_extent, blob)
        self._require_free(span)
        self._adapters[slot] = (span, blob)

    def drop_adapter(self, slot: int) -> None:
        self._adapters.pop(slot, None)
        self._copies = [copy for copy in self._copies if copy.slot != slot]

    def spans(self) -> list[Span]:
        return [span for span, _ in self._adapters.values()]

    def _usable(self, slot: int) -> AdapterBlob:
        assert all(copy.slot != slot for copy in self._copies), "an adapter is used half copied"
        return self._adapters[slot][1]

    def _span(self, first: int, blob: AdapterBlob) -> Span:
        return Span(first, -(-blob.layout.nbytes // EXTENT_BYTES))

    def _require_free(self, span: Span) -> None:
        assert span.first >= 0
        assert span.end <= self._extents
        assert not any(span.overlaps(other) for other in self.spans()), "adapters overlap"


@dataclass(frozen=True)
class FakeAdapter:
    """What the store would hold."""

    extents: int = 1
    rank: int = 8
    load_ms: float = 0.0
    fails: LoadFailed | None = None


class FakeLoader:
    """A Loader over a dict; everything takes `load_ms` of the simulated clock."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, LoadEvent]] = []
        self._count = 0
        self.adapters: dict[AdapterRef, FakeAdapter] = {}
        self.planned: set[AdapterRef] = set()
        self.measured: list[AdapterRef] = []
        self.built: list[AdapterRef] = []
        self.most_at_once = 0

    def add(self, name: str, salt: str = "aa", **values: object) -> AdapterRef:
        """Stores an adapter under sha256(name)."""
        ref = AdapterRef(salt, hashlib.sha256(name.encode()).hexdigest())
        self.adapters[ref] = FakeAdapter(**values)  # type: ignore[arg-type]
        return ref

    def blob(self, ref: AdapterRef) -> AdapterBlob:
        adapter = self.adapters[ref]
        nbytes = adapter.extents * EXTENT_BYTES
        data = np.zeros(nbytes, dtype=np.uint8)
        seed = np.frombuffer((ref.salt + ref.digest).encode(), dtype=np.uint8)
        data[: len(seed)] = seed
        modules = (AdapterModule(0, adapter.rank, 1.0, 0, nbytes // 2),)
        return AdapterBlob(AdapterLayout(modules, "bf16", adapter.rank, nbytes), data)

    def measure(self, ref: AdapterRef) -> None:
        self.measured.append(ref)
        adapter = self.adapters.get(ref)
        if adapter is None:
            failure = LoadFailed(ref, "adapter_missing", "No such adapter.", transient=True)
            self._later(0.0, failure)
        elif adapter.fails is not None:
            self._later(adapter.load_ms, adapter.fails)
        else:
            self.planned.add(ref)
            nbytes = adapter.extents * EXTENT_BYTES
            self._later(adapter.load_ms / 2, Measured(ref, nbytes, adapter.rank))

    def build(self, ref: AdapterRef) -> None:
        self.planned.remove(ref)
        self.built.append(ref)
        self._later(self.adapters[ref].load_ms / 2, Loaded(ref, self.blob(ref)))

    def abandon(self, ref: AdapterRef) -> None:
        self.planned.discard(ref)

    def poll(self) -> list[LoadEvent]:
        events = []
        while self._due and self._due[0][0] <= self._clock.now_ms():
            events.append(heapq.heappop(self._due)[2])
        return events

    def close(self) -> None:
        self._due.clear()

    def _later(self, delay_ms: float, event: LoadEvent) -> None:
        self._count += 1
        heapq.heappush(self._due, (self._clock.now_ms() + delay_ms, self._count, event))
        self.most_at_once = max(self.most_at_once, len(self._due))
