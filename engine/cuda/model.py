"""The forward pass of the Llama family on the device: the same maths as `engine.model.llama`.

Activations are bf16 (fp32 on the fp32 path), [T, ...]; sums, norms and logits fp32. What surrounds
a block's products is fused: a residual with the norm that follows, rotation with the write to the
cache, the gate. Nothing here depends on what a step's buffers hold, so that it can be captured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda.device import Device
from engine.cuda.faces import DeviceAttention, Faces
from engine.cuda.linear import DeviceLinear, Head, Precision, decoded
from engine.cuda.upload import Upload
from engine.kernels.int4 import Int4Gemm
from engine.kernels.lora_cuda import DeviceBatch, DeviceLora
from engine.kernels.metadata import LayerGroups, SliceGroup, layer_groups
from engine.kernels.pointwise import HeadNorm
from engine.model.form_cache import NOTHING_KEPT, FormCache
from engine.model.give_back import give_back
from engine.model.kv_cache import KvCache
from engine.model.loader import Checkpoint
from engine.model.rope import Rope
from engine.types import ModuleSpec


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step's rows on the device. All tensors are int64 [T]."""

    tokens: Tensor
    positions: Tensor
    token_rows: Tensor  # see KvCache; below 0 for padding
    lora: DeviceBatch | None  # None: no row uses an adapter


@dataclass(frozen=True, slots=True)
class Memories:
    """What of a model lies in the arena, and reads it."""

    cache: KvCache
    lora: DeviceLora
    attention: DeviceAttention


class DeviceLlama:
    """The base model's weights on the device, ready to run over any arena."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        faces: Faces,
        device: Device,
        modules: tuple[ModuleSpec, ...],
        forms: FormCache = NOTHING_KEPT,
    ) -> None:
        """`modules`: as in ModelDescription; adapters name them by index. `forms`: of this base."""
        config = self.config = checkpoint.config
        self.dtype = precision.dtype
        self._faces = faces
        widest = max(
            config.q_width + 2 * config.kv_width, 2 * config.intermediate_size, config.hidden_size
        )
        gemm = faces.int4(
            device.torch_device, max_out_features=widest, batch_invariant=precision.batch_invariant
        )
        divisors = checkpoint.rope_divisors()
        rope = Rope(config, None if divisors is None else torch.from_numpy(divisors))
        upload = Upload(device)
        self._cos = rope.cos.to(upload.torch_device)
        self._sin = rope.sin.to(upload.torch_device)
        self._embedding = decoded(
            [checkpoint.weight("model.embed_tokens.weight")], precision.dtype, upload
        )
        head = self._embedding
        if not config.tied_head:
            head = decoded([checkpoint.weight("lm_head.weight")], precision.dtype, upload)
        self._head = Head(head, batch_invariant=precision.batch_invariant)
        self._norm = _vector(checkpoint, "model.norm.weight", upload.torch_device)
        self._blocks: list[_Block] = []
        for layer in range(config.layers):
            give_back(checkpoint, forms)  # what was read lies on the device now
            groups = layer_groups(modules, layer)
            self._blocks.append(
                _Block(checkpoint, layer, precision, faces, gemm, upload, groups, forms)
            )
        upload.finish()
        give_back(checkpoint, forms)
        index = {module.target: i for i, module in enumerate(modules) if module.layer < 0}
        self._embedding_group = SliceGroup.of(modules, [index["embed_tokens"]])
        self._head_group = SliceGroup.of(modules, [index["lm_head"]])

    def forward(self, step: DeviceStep, memories: Memories) -> Tensor:
        """Runs all blocks and writes the KV cache: [T, hidden] after the last norm."""
        hidden = F.embedding(step.tokens, self._embedding)
        if step.lora is not None:
            memories.lora.embedding(self._embedding_group, step.lora, step.tokens, hidden)
        cos, sin = (table.index_select(0, step.positions) for table in (self._cos, self._sin))
        eps = self.config.norm_eps
        x = self._faces.rms_norm(hidden, self._blocks[0].input_norm, eps)
        following = [*(block.input_norm for block in self._blocks[1:]), self._norm]
        for layer, (block, norm) in enumerate(zip(self._blocks, following, strict=True)):
            update = block.forward(self, layer, hidden, x, (cos, sin), step, memories)
            x = self._faces.add_rms_norm(hidden, update, norm, eps)
        return x

    def logits(self, x: Tensor, lora: DeviceBatch | None, memories: Memories) -> Tensor:
        """x: [R, hidden] of `forward`, the rows whose logits are wanted -> [R, vocab] fp32."""
        y = self._head(x)
        if lora is not None:
            memories.lora.linear(self._head_group, lora, x, y)
        return y


class _Block:
    """One transformer block."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        precision: Precision,
        faces: Faces,
        gemm: Int4Gemm,
        upload: Upload,
        groups: LayerGroups,
        forms: FormCache,
    ) -> None:
        prefix = f"model.layers.{layer}."

        def linear(*names: str, bias: Tensor | None = None) -> DeviceLinear:
            weights = [checkpoint.weight(f"{prefix}{name}.weight") for name in names]
            kept = f"{prefix}{names[0]}"
            return DeviceLinear(weights, precision, gemm, upload, bias, name=kept, forms=forms)

        config, qkv = checkpoint.config, [f"self_attn.{name}_proj" for name in "qkv"]
        device = upload.torch_device
        bias = None
        if config.qkv_bias:
            bias = torch.cat([_vector(checkpoint, f"{prefix}{name}.bias", device) for name in qkv])
        self._head_norm: HeadNorm | None = None
        if config.qk_norm:
            q, k = (_vector(checkpoint, f"{prefix}self_attn.{n}_norm.weight", device) for n in "qk")
            both = torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))
            self._head_norm = HeadNorm(both, config.norm_eps)
        self._faces = faces
        self._groups = groups
        self.input_norm = _vector(checkpoint, f"{prefix}input_layernorm.weight", device)
        self._qkv = linear(*qkv, bias=bias)
        self._o = linear("self_attn.o_proj")
        self._mlp_norm = _vector(checkpoint, f"{prefix}post_attention_layernorm.weight", device)
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")

    def forward(
        self,
        model: DeviceLlama,
        layer: int,
        hidden: Tensor,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        step: DeviceStep,
        memories: Memories,
    ) -> Tensor:
        """x: [T, hidden], normed. Adds attention's update to hidden in place; returns the MLP's."""
        config, faces, cache = model.config, self._faces, memories.cache

        def project(linear: DeviceLinear, group: SliceGroup, x: Tensor) -> Tensor:
            y = linear(x)
            if step.lora is not None:
                memories.lora.linear(group, step.lora, x, y)
            return y

        qkv = project(self._qkv, self._groups.qkv, x)
        q = faces.rotate_and_write(
            qkv,
            *angles,
            step.token_rows,
            cache.keys(layer),
            cache.values(layer),
            heads=config.heads,
            norm=self._head_norm,
        )
        x = memories.attention.attend(layer, q, q, q)  # keys and values are in the cache
        x = faces.add_rms_norm(
            hidden, project(self._o, self._groups.o, x), self._mlp_norm, config.norm_eps
        )
        x = faces.silu_gate(project(self._gate_up, self._groups.gate_up, x))
        return project(self._down, self._groups.down, x)


def _vector(checkpoint: Checkpoint, name: str, device: torch.device) -> Tensor:
    return torch.from_numpy(checkpoint.weight(name).decode()).to(device)
