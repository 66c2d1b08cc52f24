"""Puts steps onto the device: what they are told, the graph or the eager pass, logits and draws.

Every buffer that a step reads or leaves is made once and keeps its address. A step is written into
them by the host and brought over in one transfer; then a captured graph is replayed (decodes), or
the same operations are started one by one (steps with prompt chunks).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda.device import Device, Graph
from engine.cuda.faces import Faces
from engine.cuda.model import DeviceLlama, DeviceStep, Memories
from engine.cuda.sampling import DeviceSampler
from engine.cuda.step_buffers import Part, StepBuffers
from engine.cuda.step_keys import StepKey, StepKeys
from engine.kernels.lora_cuda import DeviceBatch, LoraGrid
from engine.kernels.metadata import AdapterDtype
from engine.kernels.sample import PARAMETERS
from engine.model.kv_cache import KvCache, KvDtype
from engine.step_rows import FlatRows
from engine.types import BLOCK_TOKENS, ModuleSpec

MAX_PARTIALS = 256
"""Most splits of a step that are attended apart: times the key heads, they fill any GPU."""
PROMPT_ROWS = 64
"""Rows whose logits exist at once where prompts are scored."""
NO_FEED = -1
MOST_LOGPROBS = 20  # of a token, as the api bounds them


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds every step, and in which types the arena is read."""

    slots: int
    max_running: int
    max_batch_tokens: int
    max_rank: int
    kv_dtype: KvDtype
    adapter_dtype: AdapterDtype
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step as the host knows it. R rows of it are sampled."""

    flat: FlatRows
    key: StepKey
    feed: npt.NDArray[np.int64]  # [T]: which draw of the step before is the row's token, or NO_FEED
    sample_rows: npt.NDArray[np.int64]  # [R], positions in the batch
    asked: npt.NDArray[np.float32]  # [R, PARAMETERS]

    @classmethod
    def empty(cls, key: StepKey) -> "HostStep":
        """All padding."""
        none = np.zeros(0, np.int64)
        flat = FlatRows([], [0], none, none, none, none, [])
        return cls(flat, key, none, none, np.zeros((0, PARAMETERS), np.float32))


class DeviceSteps:
    """One model over one arena. Everything but `write` must be called with "steps" current."""

    def __init__(
        self,
        device: Device,
        faces: Faces,
        model: DeviceLlama,
        arena: Tensor,
        modules: tuple[ModuleSpec, ...],
        limits: StepLimits,
    ) -> None:
        config = model.config
        self.keys = StepKeys.of(
            max_running=limits.max_running,
            max_batch_tokens=limits.max_batch_tokens,
            max_rank=limits.max_rank,
        )
        self._device = device
        self._model = model
        self.cache = KvCache(arena, config, limits.kv_dtype)
        self.lora = faces.lora(
            arena,
            modules,
            slots=limits.slots,
            max_rows=limits.max_batch_tokens,
            max_rank=limits.max_rank,
            dtype=limits.adapter_dtype,
            batch_invariant=limits.batch_invariant,
        )
        self._attention = faces.attention(
            self.cache,
            max_rows=limits.max_batch_tokens,
            max_blocks=limits.max_running * -(-config.context_length // BLOCK_TOKENS),
            max_partials=MAX_PARTIALS,
            dtype=model.dtype,
            batch_invariant=limits.batch_invariant,
        )
        self._memories = Memories(self.cache, self.lora, self._attention)
        self._batch = self.lora.new_batch(limits.max_batch_tokens)
        self._logit_batch = self.lora.new_batch(limits.max_running)
        self._prompt_batch = self.lora.new_batch(min(PROMPT_ROWS, limits.max_batch_tokens))
        tokens, rows = limits.max_batch_tokens, limits.max_running
        self._buffers = StepBuffers(
            device,
            {
                "tokens": Part((tokens,), "int64"),
                "feed": Part((tokens,), "int64"),
                "positions": Part((tokens,), "int64"),
                "token_rows": Part((tokens,), "int64"),
                "sample_rows": Part((rows,), "int64"),
                "asked": Part((rows, PARAMETERS), "float32"),
                "lora": Part(self._batch.buffer.shape, "int32"),
                "logit_lora": Part(self._logit_batch.buffer.shape, "int32"),
                "attention": Part(self._attention.work.buffer.shape, "int32"),
            },
        )
        self._batch.place(self._buffers.on_device("lora"))
        self._logit_batch.place(self._buffers.on_device("logit_lora"))
        self._attention.place(self._buffers.on_device("attention"))
        logits = device.empty(4 * rows * config.vocab_size).view(torch.float32)
        self.logits = logits.view(rows, config.vocab_size)
        self._lowest = device.empty(4 * rows).view(torch.float32)
        self.drawn = device.empty(8 * rows).view(torch.int64)
        """[max_running], the tokens of the step put on last, in the order of its samples."""
        self._graphs: dict[StepKey, Graph] = {}
        self.replays = True

    # ------------------------------------------------------------------ a step

    def write(self, step: HostStep, forced: LoraGrid | None = None) -> None:
        """Brings over what the step is told. `forced`: starts these kernels, whatever is in it."""
        buffers, flat, key = self._buffers, step.flat, step.key
        buffers.begin()
        for name, values, padding in (
            ("tokens", flat.tokens, 0),
            ("feed", step.feed, NO_FEED),
            ("positions", flat.positions, 0),
            ("token_rows", flat.token_rows, -1),
        ):
            part = buffers.host(name)
            part[: flat.count] = values
            part[flat.count : key.rows] = padding
        samples = len(step.sample_rows)
        sampled: dict[str, npt.NDArray[Any]] = {
            "sample_rows": step.sample_rows,
            "asked": step.asked,
        }
        for name, asked in sampled.items():
            part = buffers.host(name)
            part[:samples] = asked
            part[samples:] = 0
        self._build_adapters(step, forced)
        attention = self._attention
        attention.grid = attention.every_grid() if forced is not None else None
        if key.captured:
            attention.grid = attention.decode_grid(key.rows)
        attention.build(flat.chunks)
        used = attention.work.used
        buffers.host("attention")[:used] = attention.work.buffer[:used]
        buffers.upload(used)

    def _build_adapters(self, step: HostStep, forced: LoraGrid | None) -> None:
        batches = {"lora": (self._batch, step.flat.slots)}
        if not step.key.captured:
            batches["logit_lora"] = (self._logit_batch, step.flat.slots[step.sample_rows])
        for name, (batch, slots) in batches.items():
            batch.grid = forced
            if step.key.captured:
                batch.grid = batch.decode_grid(step.key.chunks, step.key.rank)
            batch.build(slots)
            self._buffers.host(name)[:] = batch.buffer

    def run(self, step: HostStep) -> Tensor | None:
        """Puts on the pass over the step written last; the logits of its samples follow.

        The rows after the last norm, [T, hidden], where they were computed eagerly.
        """
        graph = self._graphs.get(step.key) if self.replays else None
        if graph is not None:
            graph.replay()
            return None
        if step.key.captured:
            self._decode(step.key)
            return None
        x = self._forward(step.key)
        samples = len(step.sample_rows)
        if samples:
            rows = self._buffers.on_device("sample_rows")[: self.keys.padded_samples(samples)]
            self._keep_logits(x.index_select(0, rows), adapters=step.key.rank > 0)
        return x

    def draw(self, sampler: DeviceSampler, samples: int) -> None:
        """Puts on the draws from `logits`, into `drawn`."""
        rows = self.keys.padded_samples(samples)
        asked = self._buffers.on_device("asked")[:rows]
        self.drawn[:rows].copy_(sampler.draw(self.logits[:rows], self._lowest[:rows], asked))

    def prompt_logits(self, x: Tensor, first: int, count: int, slot: int) -> Tensor:
        """Logits [count, vocab] of rows `first` and on of x, at most PROMPT_ROWS of one slot."""
        padded = min(PROMPT_ROWS, self._prompt_batch.capacity)
        rows = torch.arange(first, first + padded, device=x.device).clamp(max=first + count - 1)
        self._prompt_batch.build([slot] * padded)
        batch = self._prompt_batch if slot >= 0 else None
        return self._model.logits(x.index_select(0, rows), batch, self._memories)[:count]

    def _decode(self, key: StepKey) -> None:
        self._keep_logits(self._forward(key), adapters=key.rank > 0, batch=self._batch)

    def _forward(self, key: StepKey) -> Tensor:
        tokens, feed, positions, token_rows = (
            self._buffers.on_device(name)[: key.rows]
            for name in ("tokens", "feed", "positions", "token_rows")
        )
        fed = self.drawn.index_select(0, feed.clamp(min=0)).clamp(min=0)
        step = DeviceStep(
            tokens=torch.where(feed >= 0, fed, tokens),
            positions=positions,
            token_rows=token_rows,
            lora=self._batch if key.rank else None,
        )
        return self._model.forward(step, self._memories)

    def _keep_logits(self, x: Tensor, *, adapters: bool, batch: DeviceBatch | None = None) -> None:
        batch = batch or self._logit_batch
        logits = self._model.logits(x, batch if adapters else None, self._memories)
        rows = logits.shape[0]
        self.logits[:rows].copy_(logits)
        self._lowest[:rows].copy_(logits.amin(dim=-1))

    # ------------------------------------------------------------------ before the engine is ready

    def capture(self, keys: list[StepKey]) -> None:
        """Captures a graph for each, after it has run once."""
        for key in keys:
            self.write(HostStep.empty(key))
            self._decode(key)
            self._graphs[key] = self._device.capture(partial(self._decode, key))

    def warm_up(self, keys: list[StepKey], sampler: DeviceSampler) -> None:
        """Runs every one of these shapes, and every size of what follows the pass."""
        grids = self._batch.every_grid()
        for key in keys:
            for grid in grids if key.rank else grids[:1]:
                step = HostStep.empty(key)
                self.write(step, forced=grid)
                x = self._forward(key)
        for rows in self.keys.sample_rows:
            for adapters in (True, False):
                self._keep_logits(x[:1].expand(rows, -1).contiguous(), adapters=adapters)
            self.draw(sampler, rows)
        self.prompt_logits(x, 0, 1, -1)
        torch.log_softmax(self.logits, dim=-1).topk(min(MOST_LOGPROBS, self.logits.shape[1]))
