"""How long a step will take, learned from the steps that were run.

The mean is linear in what the step contains, times a correction by the number of its tokens: a
device has knees (another kernel from so many rows on, arithmetic instead of memory as the limit)
that no line follows. The upper bound is a quantile of what came out against the mean, by the same
size classes. An outlier counts as no more than a few spreads, so one hiccup moves little, and a
lasting change is still learned.
"""

import json
import logging
import math
import os
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from engine.least_squares import NonNegativeLeastSquares

log = logging.getLogger(__name__)

FORGET = 0.995
"""What a sample keeps of its weight with every further one."""
UPPER_QUANTILE = 0.95
WINDOW = 64
"""Samples of a size class that the upper quantile is taken from."""
ENOUGH = 8
"""Samples of a class, or of the whole model, before its own word counts."""
ENOUGH_TO_REFUSE = 24
CLASSES_PER_OCTAVE = 2
CORRECTION_RATE = 0.08
MOST_CORRECTION = 4.0
OUTLIER_SPREADS = 4.0
LEAST_SPREAD = 0.05
MOST_SPREAD = 1.0
DEFAULT_HEADROOM = 1.25
"""Upper bound over mean while too little has been seen."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step contains, as far as its duration depends on it."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    kv_tokens: int = 0  # read once for each row: its context
    attended: int = 0  # pairs of a prompt token and a position it attends to
    adapter_bytes: int = 0  # of the adapters that its rows touch

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_rows

    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            self.prefill_tokens,
            self.decode_rows,
            self.kv_tokens,
            self.attended,
            self.adapter_bytes,
        )

    def with_chunk(self, start: int, count: int, adapter_bytes: int = 0) -> "StepShape":
        """The step with one more prefill chunk: `count` tokens from position `start`."""
        return StepShape(
            self.prefill_tokens + count,
            self.decode_rows,
            self.kv_tokens + start + count,
            self.attended + attended_pairs(start, count),
            self.adapter_bytes + adapter_bytes,
        )

    def with_decode(self, context: int, adapter_bytes: int = 0) -> "StepShape":
        """The step with one more decode of so many tokens of context."""
        return StepShape(
            self.prefill_tokens,
            self.decode_rows + 1,
            self.kv_tokens + context,
            self.attended,
            self.adapter_bytes + adapter_bytes,
        )


def attended_pairs(start: int, count: int) -> int:
    """Pairs of a token of [start, start + count) and a position up to its own."""
    return count * start + count * (count + 1) // 2


SCALES = (1.0, 64.0, 8.0, 4096.0, 16384.0, float(1 << 24))
FEATURES = ("step", "prefill_tokens", "decode_rows", "kv_tokens", "attended", "adapter_bytes")


class _SizeClass:
    """Steps of about the same number of tokens: how far off the linear model is."""

    def __init__(self) -> None:
        self.correction = 1.0
        self.samples = 0
        self._recent: deque[float] = deque()  # actual over predicted mean
        self._sorted: list[float] = []

    def observe(self, to_line: float, ratio: float) -> None:
        """A step over what the linear model says alone, and over the corrected mean."""
        self.samples += 1
        rate = max(CORRECTION_RATE, 1.0 / (self.samples + 1))
        corrected = self.correction + rate * (to_line - self.correction)
        self.correction = min(MOST_CORRECTION, max(1.0 / MOST_CORRECTION, corrected))
        self._recent.append(ratio)
        insort(self._sorted, ratio)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def headroom(self) -> float | None:
        """The upper quantile over the mean; None while too little was seen."""
        count = len(self._sorted)
        if count < ENOUGH:
            return None
        return max(1.0, self._sorted[min(count - 1, int(UPPER_QUANTILE * count))])


class StepTimes:
    """The model. All times in milliseconds; no clock is read here."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Starts over."""
        self._linear = NonNegativeLeastSquares([0.0] * len(SCALES), SCALES, FORGET)
        self._classes: dict[int, _SizeClass] = {}
        self._spread = 0.25  # smoothed |actual / predicted - 1|
        self.samples = 0

    @property
    def known(self) -> bool:
        """Whether predictions mean anything yet."""
        return self.samples >= ENOUGH

    @property
    def trusted(self) -> bool:
        """Whether enough was seen to refuse a request for what is predicted."""
        return self.samples >= ENOUGH_TO_REFUSE

    def mean_ms(self, shape: StepShape) -> float:
        """0 while nothing is known, and for a step of no rows."""
        if not shape.tokens:
            return 0.0
        return self._linear.predict(shape.features()) * self._correction(shape.tokens)

    def upper_ms(self, shape: StepShape) -> float:
        """What a step stays under in 95 of 100 cases."""
        return self.mean_ms(shape) * self._headroom(shape.tokens)

    def observe(self, shape: StepShape, actual_ms: float) -> None:
        """A step of this shape took so long."""
        if not shape.tokens or not actual_ms > 0.0:
            return
        self.samples += 1
        features = shape.features()
        linear_ms = self._linear.predict(features)
        mean_ms = linear_ms * self._correction(shape.tokens)
        learned_ms = actual_ms
        if self.samples > ENOUGH and mean_ms > 0.0:
            deviation = actual_ms / mean_ms - 1.0
            bound = OUTLIER_SPREADS * max(self._spread, LEAST_SPREAD)
            clipped = min(bound, max(-min(bound, 0.9), deviation))
            self._spread = min(MOST_SPREAD, self._spread + 0.1 * (abs(clipped) - self._spread))
            learned_ms = mean_ms * (1.0 + clipped)
            size_class = self._classes.setdefault(_class_of(shape.tokens), _SizeClass())
            size_class.observe(learned_ms / linear_ms, learned_ms / mean_ms)
        self._linear.observe(features, learned_ms)

    def anchor(self) -> None:
        """A calibration is over: what it found holds where traffic says nothing else."""
        self._linear.anchor()

    def largest_chunk(
        self, shape: StepShape, start: int, most: int, limit_ms: float, adapter_bytes: int = 0
    ) -> int:
        """The longest prefill chunk, at most `most`, with which the step stays under `limit_ms`."""
        if self.upper_ms(shape.with_chunk(start, most, adapter_bytes)) <= limit_ms:
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.upper_ms(shape.with_chunk(start, middle, adapter_bytes)) <= limit_ms:
                low = middle
            else:
                high = middle
        return low

    def _correction(self, tokens: int) -> float:
        """Interpolated between the centres of the classes that were seen."""
        where = _position(tokens)
        below = math.floor(where)
        left, right = self._classes.get(below), self._classes.get(below + 1)
        if left is None and right is None:
            return 1.0
        if left is None or right is None:
            nearest = left or right
            return 1.0 if nearest is None else nearest.correction
        share = where - below
        return left.correction * (1.0 - share) + right.correction * share

    def _headroom(self, tokens: int) -> float:
        size_class = self._classes.get(_class_of(tokens))
        own = None if size_class is None else size_class.headroom()
        if own is not None:
            return own
        others = [h for c in self._classes.values() if (h := c.headroom()) is not None]
        return max([DEFAULT_HEADROOM, *others])

    # ------------------------------------------------------------------ kept on disk

    def to_json(self) -> str:
        """The coefficients and corrections; not the samples."""
        return json.dumps(
            {
                "version": 1,
                "samples": self.samples,
                "coefficients": dict(zip(FEATURES, self._linear.coefficients, strict=True)),
                "corrections": {str(k): c.correction for k, c in sorted(self._classes.items())},
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> "StepTimes":
        """Raises ValueError when it is not what `to_json` wrote."""
        found = cls()
        try:
            values = json.loads(text)
            coefficients = [float(values["coefficients"][name]) for name in FEATURES]
            corrections = {int(k): float(v) for k, v in values["corrections"].items()}
            samples = int(values["samples"])
            known = values["version"] == 1
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a step-time model: {error!r}") from None
        numbers = [*coefficients, *corrections.values()]
        if not known or any(not (math.isfinite(n) and n >= 0.0) for n in numbers):
            raise ValueError("not a step-time model of this version")
        found._linear = NonNegativeLeastSquares(coefficients, SCALES, FORGET)
        for key, correction in corrections.items():
            found._classes[key] = _SizeClass()
            found._classes[key].correction = correction
        found.samples = samples
        return found


def _position(tokens: int) -> float:
    return CLASSES_PER_OCTAVE * math.log2(max(1, tokens))


def _class_of(tokens: int) -> int:
    return round(_position(tokens))


class StepTimeFile:
    """One model per base model and device, kept between starts."""

    def __init__(self, folder: Path, base_digest: str, device: str) -> None:
        """`device`: what the steps run on, any text."""
        slug = "".join(c if c.isalnum() else "-" for c in device.lower())
        self.path = folder / f"{base_digest[:16]}-{slug[:80]}.json"

    def load(self) -> StepTimes | None:
        """What was kept, or None where there is nothing sound."""
        try:
            return StepTimes.from_json(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("the step times of an earlier run are not used: %s", error)
            return None

    def save(self, times: StepTimes) -> None:
        """Replaces the file whole; a full disk is no reason to stop serving."""
        part = self.path.with_suffix(".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(times.to_json())
            os.replace(part, self.path)
        except OSError as error:
            log.warning("step times could not be kept: %s", error)
