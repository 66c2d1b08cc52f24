"""A base model on the fake device, without the rest of its executor, and the tensors it serves."""

from collections.abc import Iterator
from dataclasses import fields

from torch import Tensor

from engine.config import EngineConfig
from engine.cuda.linear import DeviceLinear, Precision
from engine.cuda.model import DeviceLlama
from engine.model.description import describe, identify
from engine.model.form_cache import open_forms
from engine.model.kv_cache import block_bytes
from engine.model.loader import open_checkpoint
from tests.fake_device import FakeDevice, plain_faces


def load_on_fake_device(config: EngineConfig) -> DeviceLlama:
    checkpoint = open_checkpoint(config.base_model)
    description = describe(
        checkpoint,
        identify(checkpoint, config.data_dir / "base-models"),
        max_rank=8,
        kv_block_bytes=block_bytes(checkpoint.config, "bf16"),
        adapter_dtype="bf16",
        backend="cuda",
    )
    device = FakeDevice()
    forms = open_forms(
        config.data_dir, description.base_digest, {"backend": "cuda"}, config.form_cache_bytes
    )
    model = DeviceLlama(
        checkpoint,
        Precision(config.linear_path, config.batch_invariant),
        plain_faces(device),
        device,
        description.modules,
        forms,
    )
    forms.close()
    return model


def device_weights(model: DeviceLlama) -> Iterator[Tensor]:
    """Of embedding, head and linears, each once."""
    yield model._embedding
    if model._head.weight is not model._embedding:
        yield model._head.weight
    for block in model._blocks:
        for linear in (block._qkv, block._o, block._gate_up, block._down):
            yield from _tensors_of(linear)


def _tensors_of(linear: DeviceLinear) -> Iterator[Tensor]:
    for form in (linear.int4, linear.fp8):
        if form is not None:
            held = (getattr(form, field.name) for field in fields(form))
            yield from (part for part in held if isinstance(part, Tensor))
    if linear.dense is not None:
        yield linear.dense
