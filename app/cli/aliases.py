"""`loramux aliases`: list, set, promote, roll back, compare, and who moved what."""

from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from app.adapters.comparison_schemas import Window
from app.cli.adapters import KeyOption, UrlOption
from app.cli.http import api, expect
from app.cli.output import JsonFlag, console, fail, print_json, print_rows

app = typer.Typer(help="Point aliases at versions, by weight.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The adapter.")]
AliasArgument = Annotated[str, typer.Argument(help="The alias; `live` is what a bare name means.")]
RevisionOption = Annotated[
    int | None,
    typer.Option("--if-revision", min=1, help="Only if the alias is still at this revision."),
]
COMPARED = (
    "version",
    "weight",
    "requests",
    "running",
    "error_rate",
    "finish_reasons",
    "tokens_mean",
    "tokens_p95",
    "ttft_ms_p50",
    "ttft_ms_p95",
    "token_ms_p50",
    "token_ms_p95",
)


@app.command("list")
def list_(
    name: NameArgument, url: UrlOption = None, key: KeyOption = None, as_json: JsonFlag = False
) -> None:
    """List an adapter's aliases with their targets."""
    with api(url, key) as client:
        aliases = expect(client.get(_path(name)))["data"]
    rows = [alias if as_json else _row(alias) for alias in aliases]
    print_rows(
        rows,
        ("alias", "targets", "revision", "follows", "updated", "updated_by"),
        as_json=as_json,
        empty=f"{name} has no alias yet: loramux aliases set {name} live 1=100",
    )


@app.command("set")
def set_(
    name: NameArgument,
    alias: AliasArgument,
    targets: Annotated[list[str], typer.Argument(help="VERSION=PERCENT, as 3=90 4=10.")],
    if_revision: RevisionOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Share an alias out among ready versions; the percents sum to 100."""
    body = {"targets": [_target(target) for target in targets]}
    with api(url, key) as client:
        answer = client.put(_path(name, alias), json=body, headers=_unchanged(if_revision))
        _show(expect(answer), as_json)


@app.command()
def promote(
    name: NameArgument,
    alias: AliasArgument,
    version: Annotated[int, typer.Argument(min=1, help="One of the alias's targets.")],
    if_revision: RevisionOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Give one target all requests."""
    with api(url, key) as client:
        _post(client, name, alias, "promote", {"version": version}, if_revision, as_json)


@app.command()
def rollback(
    name: NameArgument,
    alias: AliasArgument,
    to_revision: Annotated[
        int | None, typer.Option(min=1, help="What it was at this revision.")
    ] = None,
    if_revision: RevisionOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an alias what it was before its last change, or at a revision."""
    with api(url, key) as client:
        _post(client, name, alias, "rollback", {"to_revision": to_revision}, if_revision, as_json)


@app.command()
def compare(
    name: NameArgument,
    alias: AliasArgument,
    window: Annotated[
        str, typer.Option(help="`change` (since the alias last changed), `1h` or `24h`.")
    ] = "change",
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show an alias's targets side by side."""
    windows: tuple[Window, ...] = ("change", "1h", "24h")
    if window not in windows:
        fail(f"--window takes {', '.join(windows)}, not {window!r}")
    with api(url, key) as client:
        path = f"{_path(name, alias)}/comparison"
        compared = expect(client.get(path, params={"window": window}))
    if as_json:
        print_json(compared)
        return
    console.print(f"{name}@{alias} since {_when(compared['since'])}", highlight=False)
    rows = [_figures(target) for target in compared["targets"]]
    print_rows(rows, COMPARED, as_json=False, empty="It has no target.")


@app.command()
def history(
    name: NameArgument,
    alias: AliasArgument,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who moved an alias, when, from what to what; newest first."""
    with api(url, key) as client:
        found = expect(client.get(f"{_path(name, alias)}/history", params={"limit": limit}))
    if as_json:
        print_json(found["data"])
        return
    rows = [
        {
            "revision": change["revision"],
            "when": _when(change["at"]),
            "action": change["action"],
            "from": _shares(change["from"]),
            "to": _shares(change["to"]),
            "who": change["by"]["label"] or change["by"]["id"],
        }
        for change in found["data"]
    ]
    columns = ("revision", "when", "action", "from", "to", "who")
    print_rows(rows, columns, as_json=False, empty="It never changed.")


# --------------------------------------------------------------------------- requests


def _path(name: str, alias: str | None = None) -> str:
    path = f"/v1/adapters/{quote(name, safe='')}/aliases"
    return path if alias is None else f"{path}/{quote(alias, safe='')}"


def _unchanged(revision: int | None) -> dict[str, str]:
    return {} if revision is None else {"If-Match": f'"{revision}"'}


def _post(
    client: httpx.Client,
    name: str,
    alias: str,
    action: str,
    body: dict[str, Any],
    if_revision: int | None,
    as_json: bool,
) -> None:
    path = f"{_path(name, alias)}/{action}"
    _show(expect(client.post(path, json=body, headers=_unchanged(if_revision))), as_json)


def _target(text: str) -> dict[str, int]:
    version, equals, weight = text.removeprefix("v").partition("=")
    if not equals or not version.isdigit() or not weight.removesuffix("%").isdigit():
        fail(f"{text!r} is no target; write VERSION=PERCENT, as 3=90")
    return {"version": int(version), "weight": int(weight.removesuffix("%"))}


# --------------------------------------------------------------------------- output


def _show(alias: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(alias)
        return
    shares = _shares(alias["targets"])
    place = f"{alias['adapter']}@{alias['alias']}"
    console.print(f"{place} is {shares} (revision {alias['revision']})", highlight=False)


def _row(alias: dict[str, Any]) -> dict[str, Any]:
    return {
        "alias": alias["alias"],
        "targets": _shares(alias["targets"]),
        "revision": alias["revision"],
        "follows": "no" if alias["by_hand"] else "new versions",
        "updated": _when(alias["updated_at"]),
        "updated_by": alias["updated_by"],
    }


def _shares(targets: list[dict[str, Any]] | None) -> str:
    if targets is None:
        return "nothing"
    return " ".join(f"v{target['version']}={target['weight']}%" for target in targets)


def _when(unix: int) -> str:
    return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _figures(target: dict[str, Any]) -> dict[str, Any]:
    tokens, ttft, token = (target[name] or {} for name in ("output_tokens", "ttft_ms", "token_ms"))
    rate = target["error_rate"]
    reasons = target["finish_reasons"].items()
    return {
        "version": f"v{target['version']}",
        "weight": f"{target['weight']}%",
        "requests": target["requests"],
        "running": target["running"],
        "error_rate": None if rate is None else f"{100 * rate:.2f}%",
        "finish_reasons": " ".join(f"{reason}:{count}" for reason, count in reasons) or None,
        "tokens_mean": tokens.get("mean"),
        "tokens_p95": tokens.get("p95"),
        "ttft_ms_p50": ttft.get("p50"),
        "ttft_ms_p95": ttft.get("p95"),
        "token_ms_p50": token.get("p50"),
        "token_ms_p95": token.get("p95"),
    }
