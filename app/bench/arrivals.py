"""When requests come: renewal processes whose gaps are Gamma distributed.

A coefficient of variation of 1 is Poisson traffic; 4 is bursty: most gaps are far below the mean,
a few far above it. Everything is drawn from the generator that is passed in.
"""

import numpy as np


def gaps_ms(rng: np.random.Generator, rate_per_s: float, cv: float, count: int) -> np.ndarray:
    """`count` gaps of mean 1000 / rate and standard deviation cv times that: [count] float64.

    Raises ValueError on a rate or a cv that is not positive.
    """
    if not rate_per_s > 0 or not cv > 0:
        raise ValueError(f"rate and cv must be positive, not {rate_per_s} and {cv}")
    shape = 1.0 / cv**2
    return rng.gamma(shape, 1000.0 / rate_per_s / shape, size=count)


def arrival_times_ms(
    rng: np.random.Generator, rate_per_s: float, cv: float, duration_ms: float
) -> list[float]:
    """Rising times in [0, duration_ms)."""
    times: list[float] = []
    at_ms = 0.0
    expected = int(rate_per_s * duration_ms / 1000.0) + 16
    while True:
        for gap in gaps_ms(rng, rate_per_s, cv, expected).tolist():
            at_ms += gap
            if at_ms >= duration_ms:
                return times
            times.append(at_ms)
