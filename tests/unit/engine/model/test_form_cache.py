"""Forms on the disk: what is read back, what is made anew, and what is left of which file."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.model.form_cache import Arrays, FormCache, forms_key, prune
from engine.native import layout
from engine.runner import CpuExecutor
from tests.checkpoint_formats import FORMATS
from tests.model_factories import make_llama
from tests.parity.driver import Driver, Piece

MIB = 1 << 20
FORMS: dict[str, Arrays] = {
    f"layer {index}": (
        np.random.default_rng(index).integers(0, 255, (64, 48), dtype=np.uint8),
        np.random.default_rng(index).standard_normal((3, 5), dtype=np.float32),
    )
    for index in range(4)
}


def must_not_be_made() -> Arrays:
    raise AssertionError("it was kept")


def load(folder: Path, *, key: str = "k", most_bytes: int = MIB) -> list[str]:
    """Asks for all forms as a loading model does; the names of those that were made."""
    cache, made = FormCache(folder, key, most_bytes), []

    def make(name: str) -> Callable[[], Arrays]:
        def make_it() -> Arrays:
            made.append(name)
            return FORMS[name]

        return make_it

    for name, want in FORMS.items():
        for got, array in zip(cache.arrays(name, make(name)), want, strict=True):
            np.testing.assert_array_equal(got, array)
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
    cache.close()
    return made


def test_the_second_load_makes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path / "forms") == list(FORMS)
    assert load(tmp_path / "forms") == []
    assert [file.name for file in (tmp_path / "forms").iterdir()] == ["k.forms"]


def test_another_key_has_its_own_file(tmp_path: Path) -> None:
    load(tmp_path)
    assert load(tmp_path, key="other") == list(FORMS)
    assert load(tmp_path) == []


@pytest.mark.parametrize(
    "changed", [{"torch": "2.14"}, {"capability": "AVX2"}, {"choice": "fp32"}, {"more": 1}]
)
def test_a_key_tells_every_fact_apart(changed: dict[str, object]) -> None:
    facts = {"torch": "2.13", "capability": "AVX512", "choice": "bf16"}
    assert forms_key("ab", facts) == forms_key("ab", dict(reversed(facts.items())))
    assert forms_key("ab", facts) != forms_key("ab", facts | changed)
    assert forms_key("ab", facts) != forms_key("cd", facts)


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    assert load(tmp_path / "forms", most_bytes=0) == list(FORMS)
    assert not (tmp_path / "forms").exists()


class TestADamagedFile:
    def test_one_flipped_bit_makes_one_form_anew(self, tmp_path: Path) -> None:
        load(tmp_path)
        file = tmp_path / "k.forms"
        data = bytearray(file.read_bytes())
        data[data.index(FORMS["layer 2"][0].tobytes()) + 100] ^= 4
        file.write_bytes(bytes(data))
        assert load(tmp_path) == ["layer 2"]
        assert load(tmp_path) == []

    @pytest.mark.parametrize("kept_bytes", [0, 7, 100, 5000, -1, -20, -200])
    def test_a_file_that_was_cut_off_is_made_anew(self, tmp_path: Path, kept_bytes: int) -> None:
        load(tmp_path)
        file = tmp_path / "k.forms"
        file.write_bytes(file.read_bytes()[:kept_bytes])
        assert load(tmp_path) == list(FORMS)
        assert load(tmp_path) == []

    @pytest.mark.parametrize("at", [0, 3, -1, -10, -18, -24, -120])
    def test_damage_to_what_frames_the_arrays_is_seen(self, tmp_path: Path, at: int) -> None:
        load(tmp_path)
        file = tmp_path / "k.forms"
        data = bytearray(file.read_bytes())
        data[at] ^= 0x55
        file.write_bytes(bytes(data))
        assert load(tmp_path) == list(FORMS)
        assert load(tmp_path) == []

    def test_a_form_that_was_not_kept_before_joins_the_others(self, tmp_path: Path) -> None:
        cache = FormCache(tmp_path, "k", MIB)
        for name in list(FORMS)[:2]:
            cache.arrays(name, lambda name=name: FORMS[name])
        cache.close()
        assert load(tmp_path) == ["layer 2", "layer 3"]
        assert load(tmp_path) == []


class TestTheDisk:
    def test_what_does_not_fit_is_not_kept_and_no_failure(self, tmp_path: Path) -> None:
        assert load(tmp_path, most_bytes=5000) == list(FORMS)
        assert not list(tmp_path.iterdir())

    def test_a_disk_without_space_is_no_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engine.model.form_cache._FREE_SHARE", 0.0)
        assert load(tmp_path) == list(FORMS)
        assert not list(tmp_path.iterdir())

    def test_a_folder_that_cannot_be_made_is_no_failure(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        assert load(tmp_path / "file" / "forms") == list(FORMS)

    def test_the_file_unused_for_longest_makes_room(self, tmp_path: Path) -> None:
        for age, key in enumerate(("a", "b", "c")):
            load(tmp_path, key=key)
            os.utime(tmp_path / f"{key}.forms", (age, age))
        size = (tmp_path / "a.forms").stat().st_size
        load(tmp_path, key="a", most_bytes=2 * size)  # used: now the newest
        assert {file.name for file in tmp_path.iterdir()} == {"a.forms", "c.forms"}

    def test_what_a_dead_writer_left_goes_and_a_living_ones_stays(self, tmp_path: Path) -> None:
        for name, age in (("dead", 7200), ("alive", 60)):
            partial = tmp_path / f"k.1.{name}.partial"
            partial.write_bytes(b"half a file")
            then = partial.stat().st_mtime - age
            os.utime(partial, (then, then))
        prune(tmp_path, MIB, keep=tmp_path / "k.forms")
        assert [file.name for file in tmp_path.iterdir()] == ["k.1.alive.partial"]


def test_engines_that_start_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    gate, failures = threading.Barrier(4), []

    def start() -> None:
        gate.wait()
        try:
            for _ in range(5):
                load(tmp_path)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [file.name for file in tmp_path.iterdir()] == ["k.forms"]
    assert load(tmp_path) == []


class TestTheModel:
    @pytest.mark.parametrize("kind", ["GGUF Q4_1", "gptq", "compressed-tensors fp8"])
    @pytest.mark.parametrize("path", ["native", "int4", "dense", "fp32"])
    def test_answers_bitwise_alike_from_kept_forms(
        self, tmp_path: Path, kind: str, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = FORMATS[kind](make_llama(seed=2), tmp_path / "base").path

        def answers() -> list[torch.Tensor]:
            driver = Driver(base, tmp_path, linear_path=path)
            return driver.feed(Piece(0, list(range(3, 43)))) + driver.feed(Piece(0, [7]))

        first = answers()
        monkeypatch.setattr("engine.model.linear._int4_form", lambda *_: must_not_be_made())
        monkeypatch.setattr("engine.model.linear._dense_form", _plain_alone)
        pack = layout.pack

        def plain_pack(weights, *given, **options):  # the embedding's, where it is the head
            if not all(w.is_plain for w in weights):
                return must_not_be_made()
            return pack(weights, *given, **options)

        monkeypatch.setattr(layout, "pack", plain_pack)
        again = answers()
        assert all(map(torch.equal, first, again))

    def test_of_plain_weights_keeps_nothing(self, tmp_path: Path) -> None:
        base = FORMATS["BF16"](make_llama(seed=2), tmp_path / "base").path
        CpuExecutor(EngineConfig(base_model=base, data_dir=tmp_path / "data", arena_bytes=MIB))
        assert not list((tmp_path / "data" / "base-models").glob("forms/*.forms"))

    def test_with_other_weights_has_another_file(self, tmp_path: Path) -> None:
        for seed in (1, 2):
            base = FORMATS["awq"](make_llama(seed=seed), tmp_path / f"base-{seed}").path
            Driver(base, tmp_path)
        assert len(list((tmp_path / "base-models" / "forms").glob("*.forms"))) == 2


def _plain_alone(weights, dtype):
    if not all(weight.is_plain for weight in weights):
        return must_not_be_made()
    return (torch.cat([torch.from_numpy(weight.decode()) for weight in weights]).numpy(),)
