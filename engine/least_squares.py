"""Non-negative linear least squares, learned online: what each feature costs.

Old samples are forgotten by a factor a sample; a sample's weight is one over its size, so that a
short step is known nearly as well as a long one. What the samples say nothing about stays where the
prior has it. Solved by coordinate descent from the last solution: a few hundred additions.
"""

from collections.abc import Sequence

SWEEPS = 4
PRIOR_SAMPLES = 2.0
"""How many samples the prior is worth, for ever."""


class NonNegativeLeastSquares:
    """y is about the sum of coefficient_i * x_i, no coefficient below 0."""

    def __init__(self, prior: Sequence[float], scales: Sequence[float], forget: float) -> None:
        """`prior`: the coefficients to start from. `scales`: usual sizes of the features (> 0)."""
        self.coefficients = list(prior)
        self._prior = list(prior)
        self._scales = list(scales)
        self._forget = forget
        size = len(prior)
        self._moments = [[0.0] * size for _ in range(size)]  # of the scaled features
        self._targets = [0.0] * size

    def anchor(self) -> None:
        """What is known now is what the coefficients are drawn to from here on."""
        self._prior = list(self.coefficients)

    def predict(self, features: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], target: float) -> None:
        """One sample; `target` must be above 0."""
        row = [x / scale for x, scale in zip(features, self._scales, strict=True)]
        for i, x in enumerate(row):
            moments, weighted = self._moments[i], x / target
            for j, other in enumerate(row):
                moments[j] = moments[j] * self._forget + weighted * other
            self._targets[i] = self._targets[i] * self._forget + x
        self._solve()

    def _solve(self) -> None:
        scaled = [c * scale for c, scale in zip(self.coefficients, self._scales, strict=True)]
        size = range(len(scaled))
        # a weak pull towards the prior, in the units of the moments
        pull = PRIOR_SAMPLES * (1.0 - self._forget)
        weights = [pull * max(self._moments[i][i], 1e-12) for i in size]
        anchors = [p * scale for p, scale in zip(self._prior, self._scales, strict=True)]
        for _ in range(SWEEPS):
            for i in size:
                moments, old = self._moments[i], scaled[i]
                explained = 0.0
                for weight, x in zip(moments, scaled, strict=True):
                    explained += weight * x
                want = self._targets[i] - explained + moments[i] * old + weights[i] * anchors[i]
                scaled[i] = max(0.0, want / (moments[i] + weights[i]))
        self.coefficients = [x / scale for x, scale in zip(scaled, self._scales, strict=True)]
