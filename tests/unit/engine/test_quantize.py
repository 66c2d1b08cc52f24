"""`python -m engine.quantize`: what it writes, and what it leaves alone."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.model.config import CheckpointRefused
from engine.model.loader import open_checkpoint
from engine.model.safetensors_file import SafetensorsWriter
from engine.quantize import Options, QuantizeRefused, quantize, tensor_names
from tests.checkpoint_formats import FORMATS
from tests.model_factories import make_llama, save_folder
from tests.parity.test_formats import random_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save_folder(make_llama(seed=3).to(torch.bfloat16), tmp_path / "source")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def left_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


class TestTheResult:
    @pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    def test_stands_for_the_source_but_for_rounding(
        self, tmp_path: Path, architecture: str, dtype: str
    ) -> None:
        source = FORMATS[dtype](random_model(dtype, architecture, "none"), tmp_path / "source").path
        quantize(source, tmp_path / "target", Options())
        before, after = open_checkpoint(source), open_checkpoint(tmp_path / "target")
        assert after.config == before.config
        for name in tensor_names(before.config):
            want, got = before.weight(name).decode(), after.weight(name).decode()
            if name.endswith("_proj.weight"):
                assert after.weight(name).int4() is not None
                assert 0.01 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.12
            else:
                np.testing.assert_array_equal(got, want)

    def test_holds_every_tensor_of_the_source(self, source: Path, tmp_path: Path) -> None:
        quantize(source, tmp_path / "target", Options())
        names = {
            name.removesuffix("_packed")
            for name in load_file(tmp_path / "target" / "model.safetensors")
            if not name.endswith(("_scale", "_shape", "_zero_point"))
        }
        assert names == set(load_file(source / "model.safetensors"))

    @pytest.mark.parametrize(
        ("options", "bits"),
        [(Options(32), 4.625), (Options(64), 4.3125), (Options(32, symmetric=True), 4.5)],
    )
    def test_its_size_and_error_are_told(
        self, source: Path, tmp_path: Path, options: Options, bits: float
    ) -> None:
        result = quantize(source, tmp_path / "target", options)
        assert result.target_bytes == (tmp_path / "target" / "model.safetensors").stat().st_size
        assert result.source_bytes == (source / "model.safetensors").stat().st_size
        assert result.bits_per_weight == pytest.approx(bits, abs=0.05)  # shapes weigh something
        before, after = open_checkpoint(source), open_checkpoint(tmp_path / "target")
        name = f"{result.largest_error_module}.weight"
        want, got = before.weight(name).decode(), after.weight(name).decode()
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert result.largest_error == pytest.approx(error, rel=1e-4)
        assert 0 < result.mean_error <= result.largest_error

    def test_rows_in_several_chunks_are_those_of_one(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        quantize(source, tmp_path / "whole", Options())
        monkeypatch.setattr("engine.quantize._CHUNK_WEIGHTS", 64 * 24)
        quantize(source, tmp_path / "pieces", Options())
        whole, pieces = (tmp_path / name / "model.safetensors" for name in ("whole", "pieces"))
        assert whole.read_bytes() == pieces.read_bytes()

    def test_shards_are_listed_and_are_one_model(self, source: Path, tmp_path: Path) -> None:
        quantize(source, tmp_path / "whole", Options())
        result = quantize(source, tmp_path / "shards", Options(shard_bytes=20_000))
        shards = sorted((tmp_path / "shards").glob("*.safetensors"))
        assert len(shards) > 2
        assert result.target_bytes == sum(shard.stat().st_size for shard in shards)
        index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
        tensors = {name: shard.name for shard in shards for name in load_file(shard)}
        assert index["weight_map"] == tensors
        whole = load_file(tmp_path / "whole" / "model.safetensors")
        for shard in shards:
            for name, tensor in load_file(shard).items():
                assert torch.equal(tensor, whole.pop(name))
        assert not whole

    def test_other_files_come_along_and_other_weights_do_not(
        self, source: Path, tmp_path: Path
    ) -> None:
        quantize(source, tmp_path / "target", Options())
        assert left_in(tmp_path / "target") == {
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        }  # fmt: skip

    def test_progress_goes_from_nothing_to_all(self, source: Path, tmp_path: Path) -> None:
        told: list[tuple[int, int, str]] = []
        quantize(source, tmp_path / "target", Options(), lambda *line: told.append(line))
        done = [line[0] for line in told]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, told[-1][1])
        assert "model.layers.1.mlp.up_proj" in {line[2] for line in told}


class TestRefusals:
    def refused(self, source: Path, target: Path, match: str, **options: Any) -> None:
        before = left_in(target.parent)
        with pytest.raises((QuantizeRefused, CheckpointRefused), match=match):
            quantize(source, target, Options(**options))
        assert left_in(target.parent) == before

    def test_no_such_source(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "none", tmp_path / "target", "there is no")

    def test_a_file_as_the_source(self, source: Path, tmp_path: Path) -> None:
        self.refused(source / "config.json", tmp_path / "target", "is a file")

    def test_a_folder_that_is_quantized(self, source: Path, tmp_path: Path) -> None:
        quantize(source, tmp_path / "once", Options())
        self.refused(tmp_path / "once", tmp_path / "twice", "quantized already")

    def test_another_architecture(self, source: Path, tmp_path: Path) -> None:
        config = (source / "config.json").read_text()
        (source / "config.json").write_text(config.replace("LlamaForCausalLM", "MambaForCausalLM"))
        self.refused(source, tmp_path / "target", "MambaForCausalLM")

    def test_a_missing_tensor(self, source: Path, tmp_path: Path) -> None:
        shard = source / "model.safetensors"
        shard.write_bytes(
            shard.read_bytes().replace(b"layers.2.mlp.up_proj", b"layers.2.mlp.xx_proj")
        )
        self.refused(source, tmp_path / "target", r"no tensor model\.layers\.2\.mlp\.up_proj")

    def test_columns_that_are_no_multiple_of_the_group(self, source: Path, tmp_path: Path) -> None:
        self.refused(source, tmp_path / "target", "--group-size 64 fits it", group=128)

    def test_a_weight_that_is_not_finite(self, tmp_path: Path) -> None:
        model = make_llama(seed=3)
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight[5, 5] = float("nan")
        source = save_folder(model, tmp_path / "source")
        self.refused(source, tmp_path / "target", r"layers\.2\.mlp\.down_proj: a weight is not")

    def test_a_target_that_exists(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "target").mkdir()
        self.refused(source, tmp_path / "target", "--force replaces it")

    def test_force_on_what_is_no_checkpoint(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "letters").mkdir()
        (tmp_path / "letters" / "to-mother.txt").write_text("dear")
        self.refused(source, tmp_path / "letters", "other than a checkpoint", force=True)
        assert (tmp_path / "letters" / "to-mother.txt").read_text() == "dear"

    @pytest.mark.parametrize("target", [".", "inside", ".."])
    def test_a_target_in_or_around_the_source(self, source: Path, target: str) -> None:
        self.refused(source, source / target, "two folders", force=True)

    def test_a_disk_that_is_too_full_from_the_start(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**6, 10**6, 10_000))
        self.refused(source, tmp_path / "target", "too full: 0 MiB are needed")

    def test_a_disk_that_fills_on_the_way(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, writes = SafetensorsWriter.write, iter(range(40))

        def fills_up(writer: SafetensorsWriter, name: str, data: Any) -> None:
            if next(writes, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(writer, name, data)

        monkeypatch.setattr(SafetensorsWriter, "write", fills_up)
        self.refused(source, tmp_path / "target", "is full")


class TestForce:
    def test_replaces_a_checkpoint(self, source: Path, tmp_path: Path) -> None:
        quantize(source, tmp_path / "target", Options())
        (tmp_path / "target" / "old.txt").write_text("old")
        quantize(source, tmp_path / "target", Options(group=64, force=True))
        given = json.loads((tmp_path / "target" / "config.json").read_text())
        group = given["quantization_config"]["config_groups"]["group_0"]
        assert group["weights"]["group_size"] == 64
        assert "old.txt" not in left_in(tmp_path / "target")
        assert left_in(tmp_path) == {"source", "target"}

    def test_leaves_the_old_one_where_the_new_one_fails(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        quantize(source, tmp_path / "target", Options())
        before = (tmp_path / "target" / "model.safetensors").read_bytes()
        rename = Path.rename

        def fails_for_the_new(path: Path, target: Path) -> Path:
            if path.name.endswith(".unfinished"):
                raise OSError(errno.EIO, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fails_for_the_new)
        with pytest.raises(QuantizeRefused, match="Input/output error"):
            quantize(source, tmp_path / "target", Options(group=64, force=True))
        assert (tmp_path / "target" / "model.safetensors").read_bytes() == before
        assert left_in(tmp_path) == {"source", "target"}
