"""`loramux webhooks`: where a tenant is told of what, over the api."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from app.cli.adapters import KeyOption, UrlOption
from app.cli.http import api, expect
from app.cli.output import JsonFlag, console, fail, print_json, print_rows, say
from app.clock import SystemClock
from app.paging import MAX_LIMIT

app = typer.Typer(
    help="Register endpoints that are told what happens, and see what was sent to them.",
    no_args_is_help=True,
)

ASK_EVERY_S = 0.5
IdArgument = Annotated[str, typer.Argument(help="The webhook's id: loramux webhooks list.")]


@app.command("list")
def list_(url: UrlOption = None, key: KeyOption = None, as_json: JsonFlag = False) -> None:
    """List the tenant's webhooks."""
    with api(url, key) as client:
        found = expect(client.get("/v1/webhooks"))["data"]
    print_rows(
        found if as_json else [_row(webhook) for webhook in found],
        ("id", "url", "events", "state", "failing_since", "last_success"),
        as_json=as_json,
        empty="There is none yet: loramux webhooks create https://… --event version.ready",
    )


@app.command()
def create(
    to: Annotated[str, typer.Argument(metavar="TARGET", help="The https address to tell.")],
    event: Annotated[
        list[str], typer.Option("--event", help="What to tell; may be repeated, as the API has it.")
    ],
    description: Annotated[str, typer.Option(help="To tell it from others.")] = "",
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Register an endpoint and print the secret that signs its messages, this once."""
    body = {"url": to, "events": event, "description": description}
    with api(url, key) as client:
        _show_secret(expect(client.post("/v1/webhooks", json=body)), as_json)


@app.command()
def rotate(
    webhook_id: IdArgument,
    overlap: Annotated[
        int, typer.Option(metavar="SECONDS", min=0, help="How long the old one signs too.")
    ] = 86_400,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a new signing secret and print it, this once."""
    with api(url, key) as client:
        answer = client.post(f"{_path(webhook_id)}/rotate", json={"overlap_s": overlap})
        _show_secret(expect(answer), as_json)


@app.command()
def delete(
    webhook_id: IdArgument, url: UrlOption = None, key: KeyOption = None, as_json: JsonFlag = False
) -> None:
    """Delete a webhook with its deliveries."""
    with api(url, key) as client:
        gone = expect(client.delete(_path(webhook_id)))
    say(f"{webhook_id} is deleted", gone, as_json=as_json)


@app.command()
def enable(
    webhook_id: IdArgument, url: UrlOption = None, key: KeyOption = None, as_json: JsonFlag = False
) -> None:
    """Send to a webhook again that was disabled."""
    _switch(webhook_id, url, key, as_json, enabled=True)


@app.command()
def disable(
    webhook_id: IdArgument, url: UrlOption = None, key: KeyOption = None, as_json: JsonFlag = False
) -> None:
    """Send nothing more to a webhook; what waits for it is given up."""
    _switch(webhook_id, url, key, as_json, enabled=False)


@app.command("test")
def send_test(
    webhook_id: IdArgument,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the outcome.")
    ] = 15.0,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Send a test message and tell how its first attempt went; exit code 1 unless it arrived."""
    with api(url, key) as client:
        sent = expect(client.post(f"{_path(webhook_id)}/test"))
        delivery = _await_attempt(client, sent, wait)
    if as_json:
        print_json(delivery)
    elif delivery["attempts"]:
        console.print(f"{delivery['id']}: {_last_attempt(delivery)}", highlight=False)
    if not delivery["attempts"] and wait:
        fail(f"{delivery['id']} was not tried within {wait:g} s; does a worker run?")
    if delivery["attempts"] and delivery["state"] != "delivered":
        raise typer.Exit(1)
    if not delivery["attempts"] and not as_json:
        console.print(f"{delivery['id']} is queued: loramux webhooks deliveries {webhook_id}")


@app.command()
def deliveries(
    webhook_id: IdArgument,
    state: Annotated[str | None, typer.Option(help="pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT)] = 20,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what was sent to a webhook and how each attempt went; newest first."""
    query: dict[str, str | int] = {"limit": limit} | ({} if state is None else {"state": state})
    with api(url, key) as client:
        found = expect(client.get(f"{_path(webhook_id)}/deliveries", params=query))["data"]
    rows = [
        {
            "id": delivery["id"],
            "event": delivery["type"],
            "state": delivery["state"],
            "attempts": len(delivery["attempts"]),
            "last": _last_attempt(delivery),
            "created": _when(delivery["created_at"]),
            "next": _when(delivery["next_attempt_at"]),
        }
        for delivery in found
    ]
    print_rows(
        found if as_json else rows,
        ("id", "event", "state", "attempts", "last", "created", "next"),
        as_json=as_json,
        empty=f"Nothing was sent to it yet: loramux webhooks test {webhook_id}",
    )


@app.command()
def resend(
    webhook_id: IdArgument,
    delivery_id: Annotated[str, typer.Argument(help="loramux webhooks deliveries lists them.")],
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Send a delivery again, whatever came of it."""
    path = f"{_path(webhook_id)}/deliveries/{quote(delivery_id, safe='')}/resend"
    with api(url, key) as client:
        delivery = expect(client.post(path))
    say(f"{delivery_id} is due now", delivery, as_json=as_json)


# --------------------------------------------------------------------------- requests


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"


def _switch(
    webhook_id: str, url: str | None, key: str | None, as_json: bool, *, enabled: bool
) -> None:
    with api(url, key) as client:
        changed = expect(client.patch(_path(webhook_id), json={"enabled": enabled}))
    say(f"{webhook_id} is {'enabled' if enabled else 'disabled'}", changed, as_json=as_json)


def _await_attempt(client: httpx.Client, delivery: dict[str, Any], wait_s: float) -> dict[str, Any]:
    """The delivery once it was tried, or as it is when the time is over."""
    clock = SystemClock()
    until_ms = clock.monotonic_ms() + wait_s * 1000
    path = f"{_path(delivery['webhook_id'])}/deliveries"
    while not delivery["attempts"] and clock.monotonic_ms() < until_ms:
        time.sleep(ASK_EVERY_S)
        listed = expect(client.get(path, params={"limit": MAX_LIMIT}))["data"]
        delivery = next((one for one in listed if one["id"] == delivery["id"]), delivery)
    return delivery


# --------------------------------------------------------------------------- output


def _show_secret(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    console.print(f"{made['id']} is told. Its messages are signed with this, shown this once:")
    console.print(made["secret"], soft_wrap=True, highlight=False)


def _row(webhook: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": webhook["id"],
        "url": webhook["url"],
        "events": webhook["events"],
        "state": "enabled" if webhook["enabled"] else f"disabled ({webhook['disabled_reason']})",
        "failing_since": _when(webhook["failing_since"]),
        "last_success": _when(webhook["last_success_at"]),
    }


def _last_attempt(delivery: dict[str, Any]) -> str | None:
    if not delivery["attempts"]:
        return None
    last = delivery["attempts"][-1]
    answered = "" if last["status"] is None else f" {last['status']}"
    return f"{last['code']}{answered} in {last['duration_ms']} ms"


def _when(unix: int | None) -> str | None:
    return None if unix is None else f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"
