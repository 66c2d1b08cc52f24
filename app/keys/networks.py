"""Source networks of a key: which addresses may use it.

The address is the connection's own; `X-Forwarded-For` counts only from LORAMUX_TRUSTED_PROXIES,
which the outermost middleware has seen to before anything here runs.
"""

import ipaddress
from collections.abc import Sequence

from app.errors import InvalidRequest

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAX_NETWORKS = 32
_SHOWN_CHARACTERS = 50


def parse_networks(entries: Sequence[str]) -> tuple[Network, ...]:
    """CIDR networks or single addresses, in order and without repetition.

    Raises InvalidRequest (`networks`) for what is no network, has bits beyond its prefix, or
    names every address, which would be no restriction.
    """
    if not entries:
        raise _refused("is empty, so the key would work from nowhere; leave it out for everywhere")
    if len(entries) > MAX_NETWORKS:
        raise _refused(f"has {len(entries)} entries; at most {MAX_NETWORKS} are taken")
    return tuple(dict.fromkeys(_parse(entry) for entry in entries))


def _parse(entry: str) -> Network:
    shown = repr(entry[:_SHOWN_CHARACTERS])
    try:
        network = ipaddress.ip_network(entry, strict=False)
        address = ipaddress.ip_interface(entry).ip
    except ValueError:
        raise _refused(f"has {shown}, which is no network; write it like 203.0.113.0/24") from None
    if network.prefixlen == 0:
        raise _refused(f"has {shown}, which is every address; leave networks out instead")
    if address != network.network_address:
        raise _refused(f"has {shown}, with bits beyond its prefix; did you mean {network}?")
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is not None:
        raise _refused(f"has {shown}; write the IPv4 network itself")
    return network


def allows(networks: Sequence[Network] | None, address: str | None) -> bool:
    """Whether a key of these networks may be used from the address; None allows all.

    An address that is unknown (a Unix socket, say) is in no network. IPv4 inside IPv6, which
    dual-stack sockets report, is taken as IPv4.
    """
    if networks is None:
        return True
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)


def covers(outer: Network, inner: Network) -> bool:
    """Whether every address of `inner` is in `outer`."""
    if isinstance(outer, ipaddress.IPv4Network):
        return isinstance(inner, ipaddress.IPv4Network) and inner.subnet_of(outer)
    return isinstance(inner, ipaddress.IPv6Network) and inner.subnet_of(outer)


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"networks {problem}.", param="networks")
