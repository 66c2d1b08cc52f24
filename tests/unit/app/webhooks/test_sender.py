"""One attempt over a real socket: where it goes, how it looks, what it does not follow."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from app.clock import SystemClock
from app.errors import InvalidRequest
from app.settings import Settings
from app.webhooks.sender import Sender
from tests.unit.app.webhooks.certificates import contexts
from tests.unit.app.webhooks.receiver import Receiver, receive, status

HOST = "hooks.example.test"
HEADERS = {"webhook-id": "evt_1"}


async def loopback(_host: str, _port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.fixture
def sender(settings: Settings) -> Sender:
    return Sender(settings, SystemClock())


async def test_a_message_arrives_as_it_was_given(sender: Sender, receiver: Receiver) -> None:
    outcome = await sender.send(receiver.url("/a/b?c=d"), HEADERS, b'{"x":1}')
    assert (outcome.code, outcome.status) == ("delivered", 204)
    [message] = receiver.received
    assert message.request_line == "POST /a/b?c=d HTTP/1.1"
    assert message.body == b'{"x":1}'
    assert message.headers["content-type"] == "application/json"
    assert message.headers["webhook-id"] == "evt_1"
    assert "cookie" not in message.headers


async def test_the_connection_goes_to_the_judged_address_under_the_names_host_and_certificate(
    settings: Settings, tmp_path: Path
) -> None:
    server, client = contexts(tmp_path, HOST)
    async with receive(server) as receiver:
        sender = Sender(settings, SystemClock(), resolver=loopback, verify=client)
        outcome = await sender.send(receiver.url(scheme="https", host=HOST), HEADERS, b"{}")
        assert (outcome.code, outcome.status) == ("delivered", 204)
        [message] = receiver.received
        assert message.headers["host"] == f"{HOST}:{receiver.port}"
        assert message.sni == HOST


async def test_another_hosts_certificate_is_not_taken(settings: Settings, tmp_path: Path) -> None:
    server, client = contexts(tmp_path, "somebody.example.test")
    async with receive(server) as receiver:
        sender = Sender(settings, SystemClock(), resolver=loopback, verify=client)
        outcome = await sender.send(receiver.url(scheme="https", host=HOST), HEADERS, b"{}")
        assert (outcome.code, outcome.status) == ("tls_failed", None)
        assert receiver.received == []


async def test_an_unknown_authoritys_certificate_is_not_taken(
    settings: Settings, tmp_path: Path
) -> None:
    server, _ = contexts(tmp_path, HOST)
    async with receive(server) as receiver:
        sender = Sender(settings, SystemClock(), resolver=loopback)
        outcome = await sender.send(receiver.url(scheme="https", host=HOST), HEADERS, b"{}")
        assert outcome.code == "tls_failed"


async def test_a_name_that_moved_inside_after_registration_is_not_connected_to(
    settings: Settings, receiver: Receiver
) -> None:
    """DNS rebinding: public when it was registered, loopback when it is sent to."""
    addresses = iter([["8.8.8.8"], ["127.0.0.1"], ["8.8.8.8", "127.0.0.1"]])

    async def rebinding(_host: str, _port: int) -> Sequence[str]:
        return next(addresses)

    closed = settings.model_copy(update={"webhook_allow_loopback": False})
    sender = Sender(closed, SystemClock(), resolver=rebinding)
    url = await sender.check(receiver.url(scheme="https", host=HOST))
    for _ in range(2):
        assert (await sender.send(url, HEADERS, b"{}")).code == "address_refused"
    assert receiver.connections == 0


async def test_a_name_is_resolved_once_for_an_attempt(
    settings: Settings, receiver: Receiver
) -> None:
    asked: list[str] = []

    async def count(host: str, _port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"]

    sender = Sender(settings, SystemClock(), resolver=count)
    await sender.send(receiver.url(host=HOST), HEADERS, b"{}")
    assert asked == [HOST]
    assert len(receiver.received) == 1


async def test_a_redirect_is_a_failure_and_is_not_followed(
    sender: Sender, receiver: Receiver
) -> None:
    receiver.answers = [status(302, f"location: {receiver.url('/inside')}")]
    outcome = await sender.send(receiver.url(), HEADERS, b"{}")
    assert (outcome.code, outcome.status) == ("redirect", 302)
    assert receiver.connections == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *((200, "delivered"), (299, "delivered"), (400, "http_error"), (500, "http_error")),
        *((304, "redirect"), (410, "gone")),
    ],
)
async def test_the_status_decides(
    code: int, expected: str, sender: Sender, receiver: Receiver
) -> None:
    receiver.answers = [status(code)]
    outcome = await sender.send(receiver.url(), HEADERS, b"{}")
    assert (outcome.code, outcome.status) == (expected, code)


async def test_a_receiver_that_says_nothing_costs_the_time_out(
    settings: Settings, receiver: Receiver
) -> None:
    receiver.hang = True
    hurried = settings.model_copy(update={"webhook_timeout_s": 0.5})
    outcome = await Sender(hurried, SystemClock()).send(receiver.url(), HEADERS, b"{}")
    assert (outcome.code, outcome.status) == ("timeout", None)
    assert outcome.duration_ms >= 400


async def test_a_large_answer_is_not_read(sender: Sender, receiver: Receiver) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 100000000000\r\n\r\n"
    receiver.answers = [head + b"x" * 100_000]
    outcome = await sender.send(receiver.url(), HEADERS, b"{}")
    assert outcome.code == "delivered"


@pytest.mark.parametrize("answer", [b"no http at all\r\n\r\n", b"", b"HTTP/1.1 999999 x\r\n\r\n"])
async def test_what_is_no_http_is_a_failed_connection(
    answer: bytes, sender: Sender, receiver: Receiver
) -> None:
    receiver.answers = [answer]
    outcome = await sender.send(receiver.url(), HEADERS, b"{}")
    assert (outcome.code, outcome.status) == ("connection_failed", None)


async def test_the_environments_proxy_is_not_used(
    sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await sender.send(receiver.url(), HEADERS, b"{}")).code == "delivered"


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            *("", "x", "/hook", "//host/x", "ftp://example.com/", "file:///etc/passwd"),
            *("http://example.com/", "https://", "https:///x", "https://user:pw@example.com/"),
            *("https://example.com/#x", "https://example.com:0/", "https://example.com:99999/"),
            *("https://exa mple.com/", "https://example.com/\n", "https://exämple.com/\x00"),
            *("https://example.com/ü", "https://[::1", "https://example.com/" + "x" * 500),
        ],
    )
    async def test_what_is_no_https_url_names_the_field(self, url: str, settings: Settings) -> None:
        closed = settings.model_copy(update={"webhook_allow_loopback": False})
        sender = Sender(closed, SystemClock(), resolver=loopback)
        with pytest.raises(InvalidRequest) as refused:
            await sender.check(url)
        assert (refused.value.code, refused.value.param) == ("invalid_webhook_url", "url")

    @pytest.mark.parametrize(
        "url",
        [
            *("https://127.0.0.1/", "https://localhost/", "https://[::1]/", "https://0x7f.1/"),
            *("https://169.254.169.254/", "https://[::ffff:10.0.0.1]/", "https://2130706433/"),
        ],
    )
    async def test_an_address_inside_is_refused_by_the_systems_resolver_too(
        self, url: str, settings: Settings
    ) -> None:
        closed = settings.model_copy(update={"webhook_allow_loopback": False})
        with pytest.raises(InvalidRequest) as refused:
            await Sender(closed, SystemClock()).check(url)
        assert refused.value.code == "webhook_address_refused"
        assert (await Sender(closed, SystemClock()).send(url, {}, b"")).code == "address_refused"

    async def test_a_name_without_an_address_says_so(self, settings: Settings) -> None:
        async def unknown(_host: str, _port: int) -> Sequence[str]:
            raise OSError

        sender = Sender(settings, SystemClock(), resolver=unknown)
        with pytest.raises(InvalidRequest) as refused:
            await sender.check("https://nowhere.example.test/")
        assert refused.value.code == "webhook_host_unknown"
