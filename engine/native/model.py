"""The Llama family on `forward.cpp`: a step is one call for all layers and one for the logits.

Linears multiply bf16 activations with weights that are widened from the checkpoint's codes to bf16
as they are read, or both in fp32 where the processor has no bf16 products, and sum in fp32. Keys,
values and their scores, norms and the residual stream are fp32 (keys and values are rounded to the
cache's type). Logits are sums of fp32 activations. A row's bits depend on nothing but the row.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.huge_pages import Region
from engine.kernels.lora import Lora
from engine.kernels.lora_cpu import CompiledLora, PreparedCalls, thread_pool
from engine.kernels.lora_numba import Call
from engine.kernels.metadata import LoraBatch, SliceGroup, layer_groups
from engine.model.form_cache import NOTHING_KEPT, FormCache
from engine.model.give_back import give_back
from engine.model.kv_cache import KvCache
from engine.model.llama import StepBatch
from engine.model.loader import Checkpoint
from engine.model.rope import Rope
from engine.model.weights import Weight
from engine.native.build import Library
from engine.native.layout import PANEL, kept_pack
from engine.types import ModuleSpec

_TILE_ROWS = 32
_LOGIT_ROWS = 64  # most that a call is usually asked for
_PHASE_BYTES, _PHASES_A_LAYER = 128, 15


def _structure(name: str, *names: str, **kinds: type) -> type[ctypes.Structure]:
    """A C structure of 64-bit fields, but for `kinds`."""
    fields = [(field, kinds.get(field, ctypes.c_int64)) for field in names]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Linear = _structure("Linear", "kind", "data", "inputs", "outputs", "bias")
_Layer = _structure(
    "Layer", "input_norm", "mlp_norm", "qk_norm", "qkv", "o", "gate_up", "down",
    qkv=_Linear, o=_Linear, gate_up=_Linear, down=_Linear,
)  # fmt: skip
_Model = _structure(
    "Model", "layers", "layer_count", "hidden", "inner", "heads", "kv_heads", "head_dim", "window",
    "epsilon", "scale", "cos", "sin", "kv_fp32", "block_bytes", "arena",
    epsilon=ctypes.c_float, scale=ctypes.c_float,
)  # fmt: skip
_Step = _structure(
    "Step", "model", "rows", "hidden", "position", "first_block", "tables", "x", "inputs", "gated",
    "y", "q", "scratch", "scratch_bytes", "adapters", "lora", "threads", "arrived", "phases",
)  # fmt: skip
_Logits = _structure(
    "Logits", "rows", "hidden", "norm", "epsilon", "head", "x", "high", "low", "logits", "scratch",
    "scratch_bytes", "threads", "arrived", "phases", epsilon=ctypes.c_float, head=_Linear,
)  # fmt: skip


class NativeLlama:
    """The base model's weights, ready to run. Same interface as `engine.model.llama.Llama`."""

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        cache: KvCache,
        arena: Tensor,
        lora: Lora,
        modules: tuple[ModuleSpec, ...],
        forms: FormCache = NOTHING_KEPT,
        *,
        max_rows: int,
    ) -> None:
        """`modules`: as in ModelDescription. `forms`: of this base.

        Raises RuntimeError where `native_library` gives none, or for another library's structures.
        """
        structures = (_Linear, _Layer, _Model, _Step, _Logits, Call)
        if [library.size(i) for i in range(6)] != [ctypes.sizeof(s) for s in structures]:
            raise RuntimeError("the native library was made for other structures")
        run = thread_pool()
        if run is None or not isinstance(lora, CompiledLora):
            raise RuntimeError("torch runs on no GNU OpenMP here")
        config = self.config = checkpoint.config
        self._library, self._run, self._lora = library, run, lora
        self._number = torch.bfloat16 if library.multiplies_bf16 else torch.float32
        self._embedding = checkpoint.weight("model.embed_tokens.weight")
        self._region = Region()
        self._kept: list[object] = [arena, cache]  # what addresses below point to
        self._norm = self._vector(checkpoint, "model.norm.weight")
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        # the largest matrix first, while nothing else is there beside its source
        self._head = self._linear(forms, "head", [checkpoint.weight(head)])
        self._layers = (_Layer * config.layers)(
            *(self._layer(checkpoint, index, forms) for index in range(config.layers))
        )
        give_back(checkpoint, forms)
        self._model = self._describe(checkpoint, cache, arena)
        self._buffers(max_rows)
        groups = [layer_groups(modules, layer) for layer in range(config.layers)]
        self._calls: PreparedCalls = lora.prepare(
            [group for of in groups for group in (of.qkv, of.o, of.gate_up, of.down)],
            self._x, self._y,
        )  # fmt: skip
        index = {module.target: i for i, module in enumerate(modules) if module.layer < 0}
        self._embedding_group = SliceGroup.of(modules, [index["embed_tokens"]])
        self._head_group = SliceGroup.of(modules, [index["lm_head"]])

    def forward(self, batch: StepBatch) -> Tensor:
        """Runs all blocks and writes the KV cache: [T, hidden] fp32, before the last norm."""
        hidden = torch.from_numpy(self._embedding.take(batch.tokens.numpy()))
        if batch.lora is not None:
            self._lora.embedding(self._embedding_group, batch.lora, batch.tokens, hidden)
        tables = np.concatenate([chunk.table for chunk in batch.chunks]).astype(np.int32)
        starts = np.cumsum([0, *(chunk.table.size for chunk in batch.chunks[:-1])])
        first_block = np.repeat(starts, [chunk.count for chunk in batch.chunks])
        threads = torch.get_num_threads()
        step = _Step(
            model=ctypes.addressof(self._model),
            rows=hidden.shape[0],
            hidden=hidden.data_ptr(),
            position=batch.positions.data_ptr(),
            first_block=first_block.ctypes.data,
            tables=tables.ctypes.data,
            x=self._x.data_ptr(),
            inputs=self._inputs.data_ptr(),
            gated=self._gated.data_ptr(),
            y=self._y.data_ptr(),
            q=self._q.data_ptr(),
            scratch=self._scratch_for(threads).data_ptr(),
            scratch_bytes=self._scratch_bytes,
            adapters=0 if batch.lora is None else self._calls.begin(batch.lora),
            lora=self._calls.addresses.ctypes.data,
            threads=threads,
            phases=self._fresh_phases(_PHASES_A_LAYER * self.config.layers),
        )
        self._run(self._library.forward, ctypes.addressof(step), threads, 0)
        return hidden

    def logits(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        """hidden: [R, hidden], the rows whose logits are wanted -> [R, vocab] fp32.

        The result is overwritten by the next call.
        """
        rows = hidden.shape[0]
        hidden = hidden.contiguous()
        x, high, low, logits = self._head_buffers(rows)
        threads = torch.get_num_threads()
        call = _Logits(
            rows=rows, hidden=hidden.data_ptr(), norm=self._norm.data_ptr(),
            epsilon=self.config.norm_eps, head=self._head, x=x.data_ptr(), high=high.data_ptr(),
            low=low.data_ptr(), logits=logits.data_ptr(),
            scratch=self._scratch_for(threads).data_ptr(), scratch_bytes=self._scratch_bytes,
            threads=threads, phases=self._fresh_phases(2),
        )  # fmt: skip
        self._run(self._library.logits, ctypes.addressof(call), threads, 0)
        if lora is not None:
            self._lora.linear(self._head_group, lora, x, logits)
        return logits

    # ------------------------------------------------------------------ what the structures hold

    def _layer(self, checkpoint: Checkpoint, index: int, forms: FormCache) -> ctypes.Structure:
        give_back(checkpoint, forms)  # what was read lies in its served form now
        prefix, config = f"model.layers.{index}.", self.config

        def linear(*names: str, bias: Tensor | None = None, alternating: bool = False) -> object:
            weights = [checkpoint.weight(f"{prefix}{name}.weight") for name in names]
            return self._linear(
                forms, f"{prefix}{names[0]}", weights, bias=bias, alternating=alternating
            )

        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        bias = qk_norm = None
        if config.qkv_bias:
            bias = torch.cat([self._vector(checkpoint, f"{prefix}{name}.bias") for name in qkv])
        if config.qk_norm:
            q, k = (self._vector(checkpoint, f"{prefix}self_attn.{n}_norm.weight") for n in "qk")
            qk_norm = torch.cat((q.repeat(config.heads), k.repeat(config.kv_heads)))
            self._kept.append(qk_norm)
        norms = [
            self._vector(checkpoint, f"{prefix}{name}_layernorm.weight").data_ptr()
            for name in ("input", "post_attention")
        ]
        return _Layer(
            *norms, 0 if qk_norm is None else qk_norm.data_ptr(),
            linear(*qkv, bias=bias), linear("self_attn.o_proj"),
            linear("mlp.gate_proj", "mlp.up_proj", alternating=True), linear("mlp.down_proj"),
        )  # fmt: skip

    def _linear(
        self,
        forms: FormCache,
        name: str,
        weights: Sequence[Weight],
        *,
        bias: Tensor | None = None,
        alternating: bool = False,
    ) -> ctypes.Structure:
        take = self._region.take
        packed = kept_pack(forms, name, weights, take, bias=bias, alternating=alternating)
        self._kept.append(packed)
        added = 0 if bias is None else bias.data_ptr()
        return _Linear(packed.kind, packed.data.data_ptr(), packed.inputs, packed.outputs, added)

    def _vector(self, checkpoint: Checkpoint, name: str) -> Tensor:
        vector = torch.from_numpy(checkpoint.weight(name).decode())
        self._kept.append(vector)
        return vector

    def _describe(self, checkpoint: Checkpoint, cache: KvCache, arena: Tensor) -> ctypes.Structure:
        config, divisors = self.config, checkpoint.rope_divisors()
        rope = Rope(config, None if divisors is None else torch.from_numpy(divisors))
        self._kept.append(rope)
        return _Model(
            layers=ctypes.addressof(self._layers), layer_count=config.layers,
            hidden=config.hidden_size, inner=config.intermediate_size, heads=config.heads,
            kv_heads=config.kv_heads, head_dim=config.head_dim, window=config.sliding_window or 0,
            epsilon=config.norm_eps, scale=config.head_dim**-0.5, cos=rope.cos.data_ptr(),
            sin=rope.sin.data_ptr(), kv_fp32=cache.dtype == torch.float32,
            block_bytes=cache.block_bytes, arena=arena.data_ptr(),
        )  # fmt: skip

    def _buffers(self, max_rows: int) -> None:
        config = self.config
        padded = _padded(max_rows)
        widest_in = max(config.hidden_size, config.q_width)
        widest_out = max(config.q_width + 2 * config.kv_width, 2 * config.intermediate_size)
        fp32 = torch.float32
        self._x = self._buffer(max_rows * max(widest_in, config.intermediate_size), fp32)
        self._inputs = self._buffer(padded * widest_in, self._number)
        self._gated = self._buffer(padded * config.intermediate_size, self._number)
        self._y = self._buffer(max_rows * widest_out, fp32)
        self._q = self._buffer(max_rows * config.q_width, fp32)
        deepest = max(widest_in, config.intermediate_size)
        self._scratch_bytes = (
            _TILE_ROWS * self._library.sum_bytes + 2 * deepest * PANEL * self._number.itemsize
        )
        self._scratch = self._region.take(0)
        self._logits = self._buffer(_LOGIT_ROWS * config.vocab_size, torch.float32)
        self._head_views: tuple[Tensor, Tensor, Tensor, Tensor] = (self._logits[:0],) * 4
        phases = _PHASES_A_LAYER * config.layers
        self._phases = torch.zeros(phases * _PHASE_BYTES, dtype=torch.uint8)

    def _buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self._region.take(elements * dtype.itemsize).view(dtype)

    def _head_buffers(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [rows, hidden] fp32; its terms, rows padded to 32; [rows, vocab] fp32."""
        config = self.config
        needed = rows * config.vocab_size
        if self._logits.numel() < needed:
            self._logits = self._buffer(needed, torch.float32)
        if self._head_views[3].shape[0] != rows:
            x = torch.empty(rows, config.hidden_size)
            terms = torch.empty(2, _padded(rows), config.hidden_size, dtype=self._number)
            self._head_views = (x, terms[0], terms[1], self._logits[:needed].view(rows, -1))
        return self._head_views

    def _scratch_for(self, threads: int) -> Tensor:
        if self._scratch.numel() < threads * self._scratch_bytes:
            self._scratch = self._region.take(threads * self._scratch_bytes)
        return self._scratch

    def _fresh_phases(self, count: int) -> int:
        address = self._phases.data_ptr()
        ctypes.memset(address, 0, count * _PHASE_BYTES)
        return address


def _padded(rows: int) -> int:
    return -(-rows // _TILE_ROWS) * _TILE_ROWS
