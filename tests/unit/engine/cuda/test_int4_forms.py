"""4-bit codes are repacked for the device once; what is kept of them never changes an answer."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda import int4_forms
from tests.checkpoint_formats import FORMATS
from tests.cuda_driver import CudaDriver
from tests.device_weights import device_weights, load_on_fake_device
from tests.model_factories import make_llama
from tests.parity.driver import Piece

KINDS = ["awq", "gptq", "compressed-tensors int4", "GGUF Q4_0", "GGUF Q4_1"]
LINEARS = 4 * 3  # of three blocks


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return FORMATS["awq"](make_llama(seed=2), tmp_path / "base").path


@pytest.fixture
def repacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The shapes of what is repacked, in order."""
    pack, shapes = int4_forms.pack_rows, []

    def counted(read, rows: int, columns: int, dtype: torch.dtype):
        shapes.append((rows, columns))
        return pack(read, rows, columns, dtype)

    monkeypatch.setattr(int4_forms, "pack_rows", counted)
    return shapes


def weights(base: Path, data_dir: Path, *, form_cache_bytes: int = 1 << 30) -> list[torch.Tensor]:
    config = EngineConfig(base_model=base, data_dir=data_dir, form_cache_bytes=form_cache_bytes)
    return list(device_weights(load_on_fake_device(config)))


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def kept_file(data_dir: Path) -> Path:
    (file,) = (data_dir / "base-models" / "forms").iterdir()
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_repacks_nothing_and_holds_the_same_bits(
    kind: str, tmp_path: Path, repacked: list[tuple[int, int]]
) -> None:
    base = FORMATS[kind](make_llama(seed=2), tmp_path / "base").path
    first = weights(base, tmp_path)
    assert len(repacked) == LINEARS
    repacked.clear()
    assert alike(weights(base, tmp_path), first)
    assert not repacked
    assert alike(weights(base, tmp_path / "other", form_cache_bytes=0), first)
    assert not (tmp_path / "other" / "base-models" / "forms").exists()


@pytest.mark.parametrize("kind", ["BF16", "gptq with act-order", "compressed-tensors fp8"])
def test_what_needs_no_repacking_is_not_kept(kind: str, tmp_path: Path) -> None:
    base = FORMATS[kind](make_llama(seed=2), tmp_path / "base").path
    weights(base, tmp_path)
    assert not (tmp_path / "base-models" / "forms").exists()


def test_answers_are_bitwise_alike_with_and_without_kept_codes(base: Path, tmp_path: Path) -> None:
    def answers(**options: int) -> list[torch.Tensor]:
        driver = CudaDriver(base, tmp_path, linear_path="auto", **options)
        return driver.feed(Piece(0, list(range(3, 43)))) + driver.feed(Piece(0, [7]))

    without = answers(form_cache_bytes=0)
    assert alike(answers(), without)
    assert kept_file(tmp_path).is_file()
    assert alike(answers(), without)


class TestASpoiledFile:
    def test_makes_the_linear_with_a_flipped_bit_anew(
        self, base: Path, tmp_path: Path, repacked: list[tuple[int, int]]
    ) -> None:
        first = weights(base, tmp_path)
        file = kept_file(tmp_path)
        data = bytearray(file.read_bytes())
        data[100] ^= 4
        file.write_bytes(bytes(data))
        repacked.clear()
        assert alike(weights(base, tmp_path), first)
        assert repacked == [(128, 64)]  # q, k and v of the first block
        repacked.clear()
        assert alike(weights(base, tmp_path), first)
        assert not repacked

    @pytest.mark.parametrize("spoil", ["cut off", "of another program", "empty"])
    def test_is_made_anew(
        self, base: Path, tmp_path: Path, repacked: list[tuple[int, int]], spoil: str
    ) -> None:
        first = weights(base, tmp_path)
        file = kept_file(tmp_path)
        whole = file.read_bytes()
        spoilt = {"cut off": whole[: len(whole) // 2], "of another program": b"\x7fELF" * 999}
        file.write_bytes(spoilt.get(spoil, b""))
        repacked.clear()
        assert alike(weights(base, tmp_path), first)
        assert len(repacked) == LINEARS
        assert file.read_bytes() == whole

    def test_of_another_layout_is_not_read(
        self, base: Path, tmp_path: Path, repacked: list[tuple[int, int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        weights(base, tmp_path)
        repacked.clear()
        monkeypatch.setattr(int4_forms, "_VERSION", "cuda int4.next")
        weights(base, tmp_path)
        assert len(repacked) == LINEARS


def test_a_folder_that_takes_nothing_costs_a_warning(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = weights(base, tmp_path)
    other = tmp_path / "other"
    (other / "base-models").mkdir(parents=True)
    (other / "base-models" / "forms").write_text("not a folder")
    assert alike(weights(base, other), first)
    assert [r.levelname for r in caplog.records if "forms are not kept" in r.message] == ["WARNING"]


def test_engines_that_start_at_once_leave_one_good_file(
    base: Path, tmp_path: Path, repacked: list[tuple[int, int]]
) -> None:
    want = weights(base, tmp_path / "alone")
    gate, good = threading.Barrier(3), []

    def start() -> None:
        gate.wait()
        good.append(alike(weights(base, tmp_path), want))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 3
    repacked.clear()
    assert alike(weights(base, tmp_path), want)
    assert not repacked
    assert kept_file(tmp_path).read_bytes() == kept_file(tmp_path / "alone").read_bytes()
