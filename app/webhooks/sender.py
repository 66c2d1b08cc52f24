"""Sends one message: to the address that was judged, with the name's Host, SNI and certificate.

No redirects, no proxies, no cookies, a total time; of the answer nothing but its status and
Retry-After is read.
"""

import asyncio
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import httpx

from app.clock import Clock
from app.errors import InvalidRequest
from app.settings import Settings
from app.webhooks.addresses import (
    AddressRefused,
    NameUnresolvable,
    Resolve,
    reachable_address,
    resolve,
)
from app.webhooks.backoff import asked_for_s

Code = Literal[
    "delivered",
    "http_error",
    "redirect",
    "gone",
    "timeout",
    "connection_failed",
    "tls_failed",
    "name_unresolvable",
    "address_refused",
    "secret_unreadable",
    "endpoint_disabled",
]
MAX_URL_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. `status` is None where nothing was answered; `retry_after_s` is what
    a busy receiver asked for."""

    code: Code
    status: int | None = None
    duration_ms: int = 0
    retry_after_s: float | None = None


class Sender:
    """One a process. Tests give a resolver and certificates of their own."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        resolver: Resolve = resolve,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        self._allow_loopback = settings.webhook_allow_loopback
        self._timeout_s = settings.webhook_timeout_s
        self._clock = clock
        self._resolver = resolver
        self._given = verify

    @cached_property
    def _verify(self) -> ssl.SSLContext:
        """The public authorities, read once: that takes a while."""
        return self._given or httpx.create_ssl_context(trust_env=False)

    async def check(self, text: str) -> str:
        """`text` as it is stored, if messages may go there now. Raises InvalidRequest."""
        url = parse_url(text, allow_http=self._allow_loopback)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._address(url)
        except AddressRefused:
            raise InvalidRequest(
                "the URL's host leads to an address that webhooks may not go to (private, "
                "loopback, link-local, or reserved); use a public https address",
                code="webhook_address_refused",
                param="url",
            ) from None
        except (NameUnresolvable, TimeoutError):
            raise InvalidRequest(
                "the URL's host has no address now; check its spelling and its DNS record",
                code="webhook_host_unknown",
                param="url",
            ) from None
        return str(url)

    async def send(self, text: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        """Never raises for what the other side does."""
        began_ms = self._clock.monotonic_ms()
        status: int | None = None
        retry_after_s: float | None = None
        code: Code
        try:
            async with asyncio.timeout(self._timeout_s):
                status, retry_after = await self._post(text, headers, body)
            retry_after_s = asked_for_s(status, retry_after, self._clock.now())
            code = _judge(status)
        except (TimeoutError, httpx.TimeoutException):
            code = "timeout"
        except (AddressRefused, InvalidRequest):
            code = "address_refused"
        except NameUnresolvable:
            code = "name_unresolvable"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            code = "tls_failed" if _is_tls(error) else "connection_failed"
        duration_ms = int(self._clock.monotonic_ms() - began_ms)
        return Outcome(code, status, duration_ms, retry_after_s)

    async def _post(
        self, text: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, str | None]:
        """The status and `Retry-After`."""
        url = parse_url(text, allow_http=self._allow_loopback)
        address = await self._address(url)
        host = url.raw_host.decode()
        own = {
            "host": url.netloc.decode(),
            "content-type": "application/json",
            "user-agent": "loramux-webhooks",
        }
        client = httpx.AsyncClient(
            verify=self._verify,
            timeout=self._timeout_s,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=0),
        )
        async with client:
            request = client.build_request(
                "POST",
                url.copy_with(host=address),
                content=body,
                headers={**headers, **own},
                extensions={} if _is_address(host) else {"sni_hostname": host},
            )
            response = await client.send(request, stream=True)
            await response.aclose()
            return response.status_code, response.headers.get("retry-after")

    async def _address(self, url: httpx.URL) -> str:
        port = url.port or (443 if url.scheme == "https" else 80)
        return await reachable_address(
            url.raw_host.decode(),
            port,
            scheme=url.scheme,
            allow_loopback=self._allow_loopback,
            resolver=self._resolver,
        )


def parse_url(text: str, *, allow_http: bool) -> httpx.URL:
    """Read once, by the library that connects. Raises InvalidRequest."""
    problem = None
    try:
        url = httpx.URL(text)
        port = url.port
    except (httpx.InvalidURL, ValueError, UnicodeError):
        raise _invalid("is no URL; write https://host/path") from None
    if len(text) > MAX_URL_CHARACTERS:
        problem = f"has more than {MAX_URL_CHARACTERS} characters"
    elif not text.isascii() or any(character <= " " for character in text):
        problem = "has characters that belong percent-encoded"
    elif url.scheme != "https" and not (allow_http and url.scheme == "http"):
        problem = "must begin with https://"
    elif not url.raw_host:
        problem = "names no host"
    elif url.userinfo:
        problem = "must not hold a user name or password; receivers check the signature instead"
    elif "#" in text:
        problem = "must not have a fragment (#…)"
    elif port is not None and not 1 <= port <= 65535:
        problem = f"has port {port}, and ports are 1 to 65535"
    if problem is not None:
        raise _invalid(problem)
    return url


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"the webhook's URL {problem}", code="invalid_webhook_url", param="url")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _judge(status: int) -> Code:
    if 200 <= status < 300:
        return "delivered"
    if status == 410:
        return "gone"
    return "redirect" if 300 <= status < 400 else "http_error"


def _is_tls(error: BaseException) -> bool:
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, ssl.SSLError):
            return True
        current = current.__cause__ or current.__context__
    return False
