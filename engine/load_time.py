"""How long an adapter takes from one tier to the next, learned by its bytes."""

from typing import Literal

from engine.least_squares import NonNegativeLeastSquares

Tier = Literal["store", "host"]

STARTS: dict[Tier, tuple[float, float]] = {"store": (5.0, 2e-6), "host": (1.0, 1e-7)}
"""(ms, ms a byte) before anything was loaded: half a gigabyte a second from the store, ten from
the host."""
FORGET = 0.98
MOST_SURPRISE = 4.0
"""A load that took longer than so many times what was expected counts as just that."""


class LoadTimes:
    """From a tier to the next: store to host, host to device. Times in ms, no clock is read."""

    def __init__(self) -> None:
        self._models = {
            tier: NonNegativeLeastSquares(start, (1.0, 1e6), FORGET)
            for tier, start in STARTS.items()
        }
        self._usual_bytes = 1e6

    def predict_ms(self, tier: Tier, nbytes: int = 0) -> float:
        """0 bytes: the size is not known yet, and a usual one is taken."""
        return self._models[tier].predict((1.0, nbytes or self._usual_bytes))

    def observe(self, tier: Tier, nbytes: int, actual_ms: float) -> None:
        expected_ms = self.predict_ms(tier, nbytes)
        learned_ms = max(0.01, min(actual_ms, MOST_SURPRISE * expected_ms + 1.0))
        self._usual_bytes += 0.1 * (nbytes - self._usual_bytes)
        self._models[tier].observe((1.0, nbytes), learned_ms)
