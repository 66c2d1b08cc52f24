"""What surrounds a request: same origin, headers, bodies, request ids."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from app.clock import FrozenClock, SystemClock
from app.errors import AppError
from app.limits.open import open_limits
from app.middleware import BodyLimits, BodyRule, allowed_origins
from app.platform import Platform
from app.settings import Settings
from tests.factories import bearer, make_key, make_tenant

OURS = "http://127.0.0.1:8000"


class TestSameOrigin:
    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": OURS},
            {"origin": "http://localhost:8000"},
            {"origin": OURS, "sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "same-origin"},
            {"origin": OURS, "sec-fetch-site": "none"},
        ],
    )
    async def test_our_own_pages_pass(
        self, client: httpx.AsyncClient, headers: Mapping[str, str]
    ) -> None:
        assert await self._code(client, headers) != "cross_site"

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"sec-fetch-site": "none"},
            {"origin": "null"},
            {"origin": "https://evil.example"},
            {"origin": "http://127.0.0.1:8001"},
            {"origin": "https://127.0.0.1:8000"},
            {"origin": "http://127.0.0.1:8000.evil.example"},
            {"origin": OURS, "sec-fetch-site": "cross-site"},
            {"origin": OURS, "sec-fetch-site": "same-site"},
        ],
    )
    async def test_everything_else_is_refused(
        self, client: httpx.AsyncClient, headers: Mapping[str, str]
    ) -> None:
        assert await self._code(client, headers) == "cross_site"

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "PURGE"])
    async def test_every_unsafe_method_is_looked_at(
        self, client: httpx.AsyncClient, method: str
    ) -> None:
        answer = await client.request(
            method, "/admin/v1/tenants", headers={"origin": "https://evil.example"}
        )
        assert answer.json()["error"]["code"] == "cross_site"

    async def test_a_bearer_key_is_no_ambient_authority(self, client: httpx.AsyncClient) -> None:
        headers = {"origin": "https://app.example", "authorization": "Bearer lmx_x"}
        assert await self._code(client, headers) == "invalid_api_key"

    def test_a_public_origin_stands_for_itself_alone(self) -> None:
        assert allowed_origins("https://x.org") == {"https://x.org"}

    async def _code(self, client: httpx.AsyncClient, headers: Mapping[str, str]) -> str:
        client.headers.pop("origin", None)
        answer = await client.post("/admin/v1/tenants", json={"name": "a"}, headers=headers)
        return str(answer.json()["error"]["code"])


class TestHeaders:
    @pytest.mark.parametrize("path", ["/console", "/docs", "/v1/x", "/static/none", "/healthz"])
    async def test_every_answer_has_a_policy_without_inline_scripts(
        self, client: httpx.AsyncClient, path: str
    ) -> None:
        headers = (await client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        script = re.search(r"script-src ([^;]*)", policy)
        assert script is None or script.group(1) == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"

    async def test_answers_are_not_stored(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models")).headers["cache-control"] == "no-store"


class TestRequestIds:
    async def test_are_ours_whatever_the_client_sends(self, client: httpx.AsyncClient) -> None:
        sent = {"x-request-id": "req_chosen"}
        first = (await client.get("/healthz", headers=sent)).headers["x-request-id"]
        second = (await client.get("/healthz", headers=sent)).headers["x-request-id"]
        assert re.fullmatch(r"req_[0-9a-z]{26}", first)
        assert first != second

    async def test_are_on_refusals_too(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/none")).headers["x-request-id"].startswith("req_")


class TestTrustedProxies:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return Settings(
            data_dir=settings.data_dir,
            database_url=settings.database_url,
            trusted_proxies=["127.0.0.1"],
        )

    async def test_a_trusted_proxys_word_on_the_client_is_taken(
        self, client: httpx.AsyncClient
    ) -> None:
        assert (await client.get("/metrics")).status_code == 200
        with capture_logs() as lines:
            await client.get("/healthz", headers={"x-forwarded-for": "203.0.113.5"})
        assert [line["client"] for line in lines] == ["203.0.113.5"]


class TestForwardedWithoutTrust:
    async def test_a_proxy_that_was_not_named_does_not_open_metrics(
        self, client: httpx.AsyncClient
    ) -> None:
        assert (await client.get("/metrics")).status_code == 200
        answer = await client.get("/metrics", headers={"x-forwarded-for": "203.0.113.5"})
        assert answer.status_code == 403


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads the whole body."""
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})


def limits(app: Any = read_all, *, clock: Any = None, **changes: Any) -> BodyLimits:
    values: dict[str, Any] = {
        "rules": [BodyRule(re.compile(""), 100, "LORAMUX_MAX_BODY_BYTES")],
        "idle_s": 5.0,
        "total_s": 10.0,
        "pace_bytes": 10,
        "clock": clock or SystemClock(),
    }
    return BodyLimits(app, **{**values, **changes})


async def drive(
    stack: BodyLimits, chunks: list[bytes], *, declared: str | None = None, pause: Any = None
) -> list[Message]:
    """Sends a body in chunks; returns what was answered."""
    sent: list[Message] = []
    headers = [] if declared is None else [(b"content-length", declared.encode())]
    scope: Scope = {"type": "http", "path": "/v1/x", "method": "POST", "headers": headers}
    left = list(chunks)

    async def receive() -> Message:
        if pause is not None:
            await pause()
        body = left.pop(0) if left else b""
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    await stack(scope, receive, send)
    return sent


class TestBodies:
    async def test_within_the_limit_pass(self) -> None:
        assert (await drive(limits(), [b"x" * 50, b"x" * 50], declared="100"))[0]["status"] == 200

    async def test_declared_as_too_large_are_refused_before_a_byte_is_read(self) -> None:
        async def unexpected() -> None:
            raise AssertionError("the body was read")

        with pytest.raises(AppError) as caught:
            await drive(limits(), [b""], declared="101", pause=unexpected)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")
        assert "LORAMUX_MAX_BODY_BYTES" in caught.value.message

    async def test_that_grow_too_large_are_refused_while_they_stream(self) -> None:
        with pytest.raises(AppError) as caught:
            await drive(limits(), [b"x" * 60, b"x" * 60, b"x" * 60])
        assert caught.value.status == 413

    async def test_that_lie_about_their_length_are_counted(self) -> None:
        with pytest.raises(AppError) as caught:
            await drive(limits(), [b"x" * 200], declared="5")
        assert caught.value.status == 413

    async def test_with_a_length_that_is_no_number_are_refused(self) -> None:
        with pytest.raises(AppError) as caught:
            await drive(limits(), [b""], declared="-1")
        assert caught.value.status == 400

    async def test_that_pause_for_too_long_are_given_up(self) -> None:
        with pytest.raises(AppError) as caught:
            await drive(limits(idle_s=0.01), [b"x"], pause=lambda: asyncio.sleep(30))
        assert (caught.value.status, caught.value.code) == (408, "body_timeout")

    async def test_that_trickle_are_given_up_although_they_never_pause(self) -> None:
        clock = FrozenClock(SystemClock().now())

        async def nine_seconds() -> None:
            clock.advance(seconds=9)
            await asyncio.sleep(0)

        with pytest.raises(AppError) as caught:
            await drive(limits(clock=clock), [b"x"] * 20, pause=nine_seconds)
        assert caught.value.code == "body_timeout"

    async def test_that_are_large_have_longer(self) -> None:
        clock = FrozenClock(SystemClock().now())

        async def nine_seconds() -> None:
            clock.advance(seconds=9)
            await asyncio.sleep(0)

        sent = await drive(limits(clock=clock), [b"x" * 20] * 5, pause=nine_seconds)
        assert sent[0]["status"] == 200

    async def test_over_the_limit_are_openais_413_at_the_real_routes(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        async def endless() -> Any:
            while True:
                yield b"x" * 65536

        for content in (b"x" * (platform.settings.max_body_bytes + 1), endless()):
            answer = await client.post(
                "/admin/v1/tenants",
                content=content,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


class TestClientsThatGoAway:
    @pytest.mark.parametrize(
        ("path", "content_type"),
        [
            ("/v1/chat/completions", b"application/json"),
            ("/v1/adapters", b"multipart/form-data; boundary=x"),
            ("/admin/v1/tenants", b"application/json"),
        ],
    )
    async def test_while_their_body_is_read_are_a_quiet_end(
        self, app: FastAPI, platform: Platform, path: str, content_type: bytes
    ) -> None:
        platform.limits = open_limits(None, platform.clock)
        key = await make_key(platform, await make_tenant(platform))
        headers = [(name.lower().encode(), v.encode()) for name, v in bearer(key).items()]
        scope: Scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "scheme": "http",
            "headers": [*headers, (b"content-type", content_type), (b"content-length", b"99")],
        }  # fmt: skip
        arriving: list[Message] = [
            {"type": "http.request", "body": b"--x\r\n", "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Message:
            return arriving.pop(0)

        async def send(_message: Message) -> None:
            """Nobody is there."""

        with capture_logs() as lines:
            await app(scope, receive, send)
        assert [(line["event"], line.get("status")) for line in lines] == [("request", 499)]
