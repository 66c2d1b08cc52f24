"""Files that PEFT itself wrote are placed with PEFT's own ranks, scales and updates."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.adapters.blob import build_blob
from engine.adapters.manifest import check_adapter_folder, check_config, plan_adapter, read_header
from engine.adapters.sketch import weight_sketch
from engine.types import LAYER_TARGETS, AdapterBlob, AdapterModule, ModelDescription, ModuleSpec
from tests.adapter_files import tiny_description

ALL = list(LAYER_TARGETS)
CONFIGS: dict[str, dict[str, Any]] = {
    "two targets": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "all linear": {"r": 4, "target_modules": "all-linear"},
    "a regex": {"r": 4, "target_modules": r".*\.layers\.1\..*(gate|up)_proj"},
    "rank 1": {"r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]},
    "rsLoRA": {"r": 16, "lora_alpha": 24, "use_rslora": True, "target_modules": ALL},
    "one layer": {"r": 4, "target_modules": ALL, "layers_to_transform": [1]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL,
        "use_rslora": True,
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, r".*\.mlp\.\w+": 3, "q_proj": 5},
        "alpha_pattern": {r"^model\.layers\.1\..*": 20, "v_proj": 9},
    },
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "head": {"r": 4, "target_modules": ["lm_head"]},
}


@pytest.fixture(scope="module")
def llama_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config()).state_dict()


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def described(model: LlamaForCausalLM) -> ModelDescription:
    """`tiny_description` with this model's embedding."""
    weight = model.get_input_embeddings().weight.detach().numpy()
    sketch, norm = weight_sketch([weight], 40, 16), float(np.linalg.norm(weight))

    def with_weight(module: ModuleSpec) -> ModuleSpec:
        if module.layer >= 0:
            return module
        return ModuleSpec(
            module.name, module.target, -1, module.in_features, module.out_features, norm, sketch
        )

    tiny = tiny_description()
    return ModelDescription(
        **{f: getattr(tiny, f) for f in tiny.__dataclass_fields__ if f != "modules"},
        modules=tuple(with_weight(module) for module in tiny.modules),
    )


def saved(model: LlamaForCausalLM, config: dict[str, Any], folder: Path) -> PeftModel:
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT speaks of tied weights and of its own deprecations
        trained = get_peft_model(model, lora)
        trained.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    return trained


def update(blob: AdapterBlob, place: AdapterModule, module: ModuleSpec) -> np.ndarray:
    """scale * B A as the blob holds it (fp32), [out, in]."""
    numbers = blob.data.view(np.float32)
    a_at, b_at, rank = place.a_offset // 4, place.b_offset // 4, place.rank
    a = numbers[a_at : a_at + rank * module.in_features]
    b = numbers[b_at : b_at + rank * module.out_features].reshape(module.out_features, rank)
    a = a.reshape(-1, rank).T if module.target == "embed_tokens" else a.reshape(rank, -1)
    result: np.ndarray = place.scale * (b @ a)
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saved_is_served_as_peft_would(
    name: str, tmp_path: Path, llama_weights: dict[str, torch.Tensor]
) -> None:
    model = LlamaForCausalLM(llama_config())
    model.load_state_dict(llama_weights)
    description = described(model)
    trained = saved(model, CONFIGS[name], tmp_path)
    layers = {
        key.removeprefix("base_model.model."): layer
        for key, layer in trained.named_modules()
        if hasattr(layer, "get_delta_weight")
    }

    report = check_adapter_folder(tmp_path, description, 64)
    assert report.status in ("pass", "warn"), report.findings
    assert {f.code for f in report.findings if f.severity == "warn"} <= {
        "base_weight_ignored", "large_update",
    }  # fmt: skip

    config = check_config((tmp_path / "adapter_config.json").read_bytes(), 64).config
    assert config is not None
    weights = tmp_path / "adapter_model.safetensors"
    plan = plan_adapter(config, read_header(weights), description)
    assert {description.modules[p.module].name for p in plan.pairs} == set(layers)
    blob = build_blob(weights, plan, "fp32")
    for place in blob.layout.modules:
        module = description.modules[place.module]
        layer = layers[module.name]
        assert place.rank == layer.r["default"]
        assert place.scale == pytest.approx(layer.scaling["default"], rel=1e-12)
        expected = layer.get_delta_weight("default").detach().numpy()
        found = update(blob, place, module)
        found = found.T if module.target == "embed_tokens" else found
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
