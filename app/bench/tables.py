"""Reports as aligned lines for people and as one JSON document."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.bench.report import Percentiles, Report, TenantReport

MOST_TENANTS = 12
"""Tenants that get a line of their own; the rest are only in the JSON."""
Print = Callable[[str], object]


def print_reports(show: Print, reports: Mapping[str, Report]) -> None:
    """A line a run, then who was refused why, then the tenants that fared worst."""
    heads = ("run", "offered", "answered", "goodput", "tenants ok", "TTFT p50/p95/p99",
             "TPOT p50/p95/p99", "gap p99", "tokens/s", "Jain")  # fmt: skip
    print_table(show, heads, [_run_row(label, report) for label, report in reports.items()])
    show("(ms; goodput: good of those offered, refused ones included; Jain over served shares)")
    for label, report in reports.items():
        if report.refused:
            causes = ", ".join(f"{count} {cause}" for cause, count in report.refused.items())
            show(f"{label}: not answered: {causes}")
    worst = {label: _worst_tenants(report) for label, report in reports.items()}
    if any(worst.values()):
        most = max(1, MOST_TENANTS // len(reports))
        show("")
        columns = ("run", "tenants that missed most", "offered", "answered", "attained", "promised",
                 "served", "TTFT p50/p95/p99")  # fmt: skip
        rows = [_tenant_row(label, t) for label, found in worst.items() for t in found[:most]]
        print_table(show, columns, rows)


def print_table(show: Print, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; the first is on the left, the others on the right. Never cut."""
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows):
        first, *others = (
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        show("  ".join((first, *others)).rstrip())


def write_json(path: Path, reports: Mapping[str, Report], **more: Any) -> None:
    """`{"runs": {label: figures}, ...}`; what was not measured is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_document(reports, **more), indent=1, allow_nan=False) + "\n")


def as_document(reports: Mapping[str, Report], **more: Any) -> dict[str, Any]:
    return {"runs": {label: report.as_dict() for label, report in reports.items()}} | more


def _run_row(label: str, report: Report) -> Sequence[str]:
    return (
        label,
        str(report.offered),
        str(report.answered),
        f"{report.goodput:.3f}",
        f"{report.tenants_attaining:.0%}",
        _three(report.ttft_ms),
        _three(report.tpot_ms),
        _one(report.gap_ms.p99),
        f"{report.total_tokens_per_s:.0f}",
        f"{report.jain:.3f}",
    )


def _worst_tenants(report: Report) -> list[TenantReport]:
    """Those below their percentile, the furthest below first."""
    missed = [tenant for tenant in report.tenants if not tenant.attains]
    return sorted(missed, key=lambda tenant: (tenant.attainment or 0.0) - tenant.percentile)


def _tenant_row(label: str, tenant: TenantReport) -> Sequence[str]:
    return (
        label,
        tenant.tenant,
        str(tenant.offered),
        str(tenant.answered),
        f"{tenant.attainment:.3f}",
        f"{tenant.percentile:.2f}",
        f"{tenant.served_share:.0%}",
        _three(tenant.ttft_ms),
    )


def _three(values: Percentiles) -> str:
    return "/".join(_one(value) for value in (values.p50, values.p95, values.p99))


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
