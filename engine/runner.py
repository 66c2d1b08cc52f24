"""The CPU executor: turns a StepPlan into one forward pass and drawn tokens.

It owns the arena, the model and what it knows of each sequence (its block table); which sequence
runs when, and which block or slot is whose, is decided before the plan arrives.
"""

import itertools
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.adapter_copies import AdapterCopies
from engine.clock import Clock, SystemClock
from engine.config import EngineConfig
from engine.grammar import MatcherSource
from engine.kernels.lora import open_lora
from engine.kernels.metadata import LoraBatch
from engine.model.attention import QueryChunk
from engine.model.description import describe, identify
from engine.model.kv_cache import KvCache, KvDtype, block_bytes
from engine.model.linear import bf16_is_fast, choose_path, make_rows_stable
from engine.model.llama import Llama, StepBatch
from engine.model.loader import Checkpoint, open_checkpoint
from engine.native.build import Library
from engine.native.choose import native_library
from engine.sampler import Sampled, Sampler, finite_rows, prompt_logprobs
from engine.types import (
    AdapterBlob,
    ModelDescription,
    PlanRow,
    RowResult,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

_LOGIT_ROWS = 64  # most rows whose logits exist at once


class Model(Protocol):
    """The base model's weights, ready to run: engine.model.llama.Llama, or the compiled one."""

    def forward(self, batch: StepBatch) -> Tensor: ...

    def logits(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor: ...


class TokenSampler(Protocol):
    """Draws tokens; engine.sampler.Sampler is the real one."""

    def start(self, start: SequenceStart) -> None: ...

    def drop(self, seq: int) -> None: ...

    def sample(self, logits: Tensor, seqs: list[int]) -> list[Sampled]:
        """logits: [R, vocab] fp32, row i of sequence seqs[i]; may be overwritten."""
        ...


class _Sequence:
    """A sequence's known tokens and its block table."""

    def __init__(self, start: SequenceStart) -> None:
        self.tokens = [*start.prompt, *start.generated]
        self.table: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def append_blocks(self, blocks: list[int]) -> None:
        if blocks:
            self.table = np.append(self.table, blocks)


class CpuExecutor:
    """Implements engine.types.Executor in torch operations (and numba's where installed)."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock | None = None,
        sampler: TokenSampler | None = None,
        grammars: MatcherSource | None = None,
    ) -> None:
        """Loads the base model. Raises an EngineError that names what cannot be served."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self._clock = clock or SystemClock()
        checkpoint = open_checkpoint(config.base_model)
        library = native_library(config, checkpoint.config)
        kv_dtype = _kv_dtype(config, native=library is not None)
        adapter_dtype = "bf16" if config.adapter_dtype == "auto" else config.adapter_dtype
        extent_bytes = block_bytes(checkpoint.config, kv_dtype)
        self._extents = config.arena_bytes // extent_bytes
        if not self._extents:
            raise ValueError(f"arena_bytes must hold at least one block of {extent_bytes} bytes")
        self._description = describe(
            checkpoint,
            identify(checkpoint, config.data_dir / "base-models"),
            max_rank=config.max_rank,
            kv_block_bytes=extent_bytes,
            adapter_dtype=adapter_dtype,
            backend="cpu",
        )
        arena = torch.zeros(self._extents * extent_bytes, dtype=torch.uint8)
        self._cache = KvCache(arena, checkpoint.config, kv_dtype)
        self._lora = open_lora(
            arena,
            self._description.modules,
            slots=config.max_slots,
            max_rows=config.max_batch_tokens,
            max_rank=config.max_rank,
            dtype=adapter_dtype,
            batch_invariant=config.batch_invariant,
        )
        self._copies = AdapterCopies(arena.numpy(), extent_bytes, self._lora)
        self._step_lora = self._lora.new_batch(config.max_batch_tokens)
        self._logit_lora = self._lora.new_batch(config.max_batch_tokens)
        self._model = self._open_model(config, checkpoint, library, arena)
        self._sampler = sampler or Sampler(
            checkpoint.config.vocab_size, checkpoint.config.eos_token_ids, grammars
        )
        self._sequences: dict[int, _Sequence] = {}

    def _open_model(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        library: Library | None,
        arena: Tensor,
    ) -> Model:
        modules = self._description.modules
        if library is not None:
            from engine.native.model import NativeLlama  # wants numba

            return NativeLlama(
                library, checkpoint, self._cache, arena, self._lora, modules,
                max_rows=config.max_batch_tokens,
            )  # fmt: skip
        choice = choose_path(
            config.linear_path, batch_invariant=config.batch_invariant, fast_bf16=bf16_is_fast()
        )
        model = Llama(
            checkpoint, choice, self._cache, self._lora, modules,
            batch_invariant=config.batch_invariant,
        )  # fmt: skip
        if config.batch_invariant and not all(map(make_rows_stable, model.linears_by_shape())):
            raise RuntimeError("this CPU's matrix products depend on the batch size: no invariance")
        return model

    # ------------------------------------------------------------------ what is held

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def extent_count(self) -> int:
        return self._extents

    def start_copy(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        self._copies.start(slot, first_extent, blob)

    def poll_copies(self, max_bytes: int) -> list[int]:
        return self._copies.poll(max_bytes)

    def move_adapter(self, slot: int, first_extent: int) -> None:
        self._copies.move(slot, first_extent)

    def drop_adapter(self, slot: int) -> None:
        self._copies.drop(slot)

    # ------------------------------------------------------------------ the step

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; see the Executor protocol."""
        began = self._clock.now_ms()
        for seq in plan.closed:
            self._sequences.pop(seq, None)
            self._sampler.drop(seq)
        for start in plan.started:
            self._start(start)
        for source, destination in plan.copies:
            self._cache.copy_block(source, destination)
        with torch.inference_mode():
            rows = self._run(plan.rows) if plan.rows else []
        return StepResult(plan.step, rows, self._clock.now_ms() - began)

    def _start(self, start: SequenceStart) -> None:
        self._sequences[start.seq] = _Sequence(start)
        self._sampler.start(start)

    def _run(self, rows: list[PlanRow]) -> list[RowResult]:
        counts = [len(row.tokens) for row in rows]
        first = [0, *itertools.accumulate(counts)]
        slots = np.repeat([row.slot for row in rows], counts)
        hidden = self._model.forward(self._batch(rows, first, slots))
        prompts = {
            row.seq: self._prompt_logprobs(row, hidden[at : at + len(row.tokens)])
            for row, at in zip(rows, first, strict=False)
            if row.prompt_logprobs is not None
        }
        sampling = [(row, end - 1) for row, end in zip(rows, first[1:], strict=True) if row.sample]
        drawn: dict[int, Sampled] = {}
        for start in range(0, len(sampling), _LOGIT_ROWS):
            drawn |= self._draw(hidden, sampling[start : start + _LOGIT_ROWS])
        return [_result(row, drawn.get(row.seq), prompts.get(row.seq)) for row in rows]

    def _batch(
        self, rows: list[PlanRow], first: list[int], slots: npt.NDArray[np.int64]
    ) -> StepBatch:
        """The rows flattened, with every index that the layers share."""
        chunks = []
        for row, at in zip(rows, first, strict=False):
            sequence = self._sequences[row.seq]
            sequence.append_blocks(row.new_blocks)
            chunks.append(QueryChunk(at, len(row.tokens), row.start, sequence.table))
        positions = [np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        return StepBatch(
            tokens=torch.tensor([token for row in rows for token in row.tokens]),
            positions=torch.from_numpy(np.concatenate(positions)),
            chunks=chunks,
            lora=_fill(self._step_lora, slots),
        )

    def _draw(self, hidden: Tensor, sampling: list[tuple[PlanRow, int]]) -> dict[int, Sampled]:
        """Draws a token by sequence for each (row, its last position in hidden)."""
        positions = torch.tensor([position for _, position in sampling])
        logits = self._logits(hidden.index_select(0, positions), [row.slot for row, _ in sampling])
        seqs = [row.seq for row, _ in sampling]
        return dict(zip(seqs, self._sampler.sample(logits, seqs), strict=True))

    def _prompt_logprobs(self, row: PlanRow, hidden: Tensor) -> tuple[list[TokenLogprobs], bool]:
        """What the model expected after each of the row's tokens, and whether all was finite."""
        known = self._sequences[row.seq].tokens[row.start + 1 : row.start + 1 + len(row.tokens)]
        following = [*known, *[None] * (len(row.tokens) - len(known))]
        entries: list[TokenLogprobs] = []
        finite = True
        for start in range(0, len(row.tokens), _LOGIT_ROWS):
            piece = slice(start, start + _LOGIT_ROWS)
            logits = self._logits(hidden[piece], [row.slot] * len(following[piece]))
            finite = finite and all(finite_rows(logits))
            entries += prompt_logprobs(logits, following[piece], row.prompt_logprobs or 0)
        return entries, finite

    def _logits(self, hidden: Tensor, slots: list[int]) -> Tensor:
        """hidden: [R, hidden], slots: [R] -> [R, vocab] fp32."""
        return self._model.logits(hidden, _fill(self._logit_lora, np.array(slots)))


def _result(
    row: PlanRow, drawn: Sampled | None, prompt: tuple[list[TokenLogprobs], bool] | None
) -> RowResult:
    of_prompt, finite = prompt or (None, True)
    if drawn is None:
        return RowResult(row.seq, [], None, of_prompt, finite)
    if not drawn.finite:
        return RowResult(row.seq, [], None, of_prompt, finite=False)
    if drawn.stuck:
        return RowResult(row.seq, [], None, of_prompt, finite, stuck=True)
    logprobs = None if drawn.logprobs is None else [drawn.logprobs]
    return RowResult(row.seq, [drawn.token_id], logprobs, of_prompt, finite)


def _fill(batch: LoraBatch, slots: npt.NDArray[np.int64]) -> LoraBatch | None:
    """The batch over these rows' adapter slots, or None when no row has one."""
    if (slots < 0).all():
        return None
    batch.build(slots)
    return batch


def _kv_dtype(config: EngineConfig, *, native: bool) -> KvDtype:
    """bf16 unless asked otherwise; in torch fp32, whose paged rows are read in place there."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "bf16" if native else "fp32"
