"""The CPU executor: turns a StepPlan into one forward pass and drawn tokens.

It owns the arena, the model and what it knows of each sequence (its block table); which sequence
runs when, and which block or slot is whose, is decided before the plan arrives.
"""

import platform
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import huge_pages
from engine.adapter_copies import AdapterCopies
from engine.clock import Clock, SystemClock
from engine.config import EngineConfig
from engine.grammar import MatcherSource
from engine.kernels.lora import open_lora
from engine.kernels.metadata import LoraBatch
from engine.model.description import describe, identify
from engine.model.form_cache import FormCache, open_forms
from engine.model.kv_cache import KvCache, KvDtype, block_bytes
from engine.model.linear import PathChoice, bf16_is_fast, choose_path, make_rows_stable
from engine.model.llama import Llama, StepBatch
from engine.model.loader import Checkpoint, open_checkpoint
from engine.native.build import Library
from engine.native.choose import native_library
from engine.sampler import Sampled, Sampler, finite_rows, prompt_logprobs
from engine.step_rows import FlatRows, KnownSequence, PromptLogprobs, flatten, row_results
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
        arena = huge_pages.zeros(self._extents * extent_bytes)
        self._cache = KvCache(arena, checkpoint.config, kv_dtype)
        self._lora = open_lora(
            arena,
            self._description.modules,
            slots=config.max_slots,
            max_rows=config.max_batch_tokens,
            max_rank=config.max_rank,
            dtype=adapter_dtype,
            batch_invariant=config.batch_invariant,
            compiled=None if library is None else library.adapters,
        )
        self._copies = AdapterCopies(arena.numpy(), extent_bytes, self._lora)
        self._step_lora = self._lora.new_batch(config.max_batch_tokens)
        self._logit_lora = self._lora.new_batch(config.max_batch_tokens)
        self._model = self._open_model(config, checkpoint, library, arena)
        self._sampler = sampler or Sampler(
            checkpoint.config.vocab_size, checkpoint.config.eos_token_ids, grammars
        )
        self._sequences: dict[int, KnownSequence] = {}

    def _open_model(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        library: Library | None,
        arena: Tensor,
    ) -> Model:
        modules, digest = self._description.modules, self._description.base_digest
        if library is not None:
            from engine.native.model import NativeLlama  # wants numba

            forms = _form_cache(config, digest, None)
            native = NativeLlama(
                library, checkpoint, self._cache, arena, self._lora, modules, forms,
                max_rows=config.max_batch_tokens,
            )  # fmt: skip
            forms.close()
            return native
        choice = choose_path(
            config.linear_path, batch_invariant=config.batch_invariant, fast_bf16=bf16_is_fast()
        )
        forms = _form_cache(config, digest, choice)
        model = Llama(
            checkpoint, choice, self._cache, self._lora, modules, forms,
            batch_invariant=config.batch_invariant,
        )  # fmt: skip
        forms.close()
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
        self._sequences[start.seq] = KnownSequence(start)
        self._sampler.start(start)

    def _run(self, rows: list[PlanRow]) -> list[RowResult]:
        flat = flatten(rows, self._sequences, self._cache.rows_per_block)
        hidden = self._model.forward(self._batch(flat))
        prompts = {
            row.seq: self._prompt_logprobs(row, hidden[part])
            for row, part in flat.asking_for_prompt_logprobs()
        }
        sampling = flat.sampling()
        drawn: dict[int, Sampled] = {}
        for start in range(0, len(sampling), _LOGIT_ROWS):
            drawn |= self._draw(hidden, sampling[start : start + _LOGIT_ROWS])
        return row_results(rows, drawn, prompts)

    def _batch(self, flat: FlatRows) -> StepBatch:
        """The rows as the layers share them."""
        return StepBatch(
            tokens=torch.from_numpy(flat.tokens),
            positions=torch.from_numpy(flat.positions),
            chunks=flat.chunks,
            lora=_fill(self._step_lora, flat.slots),
        )

    def _draw(self, hidden: Tensor, sampling: list[tuple[PlanRow, int]]) -> dict[int, Sampled]:
        """Draws a token by sequence for each (row, its last position in hidden)."""
        positions = [position for _, position in sampling]
        if positions != list(range(len(hidden))):
            hidden = hidden[positions]
        logits = self._logits(hidden, [row.slot for row, _ in sampling])
        seqs = [row.seq for row, _ in sampling]
        return dict(zip(seqs, self._sampler.sample(logits, seqs), strict=True))

    def _prompt_logprobs(self, row: PlanRow, hidden: Tensor) -> PromptLogprobs:
        """What the model expected after each of the row's tokens, and whether all was finite."""
        following = self._sequences[row.seq].following(row)
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


def _fill(batch: LoraBatch, slots: npt.NDArray[np.int64]) -> LoraBatch | None:
    """The batch over these rows' adapter slots, or None when no row has one."""
    if (slots < 0).all():
        return None
    batch.build(slots)
    return batch


def _form_cache(config: EngineConfig, base_digest: str, choice: PathChoice | None) -> FormCache:
    """What forms differ by: torch's kernels lay weights out for the processor they run on.

    `choice`: None for the compiled pass, whose layout is its own.
    """
    facts = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "choice": choice,
    }
    return open_forms(config.data_dir, base_digest, facts, config.form_cache_bytes)


def _kv_dtype(config: EngineConfig, *, native: bool) -> KvDtype:
    """bf16 unless asked otherwise; in torch fp32, whose paged rows are read in place there."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "bf16" if native else "fp32"
