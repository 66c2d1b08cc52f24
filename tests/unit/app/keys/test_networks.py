"""Source networks: what is a network, and who is in one."""

import pytest

from app.errors import InvalidRequest
from app.keys.networks import MAX_NETWORKS, allows, parse_networks


@pytest.mark.parametrize(
    ("entries", "address", "expected"),
    [
        (["203.0.113.0/24"], "203.0.113.255", True),
        (["203.0.113.0/24"], "203.0.114.0", False),
        (["203.0.113.7"], "203.0.113.7", True),
        (["203.0.113.7"], "203.0.113.8", False),
        (["2001:db8::/32"], "2001:db8:1::5", True),
        (["2001:db8::/32"], "2001:db9::1", False),
        (["198.51.100.0/24", "2001:db8::/32"], "2001:db8::1", True),
        (["203.0.113.0/24"], "::ffff:203.0.113.9", True),
        (["203.0.113.0/24"], "::ffff:198.51.100.1", False),
        (["203.0.113.0/24"], "2001:db8::1", False),
        (["203.0.113.0/24"], "not-an-address", False),
        (["203.0.113.0/24"], "", False),
        (["203.0.113.0/24"], None, False),
    ],
)
def test_an_address_is_in_a_network_or_not(
    entries: list[str], address: str | None, expected: bool
) -> None:
    assert allows(parse_networks(entries), address) is expected


def test_without_networks_every_address_may_use_the_key() -> None:
    assert allows(None, "203.0.113.9")
    assert allows(None, None)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("", "no network"),
        ("everywhere", "no network"),
        ("203.0.113", "no network"),
        ("203.0.113.0/33", "no network"),
        ("203.0.113.0/-1", "no network"),
        ("203.0.113.0/24 ", "no network"),
        ("203.0.113.7/24", "did you mean 203.0.113.0/24?"),
        ("0.0.0.0/0", "every address"),
        ("::/0", "every address"),
        ("::ffff:203.0.113.0/120", "write the IPv4 network itself"),
    ],
)
def test_what_is_no_restriction_or_no_network_is_refused_with_the_remedy(
    entry: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_networks(["198.51.100.0/24", entry])
    assert says in caught.value.message
    assert caught.value.param == "networks"


@pytest.mark.parametrize("entries", [[], [f"10.0.{n}.0/24" for n in range(MAX_NETWORKS + 1)]])
def test_none_and_too_many_are_refused(entries: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        parse_networks(entries)


def test_a_network_given_twice_is_kept_once() -> None:
    assert len(parse_networks(["10.0.0.0/8", "10.0.0.0/8", "203.0.113.7", "203.0.113.7/32"])) == 2
