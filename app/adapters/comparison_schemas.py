"""The JSON of a canary's figures. Times are Unix seconds, latencies are milliseconds."""

from typing import Literal

from pydantic import BaseModel, Field

Window = Literal["change", "1h", "24h"]


class ErrorCount(BaseModel):
    code: str
    requests: int


class LengthFigures(BaseModel):
    """Tokens."""

    mean: float
    p50: int
    p95: int


class LatencyFigures(BaseModel):
    p50: float
    p95: float
    p99: float


class TargetFigures(BaseModel):
    """One version as the alias's callers met it. Figures are null where nothing was measured."""

    version: int
    weight: int = Field(description="percent now; 0 when it is no target any more")
    state: str
    requests: int = Field(description="that began in the window: running, and ended in any way")
    running: int
    completed: int
    cancelled: int
    failed: int
    error_rate: float | None = Field(description="failed of those that ended")
    errors: list[ErrorCount]
    sampled: int = Field(description="newest completed requests that the figures below are of")
    finish_reasons: dict[str, int]
    output_tokens: LengthFigures | None
    ttft_ms: LatencyFigures | None = Field(description="from admission to the first token")
    token_ms: LatencyFigures | None = Field(description="from one token to the next")


class Comparison(BaseModel):
    """The targets side by side, the heaviest first."""

    object: Literal["adapter.alias.comparison"] = "adapter.alias.comparison"
    adapter: str
    alias: str
    revision: int
    window: Window
    since: int
    until: int
    targets: list[TargetFigures]
