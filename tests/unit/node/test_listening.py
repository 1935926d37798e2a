"""Where a server listens if its user does not say so, and whether mDNS tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from llmnode.errors import ConfigError
from llmnode.node.listening import EVERYWHERE_4, EVERYWHERE_6, HERE, Listening, choose_listening, everywhere

OWN = ["127.0.0.1", "192.168.1.7", "203.0.113.9", "11.22.0.1", "169.254.1.1", "fd00::1", "10.0.0.3"]
PUBLIC_ONLY = ["127.0.0.1", "11.22.0.1"]
EVERYWHERE = [EVERYWHERE_4, EVERYWHERE_6]
FAR, NEAR = "/ip4/203.0.113.7/tcp/4001/p2p/x", "/ip4/127.0.0.1/tcp/4001/p2p/x"
IN_LAN, AT_OURS = "/ip4/192.168.1.8/tcp/4001/p2p/x", "/ip4/10.0.0.3/tcp/4001/p2p/x"
NAMED_HERE = "/dns4/localhost/tcp/4001/p2p/x"
LOCAL = ["/ip4/10.0.0.3/tcp/0", "/ip4/192.168.1.7/tcp/0"]
OWN_CHOICE = "/ip4/192.168.1.7/tcp/4001"


def choice(**told: Any) -> Listening:
    given = {"listen": [], "contacts": [], "own_ips": OWN, "is_private": False, "mdns": None} | told
    return choose_listening(given.pop("listen"), given.pop("contacts"), given.pop("own_ips"), **given)


def chosen(**told: Any) -> tuple[list[str], bool, bool]:
    """Where it listens, whether mDNS tells of it, and whether there is a warning."""
    found = choice(**told)
    return list(found.listen), found.mdns, bool(found.warning)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (LOCAL, True, True)),
        ({"mdns": True}, (EVERYWHERE, True, True)),
        ({"mdns": False}, ([HERE], False, False)),
        ({"own_ips": PUBLIC_ONLY}, ([HERE], False, True)),
        ({"own_ips": PUBLIC_ONLY, "mdns": False}, ([HERE], False, False)),
        ({"contacts": [FAR]}, (EVERYWHERE, True, True)),
        ({"contacts": [FAR], "mdns": False}, (EVERYWHERE, False, True)),
        ({"contacts": ["/dns/example.org/tcp/1/p2p/x", NEAR]}, (EVERYWHERE, True, True)),
        ({"contacts": [NEAR]}, ([HERE], False, False)),
        ({"contacts": [NEAR], "mdns": True}, (EVERYWHERE, True, True)),
        ({"is_private": True}, ([HERE], False, False)),
        ({"is_private": True, "contacts": [FAR]}, (EVERYWHERE, False, True)),
        ({"contacts": [IN_LAN]}, (LOCAL, True, True)),
        ({"contacts": [IN_LAN, NEAR], "mdns": False}, (LOCAL, False, True)),
        ({"contacts": [IN_LAN], "is_private": True}, (LOCAL, False, True)),
        ({"contacts": [AT_OURS]}, (LOCAL, True, True)),
        ({"contacts": [IN_LAN, FAR]}, (EVERYWHERE, True, True)),
        ({"contacts": [IN_LAN], "own_ips": PUBLIC_ONLY}, ([EVERYWHERE_4], True, True)),
        ({"contacts": [NAMED_HERE]}, ([HERE], False, False)),
        ({"contacts": ["/ip6/fd00::9/tcp/4001/p2p/x"]}, ([*LOCAL, "/ip6/fd00::1/tcp/0"], True, True)),
        ({"own_ips": ["127.0.0.1", "fd00::1", "2001:db8::1", "fe80::1"]}, (["/ip6/fd00::1/tcp/0"], True, True)),
        ({"own_ips": ["127.0.0.1", "203.0.113.9", "fd00::1"]}, (["/ip4/127.0.0.1/tcp/0"], False, True)),
        ({"listen": [OWN_CHOICE]}, ([OWN_CHOICE], True, True)),
        ({"listen": [OWN_CHOICE], "mdns": False}, ([OWN_CHOICE], False, True)),
        ({"listen": [OWN_CHOICE], "is_private": True}, ([OWN_CHOICE], False, True)),
        ({"listen": [HERE]}, ([HERE], False, False)),
        ({"listen": [HERE], "contacts": [FAR]}, ([HERE], False, False)),
        ({"listen": ["nonsense"]}, (["nonsense"], True, True)),
    ],
    ids=str,
)
def test_where_a_server_listens(told: dict[str, Any], expected: tuple[list[str], bool, bool]) -> None:
    assert chosen(**told) == expected


@pytest.mark.parametrize(
    ("own_ip", "is_reached"),
    [
        ("2a00:1450:4001:8aa::1", True),
        ("fd00::1", True),
        ("::1", False),
        ("fe80::1", False),
        ("2001:db8::1", False),
        ("2002:c0a8:101::1", False),
        ("192.168.1.7", False),
    ],
)
def test_every_interface_is_of_ipv6_too_where_others_reach_the_machine_over_it(own_ip: str, is_reached: bool) -> None:
    own_ips = ["127.0.0.1", "11.22.0.1", own_ip]
    assert everywhere(own_ips) == (EVERYWHERE if is_reached else [EVERYWHERE_4])
    found = choice(own_ips=own_ips, contacts=[FAR])
    assert list(found.listen) == everywhere(own_ips)
    interfaces = "every interface of IPv4 and IPv6," if is_reached else "every IPv4 interface,"
    assert found.warning.startswith(f"listening at {interfaces} since a peer or relay beyond")


def test_a_machine_without_private_networks_is_told_how_others_reach_it() -> None:
    found = choice(own_ips=["11.22.0.1", "2a00:1450:4001:8aa::1"])
    assert found.listen == [HERE]
    assert found.warning.endswith("for others: --listen /ip4/0.0.0.0/tcp/0 --listen /ip6/::/tcp/0")


@pytest.mark.parametrize("told", [{"listen": [HERE]}, {"is_private": True}, {"is_private": True, "contacts": [FAR]}])
def test_mdns_that_could_tell_nothing_is_an_error(told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--mdns"):
        chosen(mdns=True, **told)


@pytest.mark.parametrize("mdns", [None, True, False])
@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("contacts", [[], [NEAR], [IN_LAN], [FAR]])
@pytest.mark.parametrize("listen", [[], [HERE], ["/ip4/0.0.0.0/tcp/4001"]])
def test_the_warning_says_where_others_reach_it_and_find_it_and_who_may_use_it(
    listen: list[str], contacts: list[str], is_private: bool, mdns: bool | None
) -> None:
    try:
        found = choice(listen=listen, contacts=contacts, is_private=is_private, mdns=mdns)
    except ConfigError:
        return
    said = found.warning
    assert bool(said) == (list(found.listen) != [HERE])
    assert ("found there by mDNS" in said) == found.mdns
    assert ("anybody who reaches it there may use it" in said) == (bool(said) and not is_private)
    is_everywhere = "every interface of IPv4 and IPv6" in said
    assert all(is_everywhere or each in said or each.split("/")[2] in said for each in found.listen if said)
    assert ("--mdns is given" in said) == (bool(mdns) and not listen)
