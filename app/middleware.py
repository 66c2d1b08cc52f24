"""What surrounds every request, outermost first; all of it pure ASGI, so streams pass untouched.

RequestContext   request id, access log, metrics; the last net for unexpected errors
SecurityHeaders  content security policy and its siblings
SameOrigin       refuses unsafe requests that another site made a browser send
BodyLimits       size and pace of the body
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import error_handlers
from app.clock import Clock
from app.errors import AppError, Forbidden, InvalidRequest, TooLarge
from app.ids import new_id
from app.logging import where
from app.metrics import HTTP_OPEN, HTTP_REQUESTS, HTTP_SECONDS
from app.settings import is_loopback_host

_log = structlog.get_logger("loramux.http")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
PROBED = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every second by machines; their lines would bury everyone else's."""


# --------------------------------------------------------------------------- context


class RequestContext:
    """Gives the request its id, and writes one line when it ends.

    The id is always ours: the ledger has one row an id, so no client may choose it.
    """

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self.app = app
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        began_ms = self.clock.monotonic_ms()
        status, tag = 0, request_id.encode()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", tag)]
            await send(message)

        HTTP_OPEN.inc()
        try:
            await self.app(scope, receive, tagged)
        except AppError as error:
            if status:
                raise
            await error_handlers.answer(Request(scope), error)(scope, receive, tagged)
        except Exception as error:  # noqa: BLE001 - the last net; what is lost here is logged
            _log.error("unexpected", error=type(error).__name__, where=where(error))
            if status:
                raise ConnectionAbortedError("the answer was cut off") from None
            request = Request(scope)
            response = error_handlers.answer(request, error_handlers.internal(request))
            await response(scope, receive, tagged)
        finally:
            HTTP_OPEN.dec()
            self._finish(scope, status, self.clock.monotonic_ms() - began_ms)

    def _finish(self, scope: Scope, status: int, took_ms: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        if scope["path"].startswith("/static/"):
            route = "/static"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        HTTP_REQUESTS.labels(method, route, str(status)).inc()
        HTTP_SECONDS.labels(route).observe(took_ms / 1000)
        caller = scope.get("state", {}).get("caller")
        client = scope.get("client")
        write = _log.debug if route in PROBED else _log.info
        write(
            "request",
            method=method,
            route=route,
            status=status,
            took_ms=round(took_ms, 1),
            client=client[0] if client else None,
            tenant=getattr(caller, "tenant_id", None) or None,
            caller=(caller.key_id or caller.user_id) if caller is not None else None,
        )


_METHODS = SAFE_METHODS | {"POST", "PUT", "PATCH", "DELETE"}


# --------------------------------------------------------------------------- headers

CONSOLE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    b"frame-ancestors 'none'"
)
DOCS_POLICY = CONSOLE_POLICY.replace(b"style-src 'self'", b"style-src 'self' 'unsafe-inline'")
API_POLICY = b"default-src 'none'; frame-ancestors 'none'"
ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""On every answer; no route sets them itself."""


class SecurityHeaders:
    """Content-Security-Policy by path, nosniff, no framing, HSTS over https.

    Referrer-Policy stays `same-origin`: with `no-referrer` browsers send `Origin: null` with
    forms, which SameOrigin refuses.
    """

    def __init__(self, app: ASGIApp, https: bool) -> None:
        self.app = app
        self.https = https

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
                present = {name for name, _ in headers}
                if b"content-security-policy" not in present:
                    headers.append((b"content-security-policy", _policy(path)))
                if b"cache-control" not in present and not path.startswith("/static/"):
                    headers.append((b"cache-control", b"no-store"))
                headers += ALWAYS
                if self.https:
                    headers.append((b"strict-transport-security", b"max-age=31536000"))
                message["headers"] = headers
            await send(message)

        await self.app(scope, receive, guarded)


def _policy(path: str) -> bytes:
    if path.startswith("/docs"):
        return DOCS_POLICY
    if path.startswith(("/console", "/static")):
        return CONSOLE_POLICY
    return API_POLICY


# --------------------------------------------------------------------------- same origin


class SameOrigin:
    """Refuses unsafe methods on cookie-authenticated routes unless our own pages sent them.

    Fetch-Metadata says so in current browsers, `Origin` in all of them; both must agree with
    LORAMUX_PUBLIC_URL. A request with a bearer key carries no ambient authority and passes.
    """

    def __init__(self, app: ASGIApp, public_url: str, paths: Sequence[str]) -> None:
        self.app = app
        self.origins = allowed_origins(public_url)
        self.public_url = public_url
        self.paths = tuple(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self.paths):
            headers = Headers(scope=scope)
            unsafe = scope["method"] not in SAFE_METHODS
            if unsafe and "authorization" not in headers and not self._ours(headers):
                raise Forbidden(
                    "The request did not come from the console's own pages. Open the console at "
                    f"{self.public_url} (LORAMUX_PUBLIC_URL) and try again.",
                    code="cross_site",
                )
        await self.app(scope, receive, send)

    def _ours(self, headers: Headers) -> bool:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None and site not in ("same-origin", "none"):
            return False
        if origin is not None:
            return origin.lower() in self.origins
        return site == "same-origin"


def allowed_origins(public_url: str) -> frozenset[str]:
    """The public origin; a loopback one is reached under each of its names."""
    scheme, _, authority = public_url.partition("://")
    host, separator, port = authority.rpartition(":")
    if not separator or not port.isdigit():
        host, port = authority, ""
    if not is_loopback_host(host.strip("[]")):
        return frozenset({public_url})
    suffix = f":{port}" if port else ""
    names = ("127.0.0.1", "localhost", "[::1]", host)
    return frozenset(f"{scheme}://{name}{suffix}" for name in names)


# --------------------------------------------------------------------------- bodies


class RequestTimeout(InvalidRequest):
    status = 408
    code = "body_timeout"


class ClientGone(AppError):
    """Nobody reads this answer: it is for the log and the metrics, where it is no fault of ours."""

    status = 499
    type = "invalid_request_error"
    code = "client_closed_request"


@dataclass(frozen=True, slots=True)
class BodyRule:
    """Which routes may send how much. The first rule that matches the path applies."""

    path: re.Pattern[str]
    max_bytes: int
    setting: str


class BodyLimits:
    """Counts the body while it streams, and ends one that comes too slowly or stays away.

    A body may pause for `idle_s`; in all it has `total_s`, and as much again for every
    `pace_bytes` that have arrived, so a large upload may take long but may not trickle.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: Sequence[BodyRule],
        idle_s: float,
        total_s: float,
        pace_bytes: int,
        clock: Clock,
    ) -> None:
        self.app = app
        self.rules = rules
        self.idle_s = idle_s
        self.total_s = total_s
        self.pace_bytes = pace_bytes
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        rule = next(rule for rule in self.rules if rule.path.match(scope["path"]))
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdigit():
            raise InvalidRequest("Content-Length is not a number.", code="malformed_body")
        if int(declared) > rule.max_bytes:
            raise _too_large(rule, int(declared))
        await self.app(scope, self._metered(receive, rule), send)

    def _metered(self, receive: Receive, rule: BodyRule) -> Receive:
        began_ms = self.clock.monotonic_ms()
        taken = 0
        whole = False

        async def metered() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            allowed_s = self.total_s * (1 + taken // self.pace_bytes)
            left_s = allowed_s - (self.clock.monotonic_ms() - began_ms) / 1000
            try:
                async with asyncio.timeout(max(0.0, min(self.idle_s, left_s))):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout(
                    "The body came too slowly, so the request was given up; send it again."
                ) from None
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > rule.max_bytes:
                    raise _too_large(rule, taken)
                whole = not message.get("more_body", False)
            else:
                raise ClientGone("The client went away before its request was here in full.")
            return message

        return metered


def _too_large(rule: BodyRule, size: int) -> TooLarge:
    return TooLarge(
        f"The body has {size} bytes or more; at most {rule.max_bytes} are taken here. Send less, "
        f"or ask the operator to raise {rule.setting}.",
        code="body_too_large",
    )
