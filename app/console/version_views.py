"""A version and its validation report as pages show them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.adapters.alias_schemas import AliasObject
from app.adapters.schemas import CheckObject, FindingObject, VersionObject
from app.console.charts import Chart, bar_chart
from app.console.figures import figure, moment, size

SETTLED = frozenset({"ready", "rejected", "failed", "archived", "erased"})
GROUPS = {
    "container": "Files",
    "config": "Configuration",
    "coverage": "Coverage",
    "numbers": "Numbers",
    "behaviour": "Behaviour",
}
PASSED = {
    "container": "Both files are whole and hold what their headers say.",
    "config": "The configuration asks for nothing that cannot be served.",
    "coverage": "Every tensor has its place on the base model.",
    "numbers": "All weights are finite and of ordinary size.",
    "behaviour": "The engine ran it on probe prompts without a fault.",
}
REMEDIES = {
    "container": "Save the adapter again with save_pretrained(…, safe_serialization=True), and "
    "upload both files whole.",
    "config": "Correct adapter_config.json or train without what it names, then upload a new "
    "version.",
    "coverage": "Train the adapter on this base model, and upload the files that PEFT saved "
    "unchanged.",
    "numbers": "Train again, with a lower learning rate or gradient clipping, from a checkpoint "
    "that was still finite.",
    "behaviour": "Try the files with PEFT: if the answers are whole there, upload them again.",
}
BY_LAYER = "update_ratio_by_layer"
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of one kind: the first of them, and the messages of the others."""

    first: FindingObject
    others: list[str]

    @property
    def count(self) -> int:
        return 1 + len(self.others)


def shown_version(version: VersionObject, aliases: list[str]) -> dict[str, Any]:
    """`aliases`: labels of those that point here."""
    return {
        "number": version.version,
        "state": version.state,
        "settled": version.state in SETTLED,
        "reason": version.reason,
        "rank": version.rank,
        "targets": version.targets or [],
        "size": size(version.config_bytes + version.weights_bytes),
        "digest": version.digest,
        "created_at": moment(version.created_at),
        "aliases": aliases,
    }


def shares(alias: AliasObject) -> str:
    """What it points at: `v3`, or `v3 90 %, v4 10 %` while a canary runs."""
    if len(alias.targets) == 1:
        return f"v{alias.targets[0].version}"
    return ", ".join(f"v{target.version} {target.weight} %" for target in alias.targets)


def shown_check(check: CheckObject) -> dict[str, Any]:
    summary = PASSED.get(check.group, "") if check.status == "pass" else ""
    if check.status == "skipped":
        summary = "Not run, because an earlier check failed."
    return {
        "title": GROUPS.get(check.group, check.group),
        "outcome": check.status,
        "summary": summary,
        "remedy": REMEDIES.get(check.group, "") if check.status == "fail" else "",
        "findings": grouped(check.findings),
        "chart": norms_chart(check.figures),
        "figures": [
            (name.replace("_", " "), figure(value))
            for name, value in check.figures.items()
            if name != BY_LAYER
        ],
    }


def grouped(findings: Sequence[FindingObject]) -> list[Findings]:
    """Those of one code that differ in the place and in numbers alone are one line."""
    kinds: dict[tuple[str, str], list[FindingObject]] = {}
    for finding in findings:
        words = finding.message.replace(finding.field or "\0", "")
        kinds.setdefault((finding.code, _NUMBER.sub("", words)), []).append(finding)
    return [Findings(alike[0], [one.message for one in alike[1:]]) for alike in kinds.values()]


def norms_chart(figures: Mapping[str, Any]) -> Chart | None:
    """The norm of each layer's update in percent of the weights that it changes."""
    by_layer = figures.get(BY_LAYER)
    if not by_layer:
        return None
    columns = [
        (f"layer {layer}", (("answer", 100.0 * float(ratio)),))
        for layer, ratio in sorted(by_layer.items(), key=lambda item: int(item[0]))
    ]
    return bar_chart(columns, unit=" % of the weights' norm")


def progress(version: VersionObject) -> str:
    """What the validation is doing now, in a sentence."""
    if version.report is not None and version.report.message:
        return version.report.message
    if version.state == "uploaded":
        return "Waiting for a worker."
    done = len(version.report.checks) if version.report is not None else 0
    return f"{done} of {len(GROUPS)} checks are done."
