"""What loading and rounding a large checkpoint take at most, each in a process of its own."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.model.config import config_from_folder
from engine.model.loader import expected_shape
from engine.model.safetensors_file import SafetensorsWriter, TensorPlan
from engine.quantize import tensor_names
from tests.large_checkpoints import write_large
from tests.model_factories import make_llama, save_folder

ROOT = Path(__file__).parents[2]
LAYERS, SHARDS = 24, 4
pytestmark = pytest.mark.timeout(600)


def write_sharded(folder: Path) -> int:
    """A bf16 Llama of random weights, written without a model; its bytes."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096,
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    read = config_from_folder(folder)
    names, total = tensor_names(read), 0
    noise = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * 0.02
    bits = (noise.view(np.uint32) >> 16).astype("<u2")
    for shard in range(SHARDS):
        here = names[shard::SHARDS]
        plans = {name: TensorPlan("BF16", expected_shape(name, read)) for name in here}
        file = folder / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        writer = SafetensorsWriter(file, plans)
        for name, plan in plans.items():
            writer.write(name, np.resize(bits, plan.nbytes // 2).view(np.uint8))
        writer.close()
        total += writer.nbytes
    return total


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(make_llama(), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("large") / "base"
    return folder, write_sharded(folder)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder that goes with the test: pytest keeps its own, and these are large."""
    folder = tmp_path / "room"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def measured(*arguments: object) -> tuple[int, int]:
    """(peak, forms) in bytes, see tests/load_memory.py."""
    command = [sys.executable, "-m", "tests.load_memory", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    sys.stdout.write(f"{arguments[0]}: {figures}\n")
    return figures["peak"], figures["forms"]


def write_large_of(kind: str, path: Path, megabytes: int) -> tuple[Path, int]:
    """Of about so many MB: what loading takes at any size is small beside it."""
    blocks = 1 + megabytes * 1_000_000 // BLOCK_BYTES[kind]
    return write_large(kind, path, blocks)


BLOCK_BYTES = {
    "BF16": 23_500_000, "awq": 6_900_000, "gptq": 6_900_000, "gptq with act-order": 6_900_000,
    "compressed-tensors fp8": 11_800_000, "compressed-tensors int4": 7_600_000,
    "GGUF Q4_0": 6_600_000, "GGUF Q4_1": 7_400_000, "GGUF Q8_0": 12_500_000,
    "GGUF Q6_K": 9_700_000,
}  # fmt: skip


def _wide(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("BF16", "auto"),
        *(_wide(kind, "auto") for kind in BLOCK_BYTES if kind != "BF16"),
        *(_wide(kind, path) for kind in ("BF16", "GGUF Q4_0") for path in ("dense", "fp32")),
        *(_wide(kind, "int4") for kind in ("GGUF Q4_0", "awq")),
    ],
)
def test_loading_on_the_cpu_peaks_within_1_3_of_the_checkpoint_or_of_what_serves(
    small: Path, room: Path, kind: str, path: str
) -> None:
    base, nbytes = write_large_of(kind, room / "base", 240)
    for start in ("first", "from kept forms"):
        peak, forms = measured("load", base, room / "data", small, path)
        assert forms > 0.85 * nbytes
        assert 0 < peak < 1.3 * max(nbytes, forms), start


@pytest.mark.parametrize("kind", ["awq", *(_wide(kind) for kind in BLOCK_BYTES if kind != "awq")])
def test_loading_onto_a_device_takes_less_of_the_host_than_half_the_checkpoint(
    small: Path, room: Path, kind: str
) -> None:
    base, nbytes = write_large_of(kind, room / "base", 240)
    for start in ("first", "from kept forms"):
        peak, forms = measured("load", base, room / "data", small, "cuda")
        assert forms > 0.85 * nbytes
        assert 0 < peak - forms < 0.5 * nbytes, start


def test_rounding_holds_one_tensor_at_a_time(checkpoint: tuple[Path, int], tmp_path: Path) -> None:
    folder, nbytes = checkpoint
    peak, _ = measured("quantize", folder, tmp_path / "target")
    largest = 4096 * 512 * 4  # the embedding as fp32
    assert peak < 8 * largest < 0.5 * nbytes


def test_rounding_that_is_ended_leaves_nothing(
    checkpoint: tuple[Path, int], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "engine.quantize", checkpoint[0], tmp_path / "new" / "target"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(20):
            assert b"module" in process.stdout.readline()
        assert list((tmp_path / "new").glob(".target.*.unfinished/*.safetensors"))
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not list((tmp_path / "new").iterdir())
