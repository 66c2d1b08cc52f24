"""`loramux usage`: what the key's tenant has used, as a table, JSON or CSV."""

import sys
from typing import Annotated, Any

import httpx
import typer

from app.cli.http import api, expect
from app.cli.output import JsonFlag, fail, print_json, print_rows

FIGURES = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "total_tokens",
    "prefill_ms",
    "decode_ms",
)
GROUPS = {"key": "key_id", "adapter": "adapter_id", "model": "model"}


def usage(
    bucket: Annotated[str, typer.Option(help="minute, hour, day, month or all.")] = "day",
    group_by: Annotated[
        str, typer.Option(help="Any of key, adapter, model; several by commas.")
    ] = "",
    start: Annotated[str | None, typer.Option(help="ISO 8601; UTC unless it says so.")] = None,
    end: Annotated[str | None, typer.Option(help="ISO 8601; the default is now.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead.")] = False,
    requests: Annotated[
        bool, typer.Option("--requests", help="With --csv: one line a request.")
    ] = False,
    url: Annotated[str | None, typer.Option("--url", help="The server; or LORAMUX_URL.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="The key; or LORAMUX_API_KEY.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Add up what was used; without options, by day over the last 30 days."""
    if requests and not as_csv:
        fail("--requests needs --csv: single requests are exported, not listed")
    wanted = {"bucket": bucket, "group_by": group_by, "start": start, "end": end}
    query = {name: value for name, value in wanted.items() if value}
    with api(url, key) as client:
        if as_csv:
            _print_csv(client, query | {"of": "requests" if requests else "buckets"})
            return
        report = _whole(client, query)
    if as_json:
        print_json(report)
        return
    groups = [GROUPS[name] for name in report["group_by"]]
    print_rows(
        report["data"],
        ("start", *groups, *FIGURES),
        as_json=False,
        empty="Nothing has been used in this time.",
    )


def _whole(client: httpx.Client, query: dict[str, str]) -> dict[str, Any]:
    """All pages of a report as one."""
    report: dict[str, Any] = expect(client.get("/v1/usage", params=query))
    page = report
    while page["has_more"]:
        page = expect(client.get("/v1/usage", params=query | {"after": page["next"]}))
        report["data"] += page["data"]
    return report | {"has_more": False, "next": None}


def _print_csv(client: httpx.Client, query: dict[str, str]) -> None:
    with client.stream("GET", "/v1/usage/export", params=query) as answer:
        if not answer.is_success:
            answer.read()
            expect(answer)
        for text in answer.iter_text():
            sys.stdout.write(text)
