"""Where tensors go on the base, with which rank and scale; nothing is dropped silently."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from engine.adapters.config import AdapterConfig, check_config
from engine.adapters.plan import AdapterPlan, plan_adapter
from engine.adapters.safetensors_header import parse_header
from engine.errors import AdapterRefused
from engine.types import LAYER_TARGETS, ModelDescription
from tests.adapter_files import (
    PREFIX,
    Tensor,
    config_json,
    lora_tensors,
    pack,
    tensor,
    tiny_description,
    tiny_embedding,
)

TINY = tiny_description()
HEAD = f"{PREFIX}lm_head"
EMBED = f"{PREFIX}model.embed_tokens"


def config_of(**changes: Any) -> AdapterConfig:
    report = check_config(config_json(**changes), 256)
    assert report.config is not None, report.codes
    return report.config


def plan_of(
    tensors: dict[str, Tensor], description: ModelDescription = TINY, **config: Any
) -> AdapterPlan:
    data = pack(tensors)
    length = int.from_bytes(data[:8], "little")
    header = parse_header(data[8 : 8 + length], len(data))
    return plan_adapter(config_of(**config), header, description)


def codes(plan: AdapterPlan) -> list[str]:
    return [f.code for f in plan.findings]


class TestPlacing:
    @pytest.mark.parametrize("size", range(1, 8))
    def test_every_subset_of_the_seven_targets_is_served(self, size: int) -> None:
        for targets in combinations(LAYER_TARGETS, size):
            plan = plan_of(lora_tensors(TINY, targets=targets))
            assert plan.findings == ()
            assert {TINY.modules[p.module].target for p in plan.pairs} == set(targets)
            assert plan.coverage == f"{4 * size} of {4 * size} tensors placed"

    def test_pairs_come_in_the_order_of_the_modules_with_their_own_tensors(self) -> None:
        plan = plan_of(dict(reversed(lora_tensors(TINY).items())))
        assert [p.module for p in plan.pairs] == list(range(14))
        for pair in plan.pairs:
            module = TINY.modules[pair.module]
            assert module.name in pair.a.name
            assert ".lora_A." in pair.a.name
            assert ".lora_B." in pair.b.name
            assert pair.a.shape == (4, module.in_features)
            assert pair.b.shape == (module.out_features, 4)

    def test_embedding_and_head_are_served(self) -> None:
        plan = plan_of(lora_tensors(TINY, targets=["embed_tokens", "lm_head"]))
        assert [p.embedding for p in plan.pairs] == [True, False]
        assert codes(plan) == ["embedding_only_input"]
        assert plan.failures == ()

    def test_an_adapter_name_between_factor_and_weight_is_accepted(self) -> None:
        renamed = {
            name.replace(".weight", ".default.weight"): value
            for name, value in lora_tensors(TINY).items()
        }
        assert plan_of(renamed).placed == 28

    def test_tensors_on_one_layer_only_are_served(self) -> None:
        plan = plan_of(lora_tensors(TINY, layers=[1]))
        assert {TINY.modules[p.module].layer for p in plan.pairs} == {1}

    def test_a_renamed_prefix_matches_nothing_and_says_so(self) -> None:
        renamed = {f"my_{name}": value for name, value in lora_tensors(TINY).items()}
        plan = plan_of(renamed)
        assert codes(plan)[:2] == ["no_tensor_matched", "unknown_prefix"]
        assert "0 of 28 tensors matched" in plan.findings[0].message
        with pytest.raises(AdapterRefused, match="0 of 28"):
            plan.require()

    def test_modules_that_the_base_lacks_are_named(self) -> None:
        tensors = lora_tensors(TINY)
        tensors[f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_A.weight"] = tensor(
            np.ones((4, 4))
        )
        plan = plan_of(tensors)
        assert codes(plan) == ["module_not_in_base"]
        assert "qkv_proj" in plan.findings[0].message
        assert plan.coverage == "28 of 29 tensors placed"

    def test_placed_ignored_and_refused_add_up(self) -> None:
        tensors = lora_tensors(TINY, targets=["lm_head"])
        tensors[f"{HEAD}.base_layer.weight"] = tensor(tiny_embedding())
        tensors[f"{HEAD}.lora_magnitude_vector"] = tensor(np.ones(40))
        plan = plan_of(tensors)
        refused = sum(f.figures["tensors"] for f in plan.failures)
        assert (plan.placed, plan.ignored, refused) == (2, 1, 1)
        assert plan.tensors == 4

    def test_a_report_on_hundreds_of_bad_pairs_stays_small(self) -> None:
        deep = tiny_description(layers=40)
        halves = {n: t for n, t in lora_tensors(deep).items() if ".lora_A." in n}
        plan = plan_of(halves, deep)
        assert codes(plan) == ["missing_pair"] * 20
        assert plan.findings[-1].figures["more"] == 280 - 20


class TestRanksAndScales:
    @pytest.mark.parametrize("rslora", [False, True])
    @pytest.mark.parametrize("rank", [1, 8, 16, 64])
    def test_the_scale_follows_rank_and_flavour(self, rank: int, rslora: bool) -> None:
        plan = plan_of(lora_tensors(TINY, rank=rank), r=rank, lora_alpha=32, use_rslora=rslora)
        expected = 32 / (math.sqrt(rank) if rslora else rank)
        assert {p.scale for p in plan.pairs} == {expected}
        assert {p.rank for p in plan.pairs} == {rank}

    def test_patterns_give_modules_their_own_rank_and_scale(self) -> None:
        tensors = lora_tensors(TINY, rank=lambda m: 2 if m.target == "q_proj" else 4)
        plan = plan_of(
            tensors, r=4, rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.1\..*": 40}
        )
        assert plan.findings == ()
        for pair in plan.pairs:
            module = TINY.modules[pair.module]
            rank = 2 if module.target == "q_proj" else 4
            assert (pair.rank, pair.scale) == (rank, (40 if module.layer == 1 else 8) / rank)

    def test_a_rank_that_the_config_does_not_give_is_refused(self) -> None:
        plan = plan_of(lora_tensors(TINY, rank=4), r=8)
        assert set(codes(plan)) == {"rank_mismatch"}
        assert plan.findings[0].figures == {"rank": 4, "declared": 8}
        assert "send the config that was saved with these weights" in plan.findings[0].message

    def test_a_rank_above_what_the_base_is_served_with_is_refused(self) -> None:
        plan = plan_of(lora_tensors(TINY, rank=65), r=65)
        assert set(codes(plan)) == {"rank_above_limit"}
        assert "64" in plan.findings[0].message


class TestShapes:
    @pytest.mark.parametrize(
        ("suffix", "shape"),
        [("A", (4, 17)), ("A", (16, 4)), ("A", (64,)), ("A", (4, 16, 1)), ("B", (17, 4)),
         ("B", (16, 5)), ("B", (4, 16))],
    )  # fmt: skip
    def test_a_factor_that_does_not_fit_its_module_is_refused(
        self, suffix: str, shape: tuple[int, ...]
    ) -> None:
        tensors = lora_tensors(TINY)
        name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{suffix}.weight"
        tensors[name] = tensor(np.ones(shape))
        plan = plan_of(tensors)
        assert codes(plan)[0] == "shape_mismatch"
        assert plan.placed == 26

    @pytest.mark.parametrize("rows", [38, 42])
    def test_another_vocabulary_is_refused_with_this_bases_size(self, rows: int) -> None:
        tensors = lora_tensors(TINY, targets=["embed_tokens"])
        tensors[f"{EMBED}.lora_embedding_A"] = tensor(np.ones((4, rows)))
        plan = plan_of(tensors)
        assert codes(plan) == ["vocabulary_changed"]
        assert plan.findings[0].figures == {"vocab_size": 40}

    @pytest.mark.parametrize("vocab", [32_000, 49_152, 128_256, 256_000])
    def test_large_vocabularies_are_served(self, vocab: int) -> None:
        large = replace(tiny_description(vocab=64), vocab_size=vocab)
        modules = tuple(
            replace(m, out_features=vocab) if m.target == "lm_head" else m for m in large.modules
        )
        large = replace(large, modules=modules)
        tensors = lora_tensors(large, rank=1, targets=["lm_head"])
        assert plan_of(tensors, large, r=1).findings == ()


class TestAgainstTheConfig:
    def test_layers_that_the_config_does_not_name_warn_and_the_tensors_decide(self) -> None:
        plan = plan_of(lora_tensors(TINY), layers_to_transform=[0])
        assert codes(plan) == ["layers_to_transform_ignored"]
        assert plan.placed == 28

    def test_agreeing_layers_and_targets_are_silent(self) -> None:
        plan = plan_of(
            lora_tensors(TINY, layers=[1], targets=["q_proj"]),
            layers_to_transform=1,
            target_modules=["q_proj"],
        )
        assert plan.findings == ()

    def test_tensors_beyond_target_modules_warn(self) -> None:
        plan = plan_of(lora_tensors(TINY), target_modules=["q_proj"])
        assert codes(plan) == ["target_modules_ignored"]
        assert plan.findings[0].figures == {"modules": 12}

    def test_targets_without_tensors_are_mentioned(self) -> None:
        plan = plan_of(lora_tensors(TINY, targets=["q_proj"]), target_modules=["q_proj", "xxx"])
        assert [(f.code, f.severity) for f in plan.findings] == [
            ("targets_without_tensors", "info")
        ]

    def test_tied_adapters_are_refused_only_where_they_would_matter(self) -> None:
        linear = plan_of(lora_tensors(TINY), ensure_weight_tying=True)
        edge = plan_of(lora_tensors(TINY, targets=["embed_tokens"]), ensure_weight_tying=True)
        assert codes(linear) == []
        assert "weight_tying" in codes(edge)
