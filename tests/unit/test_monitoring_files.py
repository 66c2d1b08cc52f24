"""deploy/grafana and deploy/prometheus: every query can be read and names what is exported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.exported_metrics import families
from tests.promql import PromqlError, Query, parse

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCRAPE = {"job", "instance"}
"""Labels that Prometheus adds to everything."""


def panel_queries() -> list[tuple[str, str]]:
    """(dashboard and panel, query)"""
    return [
        (f"{file.stem}: {panel['title']}", target["expr"])
        for file in DASHBOARDS
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]


async def samples() -> dict[str, set[str]]:
    """Name of each exported sample -> its labels."""
    found = {"up": SCRAPE}
    for name, (kind, labels) in (await families()).items():
        known = labels | SCRAPE
        if kind == "histogram":
            found |= {
                f"{name}_bucket": known | {"le"},
                f"{name}_sum": known,
                f"{name}_count": known,
            }
        else:
            found[name] = known
    return found


def problems(query: Query, exported: dict[str, set[str]]) -> list[str]:
    found = []
    for selector in query.selectors:
        labels = exported.get(selector.metric)
        if labels is None:
            found.append(f"{selector.metric} is not exported")
        elif not selector.matchers <= labels:
            found.append(f"{selector.metric} has no {selector.matchers - labels}")
        elif selector.metric.endswith(("_total", "_bucket", "_count")) and not selector.ranged:
            found.append(f"{selector.metric} is a counter and is read without a range")
    for kept, below in query.groupings:
        known = set().union(*(exported.get(selector.metric, set()) for selector in below))
        if not kept <= known:
            found.append(f"{kept - known} is no label of {[s.metric for s in below]}")
    return found


@pytest.mark.parametrize(("where", "query"), panel_queries())
async def test_a_panels_query_names_exported_metrics_and_labels(where: str, query: str) -> None:
    assert problems(parse(query), await samples()) == [], where


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
async def test_an_alerts_query_names_exported_metrics_and_labels(rule: dict[str, Any]) -> None:
    assert problems(parse(rule["expr"]), await samples()) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]


def test_every_alert_has_its_row_in_the_document() -> None:
    document = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"^\| `(Loramux\w+)`", document, re.MULTILINE)) == {
        rule["alert"] for rule in RULES
    }


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_can_be_provisioned(file: Path) -> None:
    board = json.loads(file.read_text())
    assert board["uid"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    text = file.read_text().replace("$__rate_interval", "")
    assert set(re.findall(r"\$\{?(\w+)", text)) <= variables


class TestTheParser:
    @pytest.mark.parametrize(
        "query",
        [
            "sum(",
            "rate(x[5m]",
            "x{a=b}",
            "sum by (a x)",
            "x[5 minutes]",
            "nofunction(x)",
            "a b",
            "",
        ],
    )
    def test_nonsense_is_refused(self, query: str) -> None:
        with pytest.raises(PromqlError):
            parse(query)

    async def test_unknown_names_and_labels_are_found(self) -> None:
        exported = await samples()
        for query in (
            "loramux_invented",
            'loramux_engine_up{tenant="x"}',
            "sum by (tenant) (loramux_engine_up)",
            "loramux_requests_total",
        ):
            assert problems(parse(query), exported)
