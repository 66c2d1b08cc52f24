"""The engine's logits against transformers' own, in fp32, however a prompt is cut into steps."""

from pathlib import Path

import pytest
import torch

from tests.model_factories import make_llama, save_folder, write_gguf
from tests.parity.driver import Driver, Piece, reference_logits

PROMPT = [(7 * index * index + 3 * index + 5) % 96 for index in range(75)]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.std() > 0.3, "the reference must say something"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    model = make_llama(seed=1)
    return model, save_folder(model, tmp_path_factory.mktemp("base"))


@pytest.fixture
def driver(base, tmp_path: Path) -> Driver:
    return Driver(base[1], tmp_path)


class TestAFolder:
    def test_a_whole_prompt_in_one_step(self, base, driver: Driver) -> None:
        (got,) = driver.feed(Piece(0, PROMPT))
        assert_close(got, reference_logits(base[0], PROMPT)[-1])

    @pytest.mark.parametrize("sizes", [(20, 55), (1, 74), (16, 16, 43), (3, 70, 2), (60, 4, 11)])
    def test_a_prompt_in_chunks_of(self, base, driver: Driver, sizes: tuple[int, ...]) -> None:
        want, at = reference_logits(base[0], PROMPT), 0
        for size in sizes:
            (got,) = driver.feed(Piece(0, PROMPT[at : at + size]))
            at += size
            assert_close(got, want[at - 1])

    def test_decodes_and_prefills_of_several_sequences_in_one_step(
        self, base, driver: Driver
    ) -> None:
        prompts = [PROMPT[:40], PROMPT[10:27], PROMPT[5:75]]
        driver.feed(Piece(0, prompts[0][:-3]), Piece(1, prompts[1][:4]))
        for step in range(3):
            at = len(prompts[0]) - 3 + step
            pieces = [
                Piece(1, prompts[1][4 + step : 5 + step]),
                Piece(2, prompts[2][step * 20 : step * 20 + 20]),
                Piece(0, prompts[0][at : at + 1]),
            ]
            ends = [5 + step, step * 20 + 20, at + 1]
            for got, piece, end in zip(driver.feed(*pieces), pieces, ends, strict=True):
                assert_close(got, reference_logits(base[0], prompts[piece.seq][:end])[-1])

    def test_a_prompt_that_begins_with_anothers_blocks(self, base, driver: Driver) -> None:
        driver.feed(Piece(0, PROMPT[:50]))
        driver.share_prefix(1, owner=0, blocks=2)
        other = [*PROMPT[:32], *PROMPT[60:70]]
        (got,) = driver.feed(Piece(1, other[32:]))
        assert_close(got, reference_logits(base[0], other)[-1])

    def test_a_sequence_that_was_preempted_and_started_over(self, base, driver: Driver) -> None:
        driver.feed(Piece(0, PROMPT[:30]), Piece(1, PROMPT[:45]))
        driver.close(0)
        driver.feed(Piece(2, PROMPT[20:60]))  # takes the blocks that became free
        (got,) = driver.feed(Piece(0, PROMPT[:31]))
        assert_close(got, reference_logits(base[0], PROMPT[:31])[-1])

    def test_sharded_files_are_one_model(self, tmp_path: Path) -> None:
        model = make_llama(seed=2)
        folder = save_folder(model, tmp_path / "base", shard="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        (got,) = Driver(folder, tmp_path).feed(Piece(0, PROMPT))
        assert_close(got, reference_logits(model, PROMPT)[-1])

    def test_an_untied_head(self, tmp_path: Path) -> None:
        model = make_llama(seed=3, tie_word_embeddings=False)
        (got,) = Driver(save_folder(model, tmp_path / "base"), tmp_path).feed(Piece(0, PROMPT))
        assert_close(got, reference_logits(model, PROMPT)[-1])

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 3.0},
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        ],
        ids=["linear", "llama3"],
    )  # fmt: skip
    def test_rope_scaling(self, tmp_path: Path, rope: dict) -> None:
        model = make_llama(seed=4, rope_parameters={"rope_theta": 500.0, **rope})
        (got,) = Driver(save_folder(model, tmp_path / "base"), tmp_path).feed(Piece(0, PROMPT))
        assert_close(got, reference_logits(model, PROMPT)[-1])


class TestAGgufFile:
    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
    def test_equals_the_weights_that_its_codes_stand_for(self, tmp_path: Path, kind: str) -> None:
        served = write_gguf(make_llama(seed=5), tmp_path / f"tiny.{kind}.gguf", kind)
        driver = Driver(tmp_path / f"tiny.{kind}.gguf", tmp_path)
        driver.feed(Piece(0, PROMPT[:33]))
        (got,) = driver.feed(Piece(0, PROMPT[33:]))
        assert_close(got, reference_logits(served, PROMPT)[-1])

    def test_llama3_scaling_is_listed_frequency_by_frequency(self, tmp_path: Path) -> None:
        rope = {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }  # fmt: skip
        model, plain = make_llama(seed=4, rope_parameters=rope), make_llama(seed=4)
        turns = 1 / 500.0 ** (torch.arange(0, 16, 2) / 16)
        divisors = (turns / model.model.rotary_emb.inv_freq).tolist()
        served = write_gguf(model, tmp_path / "tiny.gguf", "F32", rope_divisors=divisors)
        (got,) = Driver(tmp_path / "tiny.gguf", tmp_path).feed(Piece(0, PROMPT))
        assert_close(got, reference_logits(served, PROMPT)[-1])
        assert not torch.allclose(got, reference_logits(plain, PROMPT)[-1], atol=1e-2)

    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
    def test_the_int4_kernel_stays_near_its_codes(self, tmp_path: Path, kind: str) -> None:
        served = write_gguf(make_llama(seed=5), tmp_path / "tiny.gguf", kind)
        driver = Driver(tmp_path / "tiny.gguf", tmp_path, linear_path="int4")
        (got,) = driver.feed(Piece(0, PROMPT))
        want = reference_logits(served, PROMPT)[-1]
        error = ((got - want).norm() / want.norm()).item()
        assert 1e-5 < error < 0.03  # bf16 activations and scales: near, and not the fp32 path


class TestABf16Cache:
    def test_costs_only_rounding(self, base, tmp_path: Path) -> None:
        driver = Driver(base[1], tmp_path, kv_dtype="bf16")
        want, at = reference_logits(base[0], PROMPT), 0
        for size in (30, 20, 1, 3, 1, 20):
            (got,) = driver.feed(Piece(0, PROMPT[at : at + size]))
            at += size
            assert ((got - want[at - 1]).norm() / want[at - 1].norm()).item() < 0.02
