"""Traffic has the statistics that its name promises, and equal seeds give equal traffic."""

import numpy as np
import pytest

from app.bench.arrivals import arrival_times_ms, gaps_ms


def generator(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    gaps = gaps_ms(generator(), rate_per_s=50.0, cv=cv, count=200_000)
    assert gaps.mean() == pytest.approx(20.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_cv_of_one_is_poisson() -> None:
    times = arrival_times_ms(generator(), 100.0, 1.0, 200_000.0)
    counts = np.bincount((np.array(times) / 1000.0).astype(int), minlength=200)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.25)


def test_bursty_traffic_crowds_more_than_poisson_traffic() -> None:
    def crowding(cv: float) -> float:
        times = arrival_times_ms(generator(), 100.0, cv, 200_000.0)
        counts = np.bincount((np.array(times) / 1000.0).astype(int), minlength=200)
        return float(counts.var() / counts.mean())

    assert crowding(4.0) > 5 * crowding(1.0)


def test_times_rise_and_stay_inside_the_run() -> None:
    times = arrival_times_ms(generator(), 20.0, 4.0, 10_000.0)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 10_000.0


def test_equal_seeds_give_equal_times_and_others_do_not() -> None:
    first, again, other = (
        arrival_times_ms(generator(seed), 20.0, 1.0, 5000.0) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(("rate", "cv"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_a_rate_or_variation_that_is_not_positive_is_refused(rate: float, cv: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        gaps_ms(generator(), rate, cv, 1)
