"""What a step brings back beside logits, and that one row's trouble stays its own."""

from pathlib import Path

import pytest
import torch

from engine.types import PlanRow, SamplingParams, SequenceStart, StepPlan
from tests.model_factories import make_adapter, make_llama, read_blob, save_folder
from tests.parity.driver import Driver, Piece, reference_logits

PROMPT = [(3 * index * index + index + 4) % 96 for index in range(40)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    model = make_llama(seed=31)
    return model, save_folder(model, tmp_path_factory.mktemp("base"))


@pytest.fixture
def driver(base, tmp_path: Path) -> Driver:
    return Driver(base[1], tmp_path)


def test_prompt_logprobs_are_those_of_the_text_whatever_the_chunks(base, driver: Driver) -> None:
    want = torch.log_softmax(reference_logits(base[0], PROMPT), dim=-1)
    driver.prompts[0] = PROMPT
    entries = []
    for piece in (PROMPT[:9], PROMPT[9:10], PROMPT[10:]):
        driver.feed(Piece(0, piece, prompt_logprobs=3))
        entries += driver.results[0].prompt_logprobs or []
    assert len(entries) == len(PROMPT)
    for at, entry in enumerate(entries):
        following = PROMPT[at + 1] if at + 1 < len(PROMPT) else int(want[at].argmax())
        assert entry.token_id == following
        assert entry.logprob == pytest.approx(want[at, following].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == want[at].topk(3).indices.tolist()


def test_overflow_in_one_adapter_is_reported_for_its_rows_alone(
    base, driver: Driver, tmp_path: Path
) -> None:
    folder = make_adapter(
        base[0], tmp_path / "a", seed=1, strength=1e30, r=4, target_modules=["q_proj", "down_proj"]
    )
    driver.add_adapter(0, read_blob(folder, driver.executor.description))
    alone = driver.feed(Piece(0, PROMPT[:20]), Piece(1, PROMPT[:3]))
    plan = StepPlan(
        0, [0, 1], [SequenceStart(seq, PROMPT, [], SamplingParams(1), 0) for seq in (0, 1)], [],
        [
            PlanRow(1, 0, PROMPT[:3], [8], 0, True),
            PlanRow(0, 0, PROMPT[:20], [3, 9], -1, True),
        ],
    )  # fmt: skip
    broken, good = driver.executor.execute(plan).rows
    assert (broken.finite, broken.token_ids) == (False, [])
    assert good.finite
    assert torch.equal(driver.sampler.logits[0], alone[0])


def test_a_block_that_held_infinities_harms_nobody_after_it(
    base, driver: Driver, tmp_path: Path
) -> None:
    folder = make_adapter(
        base[0], tmp_path / "a", seed=1, strength=1e30, r=4, target_modules=["k_proj", "v_proj"]
    )
    driver.add_adapter(0, read_blob(folder, driver.executor.description))
    driver.feed(Piece(0, PROMPT, slot=0))
    assert not driver.results[0].finite
    driver.close(0)
    for size in (3, 20, 1, 1):  # paged rows and a span over half-filled blocks
        (got,) = driver.feed(Piece(1, PROMPT[len(driver.fed(1)) :][:size]))
    want = reference_logits(base[0], PROMPT[:25])[-1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)


def test_a_fork_goes_on_from_copied_blocks(base, driver: Driver) -> None:
    executor = driver.executor
    params = SamplingParams(max_tokens=9)
    start = StepPlan(
        0, [], [SequenceStart(0, PROMPT[:20], [], params, 0)], [],
        [PlanRow(0, 0, PROMPT[:20], [5, 2], -1, True)],
    )  # fmt: skip
    executor.execute(start)
    fork = StepPlan(
        1, [], [SequenceStart(1, PROMPT[:20], [], params, 1)], [(2, 7)],
        [PlanRow(0, 20, [11], [], -1, True), PlanRow(1, 20, [12], [5, 7], -1, True)],
    )  # fmt: skip
    executor.execute(fork)
    for seq, token in ((0, 11), (1, 12)):
        want = reference_logits(base[0], [*PROMPT[:20], token])[-1]
        torch.testing.assert_close(driver.sampler.logits[seq], want, atol=1e-4, rtol=0.0)


def test_an_empty_plan_is_a_step(driver: Driver) -> None:
    assert driver.executor.execute(StepPlan(4, [], [], [], [])).rows == []


def test_an_arena_without_room_for_one_block_is_refused(base, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one block of 12288 bytes"):
        Driver(base[1], tmp_path, arena_bytes=12_000)
