"""The CLI's way to a running server: LORAMUX_URL and LORAMUX_API_KEY, errors as sentences."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from app.cli.output import fail

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0


def server_url(url: str | None) -> str:
    here = f"http://127.0.0.1:{os.environ.get('LORAMUX_PORT') or 8000}"
    return (url or os.environ.get("LORAMUX_URL") or here).rstrip("/")


def api_key(key: str | None) -> str:
    found = key or os.environ.get("LORAMUX_API_KEY")
    if not found:
        fail(
            "no API key: set LORAMUX_API_KEY (create one with `loramux keys create --tenant NAME`)"
        )
    return found


@contextmanager
def api(url: str | None, key: str | None) -> Iterator[httpx.Client]:
    """A client that is signed in; an unreachable server or a refusal ends the command."""
    with httpx.Client(**_options(url, api_key(key))) as client, _unreachable(server_url(url)):
        yield client


def require_server(url: str | None) -> None:
    """Ends the command unless a server answers there."""
    with httpx.Client(timeout=CONNECT_TIMEOUT_S) as client, _unreachable(server_url(url)):
        client.get(f"{server_url(url)}/healthz")


def async_api(url: str | None, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(**_options(url, key))


def expect(response: httpx.Response, *statuses: int) -> Any:
    """The JSON body of a response with one of `statuses` (any 2xx by default), else fail()."""
    accepted = response.status_code in statuses if statuses else response.is_success
    if not accepted:
        fail(describe_error(response))
    return response.json()


def describe_error(response: httpx.Response) -> str:
    """The server's own sentence with its code; the status alone if the body is not ours."""
    try:
        error = response.json()["error"]
        return f"{error['message']} ({response.status_code} {error['code']})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} without an explanation"


async def stream_text(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    """Content deltas of one streamed chat completion; raises `StreamFailed` on an error frame."""
    async with (
        _reachable(client),
        client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as r,
    ):
        if not r.is_success:
            await r.aread()
            raise StreamFailed(describe_error(r))
        async for line in r.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[len("data: ") :])
            if "error" in chunk:
                raise StreamFailed(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    yield text


class StreamFailed(Exception):
    """The server refused the stream or broke it off; the message is its sentence."""


@asynccontextmanager
async def _reachable(client: httpx.AsyncClient) -> AsyncIterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise StreamFailed(_connection_problem(error, str(client.base_url))) from error


def _connection_problem(error: httpx.HTTPError, url: str) -> str:
    if isinstance(error, httpx.ConnectError):
        return f"no server answers at {url}: start one with `make run`, or set LORAMUX_URL"
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url!r} is no address of a server; it begins with http:// or https://"
    if isinstance(error, httpx.TimeoutException):
        return f"{url} did not answer in time; the server's log says what it is doing"
    return f"the connection to {url} broke off ({type(error).__name__})"


def _options(url: str | None, key: str) -> dict[str, Any]:
    return {
        "base_url": server_url(url),
        "headers": {"Authorization": f"Bearer {key}"},
        "timeout": httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
    }


@contextmanager
def _unreachable(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        fail(_connection_problem(error, url))
