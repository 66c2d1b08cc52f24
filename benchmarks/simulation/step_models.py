"""How long a step takes on a device: from a roofline, or from coefficients that were measured.

Both answer the same question: given what one step holds, how many milliseconds does it take?
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from engine.step_time import StepShape, StepTimes
from engine.types import EDGE_TARGETS, ModelDescription, ModuleSpec

GB = 1e9


@dataclass(slots=True)
class StepContents:
    """What one step holds, in the words of its cost."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    sampled_rows: int = 0
    kv_tokens: int = 0  # read: the context of every row, once
    attention_pairs: int = 0  # (query, key), of all rows
    prefill_pairs: int = 0  # of these, those of prefill chunks
    adapter_bytes: int = 0  # of the distinct adapters touched
    token_ranks: int = 0  # sum over tokens of their adapter's rank
    moved_bytes: int = 0  # copied inside the device's memory: forks, adapters moved together

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_rows


class StepModel(Protocol):
    """A device's speed. `copies_beside_steps`: adapter copies have a stream of their own."""

    @property
    def bus_bytes_per_ms(self) -> float: ...

    @property
    def copies_beside_steps(self) -> bool: ...

    def step_ms(self, step: StepContents, *, copying: bool) -> float:
        """Milliseconds of a step; `copying`: adapters arrive over the bus meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """max(bytes / bandwidth, flops / peak) + fixed, for an 8B Llama in int4 on one H200.

    Bandwidth is a measured copy; adapter rows read their A and B once a step. `compute_share` (how
    much of the peak prefill reaches) and `fixed_ms` (launches, host) are assumptions.
    """

    bandwidth: float = 4.3e12 / 1e3  # bytes per ms
    peak: float = 989e12 / 1e3  # bf16 flops per ms
    compute_share: float = 0.55
    bus_bytes_per_ms: float = 55e9 / 1e3  # PCIe 5 x16
    fixed_ms: float = 0.3
    weight_bytes: float = 4.76e9  # 6.98e9 x 0.53125, and lm_head in bf16
    linear_parameters: float = 6.98e9
    head_parameters: float = 128_256 * 4096
    kv_token_bytes: float = 128 * 1024
    activation_bytes: float = 7.9e6  # a token
    rank_bytes: float = 5.243e6  # of one adapter and rank, all seven linears
    attention_flops: float = 4.0 * 4096 * 32  # a (query, key) pair
    copies_beside_steps: bool = True

    def step_ms(self, step: StepContents, *, copying: bool) -> float:
        nbytes = (
            self.weight_bytes
            + step.kv_tokens * self.kv_token_bytes
            + step.tokens * self.activation_bytes
            + step.adapter_bytes
            + 2 * step.moved_bytes
        )
        flops = (
            2 * self.linear_parameters * step.tokens
            + 2 * self.head_parameters * step.sampled_rows
            + self.attention_flops * step.attention_pairs
            + self.rank_bytes * step.token_ranks  # two flops a parameter of two bytes
        )
        # what the bus writes takes its part of the memory's bandwidth
        bandwidth = self.bandwidth - (self.bus_bytes_per_ms if copying else 0.0)
        return self.fixed_ms + max(nbytes / bandwidth, flops / (self.peak * self.compute_share))


@dataclass(frozen=True, slots=True)
class Measured:
    """A linear model from a measurement; JSON with these names. Copies go between the steps."""

    fixed_ms: float
    prefill_token_ms: float
    decode_row_ms: float
    kv_token_ms: float = 0.0
    adapter_byte_ms: float = 0.0
    token_rank_ms: float = 0.0
    moved_byte_ms: float = 0.0
    bus_bytes_per_ms: float = 4.0e6
    copies_beside_steps: bool = False

    def step_ms(self, step: StepContents, *, copying: bool) -> float:
        return (
            self.fixed_ms
            + step.prefill_tokens * self.prefill_token_ms
            + step.decode_rows * self.decode_row_ms
            + step.kv_tokens * self.kv_token_ms
            + step.adapter_bytes * self.adapter_byte_ms
            + step.token_ranks * self.token_rank_ms
            + step.moved_bytes * self.moved_byte_ms
        )


@dataclass(frozen=True, slots=True)
class Learned:
    """What an engine has learned of its own steps: the file that it keeps between starts."""

    times: StepTimes
    bus_bytes_per_ms: float = 4.0e6
    copies_beside_steps: bool = False

    def step_ms(self, step: StepContents, *, copying: bool) -> float:
        shape = StepShape(
            step.prefill_tokens,
            step.decode_rows,
            step.kv_tokens,
            step.prefill_pairs,
            step.adapter_bytes,
        )
        return self.times.mean_ms(shape)


@dataclass(frozen=True, slots=True)
class Device:
    """A step model with the memory and the model that go with it."""

    description: ModelDescription
    extents: int
    steps: StepModel
    rank_bytes: int  # of an adapter on all seven linears, per rank
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, where not the default

    @property
    def arena_bytes(self) -> int:
        return self.extents * self.description.kv_block_bytes

    def with_arena(self, nbytes: float) -> "Device":
        return replace(self, extents=int(nbytes // self.description.kv_block_bytes))


LLAMA_8B_SHAPES = (
    ("q_proj", 4096, 4096),
    ("k_proj", 4096, 1024),
    ("v_proj", 4096, 1024),
    ("o_proj", 4096, 4096),
    ("gate_proj", 4096, 14336),
    ("up_proj", 4096, 14336),
    ("down_proj", 14336, 4096),
)


def llama_8b(*, max_rank: int = 256) -> ModelDescription:
    """Llama 3.1 8B as the engine describes it; a KV block has 2 MiB."""
    modules = [
        ModuleSpec(f"model.layers.{layer}.{target}", target, layer, in_features, out_features, 1.0)
        for layer in range(32)
        for target, in_features, out_features in LLAMA_8B_SHAPES
    ]
    modules += [
        ModuleSpec(target, target, -1, 128_256, 4096, 1.0)
        if target == "embed_tokens"
        else ModuleSpec(target, target, -1, 4096, 128_256, 1.0)
        for target in EDGE_TARGETS
    ]
    return ModelDescription(
        name="llama-8b-int4",
        architecture="llama",
        base_digest="simulated",
        tokenizer_digest="simulated",
        modules=tuple(modules),
        layers=32,
        hidden_size=4096,
        vocab_size=128_256,
        context_length=16_384,
        max_rank=max_rank,
        eos_token_ids=(2,),
        kv_block_bytes=16 * 128 * 1024,
        adapter_dtype="bf16",
        backend="simulated",
    )


def rank_bytes(description: ModelDescription) -> int:
    """Bytes of one rank of an adapter on every linear of the blocks, in bf16."""
    return 2 * sum(m.in_features + m.out_features for m in description.modules if m.layer >= 0)


H200_SETTINGS = {
    "host_cache_bytes": int(1000 * GB),
    "max_slots": 1024,
    "max_loads": 8,
    "max_batch_tokens": 2048,
    "prefill_chunk": 512,
    "max_running": 256,
    "max_waiting": 4096,
    "max_waiting_per_tenant": 1024,
    "copy_bytes_per_step": int(0.5 * GB),
}


def h200(arena_bytes: float = 110 * GB) -> Device:
    """One H200 with an 8B model in int4: 141 GB less weights, activations and graphs."""
    description = llama_8b()
    extents = int(arena_bytes // description.kv_block_bytes)
    return Device(description, extents, Roofline(), rank_bytes(description), H200_SETTINGS)


def measured_steps(path: Path) -> StepModel:
    """A `Measured` as JSON, or the step-time file of an engine.

    Raises ValueError, naming the field, on what is neither.
    """
    text = path.read_text()
    values = json.loads(text)
    if isinstance(values, dict) and "coefficients" in values:
        return Learned(StepTimes.from_json(text))
    known = {entry.name for entry in fields(Measured)}
    if not isinstance(values, dict) or not values.keys() <= known:
        raise ValueError(f"{path} must be a JSON object of {', '.join(sorted(known))}")
    for name in ("fixed_ms", "prefill_token_ms", "decode_row_ms"):
        if name not in values:
            raise ValueError(f"{path} lacks {name}")
    return Measured(**values)


def measured_device(path: Path, *, arena_bytes: float = 256 * 2**20) -> Device:
    """The embedded 135M model on a device whose step times `path` holds.

    Raises OSError or ValueError when it does not.
    """
    shapes = (("q_proj", 576, 576), ("k_proj", 576, 192), ("v_proj", 576, 192),
              ("o_proj", 576, 576), ("gate_proj", 576, 1536), ("up_proj", 576, 1536),
              ("down_proj", 1536, 576))  # fmt: skip
    modules = tuple(
        ModuleSpec(f"model.layers.{layer}.{target}", target, layer, inputs, outputs, 1.0)
        for layer in range(30)
        for target, inputs, outputs in shapes
    )
    description = replace(
        llama_8b(),
        name="smollm2-135m",
        modules=modules,
        layers=30,
        hidden_size=576,
        vocab_size=49_152,
        context_length=8192,
        kv_block_bytes=16 * 2 * 30 * 3 * 64 * 2,
    )
    extents = int(arena_bytes // description.kv_block_bytes)
    return Device(description, extents, measured_steps(path), rank_bytes(description))
