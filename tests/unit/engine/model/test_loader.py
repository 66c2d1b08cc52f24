"""Opening checkpoints, and the description that adapters and routing key on."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from engine.model.config import CheckpointRefused
from engine.model.description import describe, identify, module_names
from engine.model.loader import open_checkpoint
from tests.model_factories import make_llama, save_folder, write_gguf


def test_both_formats_give_the_same_weights_under_the_same_names(tmp_path: Path) -> None:
    model = make_llama(seed=1)
    folder = open_checkpoint(save_folder(model, tmp_path / "base"))
    write_gguf(model, tmp_path / "base.F32.gguf", "F32", edges="F32")
    gguf = open_checkpoint(tmp_path / "base.F32.gguf")
    for name in module_names(folder.config)[:-1]:
        stored = folder.weight(f"{name}.weight").decode()
        assert np.array_equal(stored, gguf.weight(f"{name}.weight").decode())
    assert (folder.name, gguf.name) == ("base", "base")


def test_no_such_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="no base model at"):
        open_checkpoint(tmp_path / "nothing")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_folder(make_llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointRefused, match=r"no \*\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    save_folder(make_llama(), tmp_path)
    os.truncate(tmp_path / "model.safetensors", 50_000)
    with pytest.raises(CheckpointRefused, match=r"lies outside model\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_shard_with_a_malformed_header_is_refused(tmp_path: Path) -> None:
    save_folder(make_llama(), tmp_path)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"data_offsets", b"data_offsetz"))
    with pytest.raises(CheckpointRefused, match="malformed header"):
        open_checkpoint(tmp_path)


def test_a_weight_of_another_shape_than_the_config_is_refused(tmp_path: Path) -> None:
    save_folder(make_llama(), tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("128", "160"))
    with pytest.raises(CheckpointRefused, match=r"gate_proj.weight has shape \[128, 64\]"):
        open_checkpoint(tmp_path).weight("model.layers.0.mlp.gate_proj.weight")


class TestTheDescription:
    def test_norms_are_those_of_the_weights(self, tmp_path: Path) -> None:
        model = make_llama(seed=1, tie_word_embeddings=False)
        identity = identify(open_checkpoint(save_folder(model, tmp_path / "base")), None)
        for name, weight in model.named_parameters():
            if not name.endswith("norm.weight"):
                norm = identity.norms[name.removesuffix(".weight")]
                assert norm == pytest.approx(weight.norm().item(), rel=1e-5)

    def test_the_base_digest_of_a_single_file_is_its_sha256(self, tmp_path: Path) -> None:
        write_gguf(make_llama(), tmp_path / "base.gguf", "Q4_0")
        expected = hashlib.sha256((tmp_path / "base.gguf").read_bytes()).hexdigest()
        assert identify(open_checkpoint(tmp_path / "base.gguf"), None).base_digest == expected

    def test_other_weights_in_a_folder_are_another_base(self, tmp_path: Path) -> None:
        digests = {
            identify(open_checkpoint(save_folder(make_llama(seed=seed), tmp_path / "b")), None)
            .base_digest
            for seed in (1, 2, 1)
        }  # fmt: skip
        assert len(digests) == 2

    def test_the_kept_identity_is_used_until_the_file_changes(self, tmp_path: Path) -> None:
        base = tmp_path / "base.gguf"
        write_gguf(make_llama(seed=1), base, "Q4_0")
        first = identify(open_checkpoint(base), tmp_path / "kept")
        (kept,) = (tmp_path / "kept").iterdir()
        kept.write_text(kept.read_text().replace(first.base_digest, "from the kept file"))
        again = identify(open_checkpoint(base), tmp_path / "kept")
        assert again.base_digest == "from the kept file"
        write_gguf(make_llama(seed=2), base, "Q4_0")
        os.utime(base, ns=(1, 1))
        changed = identify(open_checkpoint(base), tmp_path / "kept")
        assert changed.base_digest not in (first.base_digest, "from the kept file")

    def test_a_damaged_kept_identity_is_computed_anew(self, tmp_path: Path) -> None:
        base = tmp_path / "base.gguf"
        write_gguf(make_llama(seed=1), base, "Q4_0")
        first = identify(open_checkpoint(base), tmp_path / "kept")
        (kept,) = (tmp_path / "kept").iterdir()
        kept.write_text('{"base_digest": 1')
        assert identify(open_checkpoint(base), tmp_path / "kept") == first

    def test_modules_are_listed_with_the_shapes_that_adapters_need(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(save_folder(make_llama(), tmp_path / "base"))
        description = describe(
            checkpoint, identify(checkpoint, None), max_rank=8, kv_block_bytes=1,
            adapter_dtype="fp32", backend="cpu",
        )  # fmt: skip
        shapes = {m.name: (m.layer, m.in_features, m.out_features) for m in description.modules}
        assert len(shapes) == 3 * 7 + 2
        assert shapes["model.embed_tokens"] == (-1, 96, 64)
        assert shapes["model.layers.2.self_attn.k_proj"] == (2, 64, 32)
        assert shapes["model.layers.0.mlp.down_proj"] == (0, 128, 64)
        assert shapes["lm_head"] == (-1, 64, 96)
        edges = [m for m in description.modules if m.layer < 0]
        assert all(m.sketch for m in edges)
        assert description.eos_token_ids == (2,)
