"""What one check of a validation run found, as plain data that fits a row and a JSON report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GROUPS = ("container", "config", "coverage", "numbers", "behaviour")
"""The checks in the order in which they run; a Check row's position counts along it."""

BEHAVIOUR_CODES = {
    "non_finite_logits": ("fail", "With the adapter the model's outputs are not finite numbers."),
    "behaviour_far_from_base": ("warn", "Its answers are far from the base model's."),
    "behaviour_loops": ("warn", "It repeats one phrase where the base model does not."),
    "behaviour_costly": ("warn", "A token takes much longer than without it."),
}
"""code -> (severity, what it means), of the group that runs on the engine."""
PROCESS_CODES = {
    "resource_limit": ("fail", "Reading the files took more memory or time than is allowed."),
    "check_crashed": ("fail", "Reading the files brought the check down."),
    "check_timeout": ("attempt", "A check was stopped; the validation is tried again."),
}
"""code -> (severity, what it means), of the process that reads the files; `attempt` is not a
verdict unless it is the last one."""
ATTEMPT_CODES = {
    "engine_unavailable": "No engine could try the adapter, or it went away while it ran.",
    "store_unavailable": "The adapter store did not answer.",
    "adapter_missing": "The uploaded files are no longer in the store.",
    "adapter_corrupt": "The stored files are not those that were uploaded.",
    "validation_error": "A check stopped because of a fault of the server's.",
    "worker_lost": "The worker died in every attempt.",
}
"""code -> what it means, of attempts that end without a verdict."""


def finding(code: str, severity: str, message: str, **figures: Any) -> dict[str, Any]:
    """One sentence of a report."""
    return {
        "code": code,
        "severity": severity,
        "message": message,
        "field": None,
        "figures": figures,
    }


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """One group's result. `status`: pass, warn, fail, or skipped after an earlier failure."""

    group: str
    status: str
    findings: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    duration_ms: int = 0

    @classmethod
    def failed(cls, group: str, code: str, message: str) -> "CheckOutcome":
        return cls(group, "fail", [finding(code, "fail", message)])

    @property
    def position(self) -> int:
        return GROUPS.index(self.group)


def first_failure(outcomes: Sequence[CheckOutcome]) -> tuple[str, str] | None:
    """(code, message) of the first finding that refuses the adapter; None when none does."""
    for outcome in outcomes:
        if outcome.status != "fail":
            continue
        for entry in outcome.findings:
            if entry["severity"] == "fail":
                return str(entry["code"]), str(entry["message"])
    return None
