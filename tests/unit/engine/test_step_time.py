"""The step-time model against devices that are known exactly."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.least_squares import NonNegativeLeastSquares
from engine.load_time import LoadTimes
from engine.step_time import StepShape, StepTimeFile, StepTimes, attended_pairs

Device = Callable[[StepShape], float]


def linear_device(shape: StepShape) -> float:
    return (
        8.0
        + 0.4 * shape.prefill_tokens
        + 1.0 * shape.decode_rows
        + 0.002 * shape.kv_tokens
        + 0.00005 * shape.attended
        + 1e-7 * shape.adapter_bytes
    )


def device_with_a_knee(shape: StepShape) -> float:
    """Memory is the limit up to 64 tokens, arithmetic from there on; few rows have a kernel."""
    few = 3.0 * shape.tokens if shape.tokens <= 5 else 10.0
    return 8.0 + few + max(0.0, 0.4 * (shape.tokens - 64)) + 0.001 * shape.kv_tokens


def random_shape(draw: random.Random) -> StepShape:
    rows = draw.randrange(0, 32)
    shape = StepShape(0, 0)
    for _ in range(rows):
        shape = shape.with_decode(draw.randrange(10, 2000), draw.choice([0, 1 << 20]))
    if draw.random() < 0.4 or not rows:
        shape = shape.with_chunk(draw.randrange(0, 1000), draw.randrange(2, 480))
    return shape


def trained(device: Device, *, noise: float = 0.03, steps: int = 600) -> StepTimes:
    draw = random.Random(7)
    times = StepTimes()
    for _ in range(steps):
        shape = random_shape(draw)
        times.observe(shape, device(shape) * draw.lognormvariate(0.0, noise))
    return times


def errors(times: StepTimes, device: Device) -> list[float]:
    draw = random.Random(11)
    shapes = [random_shape(draw) for _ in range(300)]
    return sorted(abs(times.mean_ms(shape) / device(shape) - 1.0) for shape in shapes)


@pytest.mark.parametrize(("device", "bound"), [(linear_device, 0.06), (device_with_a_knee, 0.15)])
def test_nine_steps_of_ten_are_predicted_within_the_bound(device: Device, bound: float) -> None:
    assert errors(trained(device), device)[270] < bound


def test_the_upper_bound_is_exceeded_by_about_one_step_in_twenty() -> None:
    times = trained(linear_device, noise=0.1)
    draw = random.Random(3)
    exceeded = 0
    for _ in range(1000):
        shape = random_shape(draw)
        exceeded += linear_device(shape) * draw.lognormvariate(0.0, 0.1) > times.upper_ms(shape)
    assert 10 <= exceeded <= 110


def test_one_hiccup_hardly_moves_it() -> None:
    times = trained(linear_device)
    shape = StepShape().with_decode(500)
    before = times.mean_ms(shape)
    times.observe(shape, 100.0 * before)
    assert times.mean_ms(shape) == pytest.approx(before, rel=0.1)


def test_a_lasting_change_is_learned() -> None:
    times = trained(linear_device)
    draw = random.Random(5)
    for _ in range(600):
        shape = random_shape(draw)
        times.observe(shape, 3.0 * linear_device(shape))
    assert errors(times, lambda shape: 3.0 * linear_device(shape))[270] < 0.3


def test_hours_of_decodes_alone_do_not_unlearn_what_a_prompt_costs() -> None:
    times = trained(linear_device)
    times.anchor()
    draw = random.Random(9)
    prompt = StepShape().with_chunk(0, 256)
    for _ in range(3000):
        shape = StepShape()
        for _ in range(draw.randrange(4, 8)):
            shape = shape.with_decode(draw.randrange(100, 500))
        times.observe(shape, linear_device(shape))
    assert times.mean_ms(prompt) == pytest.approx(linear_device(prompt), rel=0.25)


def test_nothing_is_said_before_enough_was_seen() -> None:
    times = StepTimes()
    assert not times.known
    assert times.mean_ms(StepShape(decode_rows=4)) == 0.0
    for _ in range(8):
        times.observe(StepShape(decode_rows=4, kv_tokens=40), 10.0)
    assert times.known
    assert times.mean_ms(StepShape(decode_rows=4, kv_tokens=40)) == pytest.approx(10.0, rel=0.05)


@given(
    limit_ms=st.floats(5.0, 400.0),
    start=st.integers(0, 2000),
    most=st.integers(1, 600),
    rows=st.integers(0, 16),
)
def test_a_chunk_fits_its_limit_and_a_longer_one_does_not(
    limit_ms: float, start: int, most: int, rows: int
) -> None:
    shape = StepShape(0, rows, 500 * rows)
    chunk = TRAINED.largest_chunk(shape, start, most, limit_ms)
    assert 0 <= chunk <= most
    if chunk:
        assert TRAINED.upper_ms(shape.with_chunk(start, chunk)) <= limit_ms
    if chunk < most:
        assert TRAINED.upper_ms(shape.with_chunk(start, chunk + 1)) > limit_ms


TRAINED = trained(linear_device)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 400), st.floats(0.01, 1e4))))
def test_whatever_was_seen_no_prediction_is_negative(
    steps: list[tuple[int, int, float]],
) -> None:
    times = StepTimes()
    for rows, prompt, actual_ms in steps:
        times.observe(StepShape(prompt, rows, 10 * rows), actual_ms)
    shape = StepShape(100, 10, 1000)
    assert 0.0 <= times.mean_ms(shape) <= times.upper_ms(shape)


def test_attended_pairs_of_chunks_add_up_to_those_of_the_whole() -> None:
    assert attended_pairs(0, 10) == 55
    assert attended_pairs(0, 4) + attended_pairs(4, 6) == attended_pairs(0, 10)


class TestKeptOnDisk:
    def test_a_second_start_knows_what_the_first_learned(self, tmp_path: Path) -> None:
        kept = StepTimeFile(tmp_path / "step-times", "ab" * 32, "cpu 2 threads")
        assert kept.load() is None
        kept.save(TRAINED)
        again = kept.load()
        assert again is not None
        assert again.known
        shape = StepShape().with_decode(500).with_chunk(0, 100)
        assert again.mean_ms(shape) == pytest.approx(TRAINED.mean_ms(shape))

    def test_another_device_or_base_model_has_its_own(self, tmp_path: Path) -> None:
        StepTimeFile(tmp_path, "ab" * 32, "cpu").save(TRAINED)
        assert StepTimeFile(tmp_path, "ab" * 32, "gpu").load() is None
        assert StepTimeFile(tmp_path, "cd" * 32, "cpu").load() is None

    @pytest.mark.parametrize(
        "text",
        ["", "[]", "{}", '{"version": 2}', TRAINED.to_json().replace("0.", "-0."), "NaN"],
    )
    def test_a_file_that_is_not_sound_is_ignored(self, tmp_path: Path, text: str) -> None:
        kept = StepTimeFile(tmp_path, "ab" * 32, "cpu")
        kept.path.write_text(text)
        assert kept.load() is None

    def test_a_folder_that_cannot_be_written_stops_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        StepTimeFile(tmp_path / "file" / "folder", "ab" * 32, "cpu").save(TRAINED)


class TestLeastSquares:
    def test_exact_samples_are_fitted_exactly(self) -> None:
        model = NonNegativeLeastSquares([0.0, 0.0], (1.0, 10.0), 0.999)
        for n in range(200):
            model.observe((1.0, n % 50), 3.0 + 0.5 * (n % 50))
        assert model.coefficients == pytest.approx([3.0, 0.5], rel=0.05)

    def test_a_feature_that_seems_to_save_time_costs_nothing(self) -> None:
        model = NonNegativeLeastSquares([0.0, 0.0], (1.0, 10.0), 0.999)
        for n in range(50):
            model.observe((1.0, n), 100.0 - n)
        assert model.coefficients[1] == 0.0


class TestLoadTimes:
    def test_a_load_is_predicted_by_its_bytes(self) -> None:
        times = LoadTimes()
        for n in range(100):
            nbytes = (1 + n % 7) << 20
            times.observe("store", nbytes, 4.0 + 2e-6 * nbytes)
        assert times.predict_ms("store", 10 << 20) == pytest.approx(25.0, rel=0.1)

    def test_one_that_is_not_measured_yet_is_taken_for_a_usual_one(self) -> None:
        times = LoadTimes()
        for _ in range(100):
            times.observe("host", 1 << 20, 50.0)
        assert times.predict_ms("host") == pytest.approx(50.0, rel=0.1)
