"""The one buffer: every number where the layout says, rounded as torch rounds."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.blob import build_blob, layout_adapter
from engine.adapters.config import check_config
from engine.adapters.plan import AdapterPlan, plan_adapter
from engine.adapters.safetensors_header import read_header
from engine.adapters.tensor_data import to_bf16_bits, to_float32
from engine.errors import AdapterCorrupt, AdapterRefused
from engine.types import LAYER_TARGETS, AdapterBlob, AdapterModule, ModelDescription
from tests.adapter_files import (
    PREFIX,
    Tensor,
    config_json,
    lora_tensors,
    pack,
    pair_names,
    tensor,
    tiny_description,
)

TINY = tiny_description()
EVERYTHING = [*LAYER_TARGETS, "embed_tokens", "lm_head"]
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def planned(
    path: Path, tensors: dict[str, Tensor], description: ModelDescription = TINY, **config: Any
) -> AdapterPlan:
    path.write_bytes(pack(tensors))
    judged = check_config(config_json(**config), 256).config
    assert judged is not None
    return plan_adapter(judged, read_header(path), description).require()


def matrix(blob: AdapterBlob, offset: int, shape: tuple[int, int]) -> np.ndarray:
    """A matrix of the blob in float32."""
    item = 2 if blob.layout.dtype == "bf16" else 4
    raw = blob.data[offset : offset + shape[0] * shape[1] * item]
    if item == 2:
        return to_float32(raw.view(np.uint16), "BF16").reshape(shape)
    return raw.view(np.float32).reshape(shape)


def stored(item: Tensor) -> np.ndarray:
    raw = np.frombuffer(item.data, "<f4" if item.dtype == "F32" else "<u2")
    return to_float32(raw, item.dtype).reshape(item.shape)


def factors(blob: AdapterBlob, place: AdapterModule) -> tuple[np.ndarray, np.ndarray]:
    """(A, B) in the orientation of the file."""
    module = TINY.modules[place.module]
    b = matrix(blob, place.b_offset, (module.out_features, place.rank))
    if module.target == "embed_tokens":
        return matrix(blob, place.a_offset, (module.in_features, place.rank)).T, b
    return matrix(blob, place.a_offset, (place.rank, module.in_features)), b


class TestContent:
    @pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_every_factor_is_found_where_the_layout_says(
        self, tmp_path: Path, source: str, dtype: Any
    ) -> None:
        tensors = lora_tensors(TINY, dtype=source, targets=EVERYTHING)
        blob = build_blob(tmp_path / "w", planned(tmp_path / "w", tensors), dtype)
        assert [place.module for place in blob.layout.modules] == list(range(16))
        for place in blob.layout.modules:
            a_name, b_name = pair_names(TINY.modules[place.module])
            a, b = factors(blob, place)
            assert np.array_equal(a, stored(tensors[a_name]))
            assert np.array_equal(b, stored(tensors[b_name]))

    def test_ranks_are_true_and_scales_are_the_plans(self, tmp_path: Path) -> None:
        tensors = lora_tensors(TINY, rank=lambda m: 2 if m.target == "q_proj" else 4)
        plan = planned(tmp_path / "w", tensors, rank_pattern={"q_proj": 2}, use_rslora=True)
        layout = build_blob(tmp_path / "w", plan, "bf16").layout
        assert [(m.module, m.rank, m.scale) for m in layout.modules] == [
            (p.module, p.rank, p.scale) for p in plan.pairs
        ]
        assert layout.max_rank == 4

    def test_matrices_are_aligned_disjoint_and_the_gaps_are_zero(self, tmp_path: Path) -> None:
        plan = planned(tmp_path / "w", lora_tensors(TINY, rank=3, targets=EVERYTHING), r=3)
        blob = build_blob(tmp_path / "w", plan, "bf16")
        assert blob.data.dtype == np.uint8
        assert blob.data.ctypes.data % 64 == 0
        assert blob.data.nbytes == blob.layout.nbytes
        used = np.zeros(blob.layout.nbytes, bool)
        for place in blob.layout.modules:
            module = TINY.modules[place.module]
            for offset, width in (
                (place.a_offset, module.in_features),
                (place.b_offset, module.out_features),
            ):
                assert offset % 64 == 0
                span = slice(offset, offset + 2 * place.rank * width)
                assert not used[span].any()
                used[span] = True
        assert not blob.data[~used].any()

    def test_the_layout_is_known_before_the_file_is_read(self, tmp_path: Path) -> None:
        plan = planned(tmp_path / "w", lora_tensors(TINY))
        layout = layout_adapter(plan, "fp32")
        assert layout == build_blob(tmp_path / "w", plan, "fp32").layout
        assert layout_adapter(plan, "bf16").nbytes < layout.nbytes


class TestRounding:
    @given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
    def test_bf16_is_rounded_as_torch_rounds(self, numbers: list[float]) -> None:
        values = np.array(numbers, np.float32)
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
        assert np.array_equal(to_bf16_bits(values), expected.view(np.uint16))

    def test_ties_go_to_even(self) -> None:
        bits = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32)
        assert to_bf16_bits(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81]

    def test_every_fp16_number_is_read_exactly(self) -> None:
        bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
        expected = torch.from_numpy(bits.view(np.int16)).view(torch.float16).float().numpy()
        np.testing.assert_array_equal(to_float32(bits, "F16"), expected)

    def test_every_bf16_number_passes_through_unchanged(self) -> None:
        bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
        finite = bits[(bits & 0x7F80) != 0x7F80]
        assert np.array_equal(to_bf16_bits(to_float32(finite, "BF16")), finite)


class TestFaults:
    @pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_number_that_is_not_finite_never_reaches_a_blob(
        self, tmp_path: Path, source: str, dtype: Any, value: float
    ) -> None:
        tensors = lora_tensors(TINY, dtype=source)
        bad = np.ones((16, 4), np.float32)
        bad[3, 1] = value
        tensors[f"{Q0}.lora_B.weight"] = tensor(bad, source)
        plan = planned(tmp_path / "w", tensors)
        with pytest.raises(AdapterRefused) as caught:
            build_blob(tmp_path / "w", plan, dtype)
        assert caught.value.code == "non_finite"

    def test_nor_does_one_that_bf16_cannot_hold(self, tmp_path: Path) -> None:
        tensors = lora_tensors(TINY)
        tensors[f"{Q0}.lora_B.weight"] = tensor(np.full((16, 4), 3.4e38))
        plan = planned(tmp_path / "w", tensors)
        build_blob(tmp_path / "w", plan, "fp32")
        with pytest.raises(AdapterRefused):
            build_blob(tmp_path / "w", plan, "bf16")

    def test_a_plan_that_failed_is_not_built(self, tmp_path: Path) -> None:
        tensors = lora_tensors(TINY)
        tensors.pop(f"{Q0}.lora_A.weight")
        path = tmp_path / "w"
        path.write_bytes(pack(tensors))
        judged = check_config(config_json(), 256).config
        assert judged is not None
        plan = plan_adapter(judged, read_header(path), TINY)
        with pytest.raises(AdapterRefused) as caught:
            build_blob(path, plan, "bf16")
        assert caught.value.code == "missing_pair"

    def test_a_file_that_shrank_is_corrupt(self, tmp_path: Path) -> None:
        plan = planned(tmp_path / "w", lora_tensors(TINY))
        data = (tmp_path / "w").read_bytes()
        (tmp_path / "w").write_bytes(data[:-8])
        with pytest.raises(AdapterCorrupt):
            build_blob(tmp_path / "w", plan, "bf16")


def test_memory_beside_the_buffer_is_bounded(tmp_path: Path) -> None:
    wide = tiny_description(hidden=64, vocab=100_000)
    tensors = lora_tensors(wide, rank=32, targets=["embed_tokens", "lm_head"])
    plan = planned(tmp_path / "w", tensors, wide, r=32)
    del tensors
    tracemalloc.start()
    try:
        blob = build_blob(tmp_path / "w", plan, "bf16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert blob.layout.nbytes > 12_000_000
    assert peak - blob.layout.nbytes < 24 * 1024 * 1024
