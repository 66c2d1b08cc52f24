"""Norms, finiteness and effect, from the file alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters import tensor_data
from engine.adapters.config import check_config
from engine.adapters.numbers import NumbersReport, measure_adapter
from engine.adapters.plan import AdapterPlan, plan_adapter
from engine.adapters.safetensors_header import read_header
from engine.adapters.sketch import sketch_distance, weight_sketch
from engine.adapters.tensor_data import TensorData
from engine.errors import AdapterCorrupt
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
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
HEAD_COPY = f"{PREFIX}lm_head.base_layer.weight"


def planned(path: Path, tensors: dict[str, Tensor], **config: Any) -> AdapterPlan:
    path.write_bytes(pack(tensors))
    judged = check_config(config_json(**config), 256).config
    assert judged is not None
    return plan_adapter(judged, read_header(path), TINY).require()


def measure(path: Path, tensors: dict[str, Tensor], **config: Any) -> NumbersReport:
    return measure_adapter(path, planned(path, tensors, **config), TINY)


def values(item: Tensor) -> np.ndarray:
    return np.frombuffer(item.data, "<f4").reshape(item.shape).astype(np.float64)


class TestNorms:
    @pytest.mark.parametrize("chunk_bytes", [64, 4 * 1024 * 1024])
    def test_the_update_norm_is_that_of_the_product(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
    ) -> None:
        monkeypatch.setattr(tensor_data, "CHUNK_BYTES", chunk_bytes)
        tensors = lora_tensors(TINY)
        report = measure(tmp_path / "w", tensors)
        a, b = values(tensors[f"{Q0}.lora_A.weight"]), values(tensors[f"{Q0}.lora_B.weight"])
        figures = report.modules[0]
        assert figures.module == "model.layers.0.self_attn.q_proj"
        assert figures.update_norm == pytest.approx(2 * np.linalg.norm(b @ a), rel=1e-9)
        assert figures.a_norm == pytest.approx(np.linalg.norm(a), rel=1e-9)
        assert figures.b_norm == pytest.approx(np.linalg.norm(b), rel=1e-9)
        assert figures.ratio == pytest.approx(figures.update_norm / 10.0)
        layer = [m for m in report.modules if m.layer == 0]
        together = sum(m.update_norm**2 for m in layer) / sum(m.base_norm**2 for m in layer)
        by_layer = report.figures["update_ratio_by_layer"]
        assert by_layer["0"] == pytest.approx(together**0.5, abs=1e-6)
        assert list(by_layer) == sorted(by_layer)
        assert report.findings == ()

    @pytest.mark.parametrize("dtype", ["F16", "BF16"])
    def test_every_dtype_gives_the_same_figures(self, tmp_path: Path, dtype: str) -> None:
        exact = measure(tmp_path / "a", lora_tensors(TINY))
        stored = measure(tmp_path / "b", lora_tensors(TINY, dtype=dtype))
        assert stored == exact

    def test_an_update_larger_than_its_weight_warns(self, tmp_path: Path) -> None:
        report = measure(tmp_path / "w", lora_tensors(TINY), lora_alpha=8000)
        assert {f.code for f in report.findings} == {"large_update"}

    def test_large_and_tiny_numbers_neither_overflow_nor_vanish(self, tmp_path: Path) -> None:
        tensors = lora_tensors(TINY, targets=["q_proj"], layers=[0])
        tensors[f"{Q0}.lora_A.weight"] = tensor(np.full((4, 16), 1e30))
        tensors[f"{Q0}.lora_B.weight"] = tensor(np.full((16, 4), 1e-30))
        report = measure(tmp_path / "w", tensors)
        assert report.modules[0].update_norm == pytest.approx(2 * 4 * 16, rel=1e-5)


class TestEffect:
    def test_an_untrained_adapter_is_refused(self, tmp_path: Path) -> None:
        tensors = {
            name: tensor(np.zeros(item.shape)) if ".lora_B." in name else item
            for name, item in lora_tensors(TINY).items()
        }
        assert [f.code for f in measure(tmp_path / "w", tensors).findings] == ["zero_effect"]

    def test_one_idle_module_among_others_is_only_mentioned(self, tmp_path: Path) -> None:
        tensors = lora_tensors(TINY)
        tensors[f"{Q0}.lora_B.weight"] = tensor(np.zeros((16, 4)))
        findings = measure(tmp_path / "w", tensors).findings
        assert [(f.code, f.severity) for f in findings] == [("module_without_effect", "info")]

    def test_an_alpha_of_zero_is_refused(self, tmp_path: Path) -> None:
        report = measure(tmp_path / "w", lora_tensors(TINY), lora_alpha=0)
        assert [f.code for f in report.findings] == ["zero_effect"]


class TestFinite:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    @pytest.mark.parametrize("side", ["A", "B"])
    def test_a_single_bad_number_is_found(
        self, tmp_path: Path, value: float, dtype: str, side: str
    ) -> None:
        tensors = lora_tensors(TINY, dtype=dtype)
        name = f"{Q0}.lora_{side}.weight"
        bad = np.zeros(tensors[name].shape, np.float32)
        bad.flat[37] = value
        tensors[name] = tensor(bad, dtype)
        report = measure(tmp_path / "w", tensors)
        assert [f.code for f in report.findings] == ["non_finite"]
        assert "layers.0.self_attn.q_proj" in report.findings[0].message
        assert len(report.modules) == 13

    def test_a_file_that_shrank_is_an_error_of_its_own(self, tmp_path: Path) -> None:
        plan = planned(tmp_path / "w", lora_tensors(TINY))
        data = (tmp_path / "w").read_bytes()
        (tmp_path / "w").write_bytes(data[: len(data) // 2])
        with pytest.raises(AdapterCorrupt):
            measure_adapter(tmp_path / "w", plan, TINY)


class TestBaseCopies:
    def tensors(self, head: np.ndarray) -> dict[str, Tensor]:
        return lora_tensors(TINY, targets=["lm_head"]) | {HEAD_COPY: tensor(head)}

    def test_the_bases_own_weight_is_accepted(self, tmp_path: Path) -> None:
        assert measure(tmp_path / "w", self.tensors(tiny_embedding())).findings == ()

    def test_so_is_one_that_differs_by_rounding(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(1).standard_normal((40, 16)).astype(np.float32)
        head = tiny_embedding() + 0.005 * noise
        assert measure(tmp_path / "w", self.tensors(head)).findings == ()

    @pytest.mark.parametrize("change", ["trained", "permuted", "another"])
    def test_anything_else_is_refused(self, tmp_path: Path, change: str) -> None:
        rng = np.random.default_rng(2)
        head = tiny_embedding()
        if change == "trained":
            head = head + 0.1 * rng.standard_normal(head.shape).astype(np.float32)
        elif change == "permuted":
            head = head[::-1].copy()
        else:
            head = rng.standard_normal(head.shape).astype(np.float32)
            head *= np.linalg.norm(tiny_embedding()) / np.linalg.norm(head)
        report = measure(tmp_path / "w", self.tensors(head))
        assert [f.code for f in report.findings] == ["base_weight_differs"]

    def test_sketches_estimate_the_distance(self) -> None:
        rng = np.random.default_rng(0)
        weight = rng.standard_normal((300, 64)).astype(np.float32)
        norm = float(np.linalg.norm(weight))
        for relative in (0.001, 0.01, 0.1):
            other = weight + relative * rng.standard_normal(weight.shape).astype(np.float32)
            one = weight_sketch([weight[:100], weight[100:]], 300, 64)
            two = weight_sketch([other], 300, 64)
            assert sketch_distance(one, two, norm) == pytest.approx(relative, rel=0.5)

    def test_a_sketch_is_the_same_on_every_machine(self) -> None:
        weight = np.arange(12, dtype=np.float32).reshape(4, 3)
        assert weight_sketch([weight], 4, 3)[:6] == (4.0, -14.0, -6.0, 10.0, 30.0, 0.0)


class TestReading:
    def test_columns_and_rows_give_the_same_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_data, "CHUNK_BYTES", 40)
        path = tmp_path / "w"
        matrix = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
        path.write_bytes(pack({"x": tensor(matrix)}))
        info = read_header(path).tensors[0]
        with TensorData(path) as data:
            columns = list(data.float_columns(info))
            rows = list(data.float_rows(info))
        assert len(columns) > 1
        assert len(rows) > 1
        assert np.array_equal(np.concatenate(columns, axis=1), matrix)
        assert np.array_equal(np.concatenate(rows), matrix)
