"""The forward pass of the Llama family over one flattened batch of tokens.

Activations are fp32, [T, ...]; rows of any adapter and of none are mixed. Linears that share an
input are one product (q, k, v | gate, up), and so are their adapters' updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.lora import Lora
from engine.kernels.metadata import LayerGroups, LoraBatch, SliceGroup, layer_groups
from engine.model.attention import AttentionBatch, QueryChunk, token_rows
from engine.model.form_cache import NOTHING_KEPT, FormCache
from engine.model.give_back import give_back
from engine.model.kv_cache import KvCache
from engine.model.linear import EXACT, Linear, PathChoice
from engine.model.loader import Checkpoint
from engine.model.norm import rms_norm
from engine.model.rope import Rope, RopeAngles, rotate
from engine.types import ModuleSpec


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's rows. All tensors are int64 [T]."""

    tokens: Tensor
    positions: Tensor
    chunks: Sequence[QueryChunk]  # in the order of their rows
    lora: LoraBatch | None  # None: no row uses an adapter


@dataclass(frozen=True, slots=True)
class _Where:
    """What all layers share of one step."""

    token_rows: Tensor  # [T] int64, where each token's keys and values go, see KvCache
    angles: RopeAngles
    attention: AttentionBatch


class Llama:
    """The base model's weights, ready to run."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        choice: PathChoice,
        cache: KvCache,
        lora: Lora,
        modules: tuple[ModuleSpec, ...],
        forms: FormCache = NOTHING_KEPT,
        *,
        batch_invariant: bool,
    ) -> None:
        """`modules`: as in ModelDescription; adapters name them by index. `forms`: of this base."""
        config = self.config = checkpoint.config
        self._batch_invariant = batch_invariant
        self._cache = cache
        self._lora = lora
        divisors = checkpoint.rope_divisors()
        self._rope = Rope(config, None if divisors is None else torch.from_numpy(divisors))
        self._embedding = checkpoint.weight("model.embed_tokens.weight")
        self._norm = _vector(checkpoint, "model.norm.weight")
        head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        self._head = Linear([checkpoint.weight(head)], EXACT, name="head", forms=forms)
        give_back(checkpoint, forms)
        self._blocks: list[_Block] = []
        for layer in range(config.layers):
            groups = layer_groups(modules, layer)
            self._blocks.append(_Block(checkpoint, layer, choice, groups, forms))
            give_back(checkpoint, forms)  # what was read lies in its served form now
        index = {module.target: i for i, module in enumerate(modules) if module.layer < 0}
        self._embedding_group = SliceGroup.of(modules, [index["embed_tokens"]])
        self._head_group = SliceGroup.of(modules, [index["lm_head"]])

    def forward(self, batch: StepBatch) -> Tensor:
        """Runs all blocks and writes the KV cache: [T, hidden] fp32, before the last norm."""
        hidden = self._embed(batch)
        angles = self._rope.at(batch.positions)
        attention = AttentionBatch(self._cache, batch.chunks, batch_invariant=self._batch_invariant)
        where = _Where(token_rows(self._cache, batch.chunks), angles, attention)
        for layer, block in enumerate(self._blocks):
            block.forward(self, layer, hidden, where, batch.lora)
        return hidden

    def logits(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        """hidden: [R, hidden], the rows whose logits are wanted -> [R, vocab] fp32."""
        x = rms_norm(hidden, self._norm, self.config.norm_eps)
        return self.project(self._head, self._head_group, lora, x)

    def project(
        self, linear: Linear, group: SliceGroup, lora: LoraBatch | None, x: Tensor
    ) -> Tensor:
        """The base linear and its rows' adapters. x: [T, in] -> [T, out]."""
        y = linear(x)
        if lora is not None:
            self._lora.linear(group, lora, x, y)
        return y

    def linears_by_shape(self) -> list[list[Linear]]:
        """Every linear; those of one list have one shape."""
        kinds = zip(*((b.qkv, b.o, b.gate_up, b.down) for b in self._blocks), strict=True)
        return [*map(list, kinds), [self._head]]

    def _embed(self, batch: StepBatch) -> Tensor:
        hidden = torch.from_numpy(self._embedding.take(batch.tokens.numpy()))
        if batch.lora is not None:
            self._lora.embedding(self._embedding_group, batch.lora, batch.tokens, hidden)
        return hidden

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: Tensor | None,
        where: _Where,
    ) -> Tensor:
        """qkv: [T, q_width + 2 kv_width] -> [T, q_width]. Writes the cache on the way.

        `qk_norm`: [heads + kv_heads, head_dim], the norms' weights.
        """
        config = self.config
        rows, rotated = qkv.shape[0], config.heads + config.kv_heads
        split = rotated * config.head_dim
        qk = qkv[:, :split].view(rows, rotated, config.head_dim)
        if qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_dim,), None, config.norm_eps) * qk_norm
        qk = rotate(qk, where.angles)
        q, k = qk[:, : config.heads], qk[:, config.heads :]
        v = qkv[:, split:].view(rows, config.kv_heads, config.head_dim)
        self._cache.write(layer, where.token_rows, k.reshape(rows, -1), qkv[:, split:])
        return where.attention.attend(layer, q.contiguous(), k, v)


class _Block:
    """One transformer block."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        choice: PathChoice,
        groups: LayerGroups,
        forms: FormCache,
    ) -> None:
        prefix = f"model.layers.{layer}."

        def linear(*names: str, bias: Tensor | None = None) -> Linear:
            weights = [checkpoint.weight(f"{prefix}{name}.weight") for name in names]
            return Linear(weights, choice, bias, name=f"{prefix}{names[0]}", forms=forms)

        config, qkv = checkpoint.config, [f"self_attn.{name}_proj" for name in "qkv"]
        bias = qk_norm = None
        if config.qkv_bias:
            bias = torch.cat([_vector(checkpoint, f"{prefix}{name}.bias") for name in qkv])
        if config.qk_norm:
            q, k = (_vector(checkpoint, f"{prefix}self_attn.{n}_norm.weight") for n in "qk")
            qk_norm = torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))
        self.qk_norm = qk_norm
        self.groups = groups
        self.input_norm = _vector(checkpoint, f"{prefix}input_layernorm.weight")
        self.qkv = linear(*qkv, bias=bias)
        self.o = linear("self_attn.o_proj")
        self.mlp_norm = _vector(checkpoint, f"{prefix}post_attention_layernorm.weight")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")

    def forward(
        self, model: Llama, layer: int, hidden: Tensor, where: _Where, lora: LoraBatch | None
    ) -> None:
        """Adds the block's two residual updates to hidden: [T, hidden], in place."""
        eps, inner = model.config.norm_eps, model.config.intermediate_size
        x = rms_norm(hidden, self.input_norm, eps)
        qkv = model.project(self.qkv, self.groups.qkv, lora, x)
        x = model.attend(layer, qkv, self.qk_norm, where)
        hidden.add_(model.project(self.o, self.groups.o, lora, x))
        x = rms_norm(hidden, self.mlp_norm, eps)
        y = model.project(self.gate_up, self.groups.gate_up, lora, x)
        x = F.silu(y[:, :inner]).mul_(y[:, inner:])
        hidden.add_(model.project(self.down, self.groups.down, lora, x))


def _vector(checkpoint: Checkpoint, name: str) -> Tensor:
    return torch.from_numpy(checkpoint.weight(name).decode())
