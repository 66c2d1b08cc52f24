"""Which addresses a webhook may be sent to: global unicast ones, and loopback where it is allowed.

A name is resolved once, all its addresses are judged, and the connection goes to one of them, so a
name that changes its mind afterwards (DNS rebinding) changes nothing.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> the texts of its addresses. Raises OSError."""

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_EMBED_IPV4 = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))
"""6to4 and Teredo, which carry an IPv4 address that a relay would connect to."""
_NOT_FOR_WEBHOOKS = (
    ipaddress.ip_network("192.0.0.0/24"),  # protocol assignments: some clouds' metadata
    ipaddress.ip_network("192.88.99.0/24"),  # relays of 6to4
    ipaddress.ip_network("168.63.129.16/32"),  # a cloud's metadata, public by its number
)
"""What `is_global` lets through, in some version of Python or in all."""
_RESOLVER = ThreadPoolExecutor(max_workers=16, thread_name_prefix="resolve")
"""Of its own: a slow name server must not hold up the process's other threads."""


class AddressRefused(Exception):
    """The name or address leads where no webhook may go."""


class NameUnresolvable(Exception):
    """The name has no address now."""


async def resolve(host: str, port: int) -> list[str]:
    """The system's resolver, off the event loop."""
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
        _RESOLVER, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(entry[4][0]) for entry in found]


async def reachable_address(
    host: str, port: int, *, scheme: str, allow_loopback: bool, resolver: Resolve = resolve
) -> str:
    """The address to connect to. Raises AddressRefused if any address of the name is refused.

    Plain http goes to loopback alone.
    """
    try:
        texts = await resolver(host, port)
    except (OSError, UnicodeError) as error:
        raise NameUnresolvable from error
    if not texts:
        raise NameUnresolvable
    addresses = [_parse(text) for text in texts]
    for address in addresses:
        loopback = allow_loopback and address.is_loopback
        if not loopback and (scheme != "https" or not is_public(address)):
            raise AddressRefused
    return str(addresses[0])


def _parse(text: str) -> Address:
    """IPv4 inside IPv6 is judged as what it is; a scoped address is never public."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise AddressRefused from error
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_public(address: Address) -> bool:
    """Whether it is an address of the open internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address not in _GLOBAL_UNICAST or any(address in net for net in _EMBED_IPV4):
            return False
    elif any(address in net for net in _NOT_FOR_WEBHOOKS):
        return False
    return address.is_global and not address.is_multicast
