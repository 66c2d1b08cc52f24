"""The CUDA executor: `engine.types.Executor` on a device, and its two halves, launch and collect.

    launch(plan)   writes the step, puts it on the stream and returns     host ahead of the device
    collect()      waits for the oldest step that was launched            tokens as plain data

`execute` is one after the other. Between them the host is free for the work around steps, and may
launch the next step: a row whose token the step before has still to draw says PENDING in its place,
and the device takes it from there. docs/cuda.md shows the whole on one screen.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.clock import Clock, SystemClock
from engine.config import EngineConfig
from engine.cuda.copies import DeviceCopies
from engine.cuda.device import BackendUnavailable, Device, Event
from engine.cuda.faces import Faces
from engine.cuda.linear import Precision
from engine.cuda.memory import MemoryBudget
from engine.cuda.model import DeviceLlama
from engine.cuda.sampling import DeviceSampler, Drawing
from engine.cuda.step_keys import CHUNK_ROWS, StepKey
from engine.cuda.steps import NO_FEED, PROMPT_ROWS, DeviceSteps, HostStep, StepLimits
from engine.grammar import MatcherSource
from engine.model.description import Identity, describe, identify
from engine.model.form_cache import open_forms
from engine.model.kv_cache import block_bytes
from engine.model.loader import Checkpoint, open_checkpoint
from engine.sampler import finite_rows, prompt_logprobs
from engine.step_rows import FlatRows, KnownSequence, PromptLogprobs, flatten, row_results
from engine.types import (
    PENDING,
    AdapterBlob,
    ModelDescription,
    PlanRow,
    StepPlan,
    StepResult,
)

log = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2
"""Steps that may have been launched and not collected."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way. `tokens`: in locked memory, valid once `over` has passed."""

    plan: StepPlan
    began_ms: float
    drawing: Drawing | None
    tokens: Tensor
    over: Event
    prompts: dict[int, PromptLogprobs]


class CudaExecutor:
    """Everything is called by one thread."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock | None = None,
        grammars: MatcherSource | None = None,
        *,
        device: Device | None = None,
        faces: Faces | None = None,
        captures: bool = True,
        base: tuple[Checkpoint, Identity] | None = None,
    ) -> None:
        """Loads the base model, divides the memory, captures and warms up: ready when it returns.

        `captures`: false runs every step eagerly, to compare. `base`: stands in for the checkpoint
        at `config.base_model`. Raises an EngineError that names what cannot be served here.
        """
        self._clock = clock or SystemClock()
        self.device = device or _cuda_device()
        faces = faces or Faces()
        checkpoint, identity = base or _open(config)
        heads = checkpoint.config.head_dim
        if faces.head_sizes is not None and heads not in faces.head_sizes:
            raise BackendUnavailable(
                f"heads of {heads} are not supported on cuda: {faces.head_sizes}; start with "
                "--backend cpu"
            )
        precision = Precision(config.linear_path, config.batch_invariant)
        own: Literal["fp32", "bf16"] = "fp32" if precision.dtype == torch.float32 else "bf16"
        self._limits = StepLimits(
            slots=config.max_slots,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            max_rank=config.max_rank,
            kv_dtype=own if config.kv_dtype == "auto" else config.kv_dtype,
            adapter_dtype=own if config.adapter_dtype == "auto" else config.adapter_dtype,
            batch_invariant=config.batch_invariant,
        )
        extent_bytes = block_bytes(checkpoint.config, self._limits.kv_dtype)
        self._description = describe(
            checkpoint,
            identity,
            max_rank=config.max_rank,
            kv_block_bytes=extent_bytes,
            adapter_dtype=self._limits.adapter_dtype,
            backend="cuda",
        )
        self._sampler = DeviceSampler(
            checkpoint.config.vocab_size, checkpoint.config.eos_token_ids, grammars, faces.sample
        )
        with torch.no_grad():  # what is made here is written to outside of inference mode too
            before = self._free_bytes()
            modules = self._description.modules
            forms = open_forms(
                config.data_dir, identity.base_digest, {"backend": "cuda"}, config.form_cache_bytes
            )
            model = DeviceLlama(checkpoint, precision, faces, self.device, modules, forms)
            forms.close()
            make = partial(
                DeviceSteps, self.device, faces, model, modules=modules, limits=self._limits
            )
            self.budget = self._divide(config, make, before, extent_bytes, captures=captures)
            for line in self.budget.table():
                log.info("%s", line)
            arena = self.device.empty(self.budget.arena)
            self._steps = make(arena)
            with self.device.on("steps"):
                if captures:
                    self._steps.capture(self._steps.keys.captured())
                self._steps.warm_up(self._steps.keys.eager(), self._sampler)
        self._copies = DeviceCopies(self.device, arena, extent_bytes, self._steps.lora)
        tokens = [self.device.pinned(8 * config.max_running) for _ in range(MOST_IN_FLIGHT)]
        self._token_buffers = deque(buffer.view(torch.int64) for buffer in tokens)
        self._sequences: dict[int, KnownSequence] = {}
        self._launched: deque[_Launched] = deque()
        self._drawn_at: dict[int, int] = {}  # by sequence, of the step launched last
        self.device.synchronize()

    def _free_bytes(self) -> int:
        self.device.synchronize()
        self.device.release_unused()
        return self.device.memory().free

    def _divide(
        self,
        config: EngineConfig,
        make: Callable[[Tensor], DeviceSteps],
        before: int,
        extent_bytes: int,
        *,
        captures: bool,
    ) -> MemoryBudget:
        """Measures what is needed beside the arena, over an arena of one block."""
        loaded = self._free_bytes()
        steps = make(self.device.empty(extent_bytes))
        made = self._free_bytes()
        keys = steps.keys.captured() if captures else []
        captured = [made]
        with self.device.on("steps"):
            for key in keys[:2]:  # the first brings the pool, the others their own nodes alone
                steps.capture([key])
                captured.append(self._free_bytes())
            steps.warm_up(steps.keys.eager(), self._sampler)
        self.device.synchronize()
        memory = self.device.memory()
        graphs = made - captured[-1]
        if len(keys) > 2:
            graphs += (captured[1] - captured[2]) * (len(keys) - 2)
        budget = MemoryBudget(
            total=memory.total,
            share=config.device_memory_share,
            others=memory.total - before,
            weights=before - loaded,
            buffers=loaded - made,
            step=captured[-1] - memory.free,
            graphs=graphs,
            extent=extent_bytes,
        )
        del steps
        self._free_bytes()
        return budget

    # ------------------------------------------------------------------ what is held

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def extent_count(self) -> int:
        return self.budget.extents

    def replay(self, *, graphs: bool) -> None:
        """Whether decodes replay their graphs from now on, or run eagerly, to compare."""
        self._steps.replays = graphs

    @property
    def logits(self) -> Tensor:
        """[max_running, vocab] fp32 on the device: those of the last step, by its samples.

        After penalties, bias and grammars; for comparisons.
        """
        return self._steps.logits

    def start_copy(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        self._copies.start(slot, first_extent, blob)

    def poll_copies(self, max_bytes: int) -> list[int]:
        """Copies run beside the steps, so `max_bytes` bounds nothing here."""
        return self._copies.poll()

    def move_adapter(self, slot: int, first_extent: int) -> None:
        self._copies.move(slot, first_extent)

    def drop_adapter(self, slot: int) -> None:
        self._copies.drop(slot)

    # ------------------------------------------------------------------ the step

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; see the Executor protocol. No other may be in flight."""
        self.launch(plan)
        return self.collect()

    def launch(self, plan: StepPlan) -> None:
        """Puts a step on the stream and returns.

        A row's token may be PENDING when the step launched before draws it. Raises ValueError when
        it does not, or when MOST_IN_FLIGHT steps wait to be collected.
        """
        if len(self._launched) == MOST_IN_FLIGHT:
            raise ValueError(f"{MOST_IN_FLIGHT} steps are in flight already")
        began_ms = self._clock.now_ms()
        for seq in plan.closed:
            self._sequences.pop(seq, None)
            self._sampler.drop(seq)
        for start in plan.started:
            self._sequences[start.seq] = KnownSequence(start)
            self._sampler.start(start)
        with torch.inference_mode(), self.device.on("steps"):
            for source, destination in plan.copies:
                self._steps.cache.copy_block(source, destination)
            drawing, prompts = self._put(plan.rows) if plan.rows else (None, {})
            tokens = self._token_buffers[0]
            self._token_buffers.rotate(-1)
            if drawing is not None:
                count = len(drawing.seqs)
                self.device.copy("steps", tokens[:count], self._steps.drawn[:count])
        over = self.device.record("steps")
        self._launched.append(_Launched(plan, began_ms, drawing, tokens, over, prompts))

    def collect(self) -> StepResult:
        """The result of the oldest step in flight; blocks until its tokens are known."""
        step = self._launched.popleft()
        step.over.wait()
        drawn = {}
        if step.drawing is not None:
            seqs = step.drawing.seqs
            with torch.inference_mode(), self.device.on("steps"):
                sampled = self._sampler.finish(step.drawing, step.tokens[: len(seqs)].tolist())
            drawn = dict(zip(seqs, sampled, strict=True))
        rows = row_results(step.plan.rows, drawn, step.prompts)
        return StepResult(step.plan.step, rows, self._clock.now_ms() - step.began_ms)

    def abandon(self) -> None:
        """Forgets the steps in flight, once the device has done with them or has failed."""
        self._launched.clear()
        self._drawn_at.clear()
        self.device.synchronize()

    def _put(self, rows: list[PlanRow]) -> tuple[Drawing | None, dict[int, PromptLogprobs]]:
        """Everything of a step with rows; what it draws, and the prompts it scored."""
        steps = self._steps
        flat = flatten(rows, self._sequences, steps.cache.rows_per_block)
        sampling = flat.sampling()
        seqs = [row.seq for row, _ in sampling]
        step = HostStep(
            flat=flat,
            key=self._key(flat),
            feed=self._feed(flat),
            sample_rows=np.array([position for _, position in sampling], np.int64),
            asked=self._sampler.parameters(seqs),
        )
        steps.write(step)
        x = steps.run(step)
        prompts = {}
        for row, part in flat.asking_for_prompt_logprobs():
            if x is None:
                raise AssertionError("a step that scores prompts runs eagerly")
            prompts[row.seq] = self._prompt_logprobs(row, x, part)
        self._drawn_at = {seq: index for index, seq in enumerate(seqs)}
        if not seqs:
            return None, prompts
        drawing = self._sampler.adjust(steps.logits[: len(seqs)], seqs)
        steps.draw(self._sampler, len(seqs))
        return drawing, prompts

    def _key(self, flat: FlatRows) -> StepKey:
        used, rows = np.unique(flat.slots[flat.slots >= 0], return_counts=True)
        rank = int(self._steps.lora.table.slot_rank[used].max(initial=0))
        chunks = int((-(-rows // CHUNK_ROWS)).sum())
        decodes = all(
            len(row.tokens) == 1 and row.sample and row.prompt_logprobs is None for row in flat.rows
        )
        return self._steps.keys.key(flat.count, rank, chunks, decodes=decodes)

    def _feed(self, flat: FlatRows) -> npt.NDArray[np.int64]:
        feed = np.full(flat.count, NO_FEED, np.int64)
        for at in np.flatnonzero(flat.tokens == PENDING).tolist():
            row = flat.rows[int(np.searchsorted(flat.first, at, side="right")) - 1]
            if row.seq not in self._drawn_at:
                raise ValueError(f"no step in flight draws the token that row {row.seq} waits for")
            feed[at] = self._drawn_at[row.seq]
        return feed

    def _prompt_logprobs(self, row: PlanRow, x: Tensor, part: slice) -> PromptLogprobs:
        """What the model expected after each of the row's tokens; waits for the device."""
        following = self._sequences[row.seq].following(row)
        finite, entries = True, []
        for start in range(0, len(following), PROMPT_ROWS):
            known = following[start : start + PROMPT_ROWS]
            logits = self._steps.prompt_logits(x, part.start + start, len(known), row.slot)
            finite = finite and all(finite_rows(logits))
            entries += prompt_logprobs(logits, known, row.prompt_logprobs or 0)
        return entries, finite


def _open(config: EngineConfig) -> tuple[Checkpoint, Identity]:
    checkpoint = open_checkpoint(config.base_model)
    return checkpoint, identify(checkpoint, config.data_dir / "base-models")


def _cuda_device() -> Device:
    from engine.cuda.torch_device import CudaDevice

    return CudaDevice()
