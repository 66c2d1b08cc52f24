"""Every layout of tensor names that trainers are known to write: placed, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.findings import CODES
from engine.adapters.plan import REMEDIES
from engine.adapters.tensor_names import BaseWeight, LoraFactor, RefusedName, parse_name

L0 = "base_model.model.model.layers.0"
Q = "model.layers.0.self_attn.q_proj"

PLACED = {
    f"{L0}.self_attn.q_proj.lora_A.weight": LoraFactor(Q, "A", False),
    f"{L0}.self_attn.q_proj.lora_B.weight": LoraFactor(Q, "B", False),
    f"{L0}.self_attn.q_proj.lora_A.default.weight": LoraFactor(Q, "A", False),
    f"{L0}.self_attn.q_proj.lora_B.my-adapter_2.weight": LoraFactor(Q, "B", False),
    "base_model.model.lm_head.lora_A.weight": LoraFactor("lm_head", "A", False),
    "base_model.model.model.embed_tokens.lora_embedding_A": LoraFactor(
        "model.embed_tokens", "A", True
    ),
    "base_model.model.model.embed_tokens.lora_embedding_B.default": LoraFactor(
        "model.embed_tokens", "B", True
    ),
    "base_model.model.emb.lora_embedding_A": LoraFactor("emb", "A", True),
    "base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_A.weight": LoraFactor(
        "gpt_neox.layers.0.attention.query_key_value", "A", False
    ),
    "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight": LoraFactor(
        "transformer.h.0.attn.c_attn", "B", False
    ),
    "base_model.model.model.decoder.layers.0.self_attn.v_proj.lora_A.weight": LoraFactor(
        "model.decoder.layers.0.self_attn.v_proj", "A", False
    ),
    "base_model.model.lm_head.base_layer.weight": BaseWeight("lm_head"),
    "base_model.model.model.embed_tokens.base_layer.weight": BaseWeight("model.embed_tokens"),
    # named in full; that the served base has no such module is found when it is placed
    f"{L0}.self_attn.qkv_proj.lora_A.weight": LoraFactor(
        "model.layers.0.self_attn.qkv_proj", "A", False
    ),
    "base_model.model.model.unembed_tokens.lora_A.weight": LoraFactor(
        "model.unembed_tokens", "A", False
    ),
    "base_model.model.language_model.model.layers.3.mlp.up_proj.lora_A.weight": LoraFactor(
        "language_model.model.layers.3.mlp.up_proj", "A", False
    ),
    "base_model.model.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": LoraFactor(
        "text_model.encoder.layers.0.self_attn.q_proj", "A", False
    ),
    "base_model.model.down_blocks.0.attentions.0.attn1.to_q.lora_A.weight": LoraFactor(
        "down_blocks.0.attentions.0.attn1.to_q", "A", False
    ),
}

REFUSED = {
    "base_model.model.score.weight": "full_weight",
    "base_model.model.lm_head.weight": "full_weight",
    "base_model.model.lin1.weight": "full_weight",
    "base_model.model.classifier.dense.weight": "full_weight",
    "base_model.model.lin1.bias": "bias_tensors",
    "base_model.model.roberta.encoder.layer.0.attention.self.key.base_layer.bias": "bias_tensors",
    "base_model.model.roberta.embeddings.LayerNorm.bias": "bias_tensors",
    f"{L0}.self_attn.q_proj.lora_B.bias": "bias_tensors",
    "base_model.model.classifier.original_module.dense.bias": "modules_to_save_tensors",
    "base_model.model.classifier.modules_to_save.dense.bias": "modules_to_save_tensors",
    "base_model.model.model.embed_tokens.modules_to_save.default.weight": "modules_to_save_tensors",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta":
        "trainable_token_tensors",
    "base_model.model.lin0.lora_A": "lora_without_weight",
    "base_model.model.lin0.lora_B.default": "lora_without_weight",
    "base_model.model.lin0.lora_E": "adalora_tensors",
    f"{L0}.mlp.down_proj.lora_magnitude_vector": "dora_tensors",
    f"{L0}.mlp.down_proj.lora_magnitude_vector.default.weight": "dora_tensors",
    f"{L0}.mlp.down_proj.lora_diag.weight": "kasa_tensors",
    "model.layers.36.self_attn.q_proj.lora_a": "mlx_names",
    "model.layers.36.self_attn.q_proj.lora_b": "mlx_names",
    "model.layers.0.self_attn.k_proj.linear.biases": "mlx_names",
    "base_model.unilora_theta_d": "unknown_tensor",
    "base_model.model.x.finegates_columns": "unknown_tensor",
    "bert.encoder.layer.0.output.adapters.md.adapter_down.0.weight": "unknown_tensor",
    f"{L0}.self_attn.k_proj.qzeros": "base_state_saved",
    f"{L0}.self_attn.k_proj.scales": "base_state_saved",
    f"{L0}.self_attn.k_proj.g_idx": "base_state_saved",
    f"{L0}.self_attn.k_proj.qweight": "base_state_saved",
    f"{L0}.self_attn.rotary_emb.inv_freq": "base_state_saved",
    f"{L0}.mlp.experts.base_layer.lora_A.weight": "expert_lora",
    f"{L0}.mlp.experts.lora_B": "expert_lora",
    f"{L0}.mlp.experts.gate_up_projs.3.lora_A.weight": "expert_lora",
    "single_transformer_blocks.0.proj_out.lora_A.lora_1.weight": "unknown_prefix",
    "model.layers.0.self_attn.q_proj.lora_A.weight": "unknown_prefix",
    "base_model.model.down_blocks.0.conv1.lora_A_1.default_0.weight": "unknown_tensor",
    "lora_transformer_single_transformer_blocks_17_attn_to_k.lora_down.weight": "kohya_names",
    "lora_unet_mid_block_attn.lora_up.weight": "kohya_names",
    "lora_te_text_model_encoder.alpha": "kohya_names",
    "": "unknown_tensor",
    "base_model.model.": "unknown_tensor",
    f"{L0}.q_proj.lora_A.a.b.weight": "unknown_tensor",
    f"{L0}.q_proj.lora_C.weight": "unknown_tensor",
    f"{L0}.q proj.lora_A.weight": "unknown_tensor",
    f"{L0}.q_proj.lora_A.weight\n": "unknown_tensor",
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_lora_factors_and_base_copies_are_recognised(name: str) -> None:
    assert parse_name(name) == PLACED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_with_its_own_reason(name: str) -> None:
    assert parse_name(name) == RefusedName(REFUSED[name])


def test_every_reason_is_in_the_table_and_has_a_remedy() -> None:
    codes = set(REFUSED.values())
    assert codes <= CODES.keys()
    assert codes == REMEDIES.keys()


def test_the_prefix_is_stripped_once() -> None:
    parsed = parse_name(f"base_model.model.{L0}.self_attn.q_proj.lora_A.weight")
    assert isinstance(parsed, LoraFactor)
    assert parsed.module.startswith("base_model.model.")


@given(st.text(max_size=80))
def test_no_name_raises(name: str) -> None:
    parse_name(name)
    parse_name(f"base_model.model.{name}.lora_A.weight")
