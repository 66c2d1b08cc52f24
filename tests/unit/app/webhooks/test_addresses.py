"""Which addresses webhooks may be sent to."""

import socket
from collections.abc import Sequence

import pytest

from app.webhooks.addresses import (
    AddressRefused,
    NameUnresolvable,
    reachable_address,
    resolve,
)

INSIDE = [
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "168.63.129.16"),
    *("192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
    "255.255.255.255",
    *("::1", "::", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1"),
    *("::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:1:2::3"),
    *("fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
    *("2001:db8::1", "100::1", "no address"),
]
OUTSIDE = ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"]


def answering(*addresses: str):
    async def answer(_host: str, _port: int) -> Sequence[str]:
        return addresses

    return answer


async def ask(*addresses: str, scheme: str = "https", allow_loopback: bool = False) -> str:
    return await reachable_address(
        "hooks.example.com",
        443,
        scheme=scheme,
        allow_loopback=allow_loopback,
        resolver=answering(*addresses),
    )


@pytest.mark.parametrize("address", INSIDE)
async def test_nothing_inside_is_reached(address: str) -> None:
    with pytest.raises(AddressRefused):
        await ask(address)


@pytest.mark.parametrize("address", OUTSIDE)
async def test_the_open_internet_is(address: str) -> None:
    assert await ask(address) == address.removeprefix("::ffff:")


@pytest.mark.parametrize("address", INSIDE)
async def test_one_bad_address_among_good_ones_spoils_the_name(address: str) -> None:
    with pytest.raises(AddressRefused):
        await ask("8.8.8.8", address)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_loopback_alone_opens_for_development(address: str) -> None:
    for scheme in ("http", "https"):
        assert await ask(address, scheme=scheme, allow_loopback=True)


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "0.0.0.0", "fe80::1"])
async def test_development_opens_nothing_else(address: str) -> None:
    with pytest.raises(AddressRefused):
        await ask(address, allow_loopback=True)


async def test_plain_http_never_leaves_the_machine() -> None:
    for allow in (False, True):
        with pytest.raises(AddressRefused):
            await ask("8.8.8.8", scheme="http", allow_loopback=allow)


@pytest.mark.parametrize("failure", [socket.gaierror(), UnicodeError(), OSError()])
async def test_a_name_without_an_address_says_so(failure: Exception) -> None:
    async def fail(_host: str, _port: int) -> Sequence[str]:
        raise failure

    for resolver in (fail, answering()):
        with pytest.raises(NameUnresolvable):
            await reachable_address("x", 1, scheme="https", allow_loopback=False, resolver=resolver)


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "017700000001", "localhost"])
async def test_every_way_to_write_loopback_is_loopback(host: str) -> None:
    """By the system's own resolver, which reads what browsers and curl read."""
    with pytest.raises(AddressRefused):
        await reachable_address(host, 443, scheme="https", allow_loopback=False, resolver=resolve)
