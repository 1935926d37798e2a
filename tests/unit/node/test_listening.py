"""Where a server listens if its user does not say so, and whether mDNS tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from llmnode.errors import ConfigError
from llmnode.node.listening import EVERYWHERE, HERE, choose_listening

OWN = ["127.0.0.1", "192.168.1.7", "203.0.113.9", "11.22.0.1", "169.254.1.1", "fd00::1", "10.0.0.3"]
PUBLIC_ONLY = ["127.0.0.1", "11.22.0.1"]
FAR, NEAR = "/ip4/203.0.113.7/tcp/4001/p2p/x", "/ip4/127.0.0.1/tcp/4001/p2p/x"
LOCAL = ["/ip4/10.0.0.3/tcp/0", "/ip4/192.168.1.7/tcp/0"]
OWN_CHOICE = "/ip4/192.168.1.7/tcp/4001"


def chosen(**told: Any) -> tuple[list[str], bool, bool]:
    """Where it listens, whether mDNS tells of it, and whether there is a warning."""
    given = {"listen": [], "contacts": [], "own_ips": OWN, "is_private": False, "mdns": None} | told
    found = choose_listening(given.pop("listen"), given.pop("contacts"), given.pop("own_ips"), **given)
    return list(found.listen), found.mdns, bool(found.warning)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, (LOCAL, True, True)),
        ({"mdns": True}, ([EVERYWHERE], True, True)),
        ({"mdns": False}, ([HERE], False, False)),
        ({"own_ips": PUBLIC_ONLY}, ([HERE], False, True)),
        ({"own_ips": PUBLIC_ONLY, "mdns": False}, ([HERE], False, False)),
        ({"contacts": [FAR]}, ([EVERYWHERE], True, True)),
        ({"contacts": [FAR], "mdns": False}, ([EVERYWHERE], False, True)),
        ({"contacts": ["/dns/example.org/tcp/1/p2p/x", NEAR]}, ([EVERYWHERE], True, True)),
        ({"contacts": [NEAR]}, ([HERE], False, False)),
        ({"contacts": [NEAR], "mdns": True}, ([EVERYWHERE], True, True)),
        ({"is_private": True}, ([HERE], False, False)),
        ({"is_private": True, "contacts": [FAR]}, ([EVERYWHERE], False, True)),
        ({"listen": [OWN_CHOICE]}, ([OWN_CHOICE], True, False)),
        ({"listen": [OWN_CHOICE], "mdns": False}, ([OWN_CHOICE], False, False)),
        ({"listen": [OWN_CHOICE], "is_private": True}, ([OWN_CHOICE], False, False)),
        ({"listen": [HERE]}, ([HERE], False, False)),
        ({"listen": [HERE], "contacts": [FAR]}, ([HERE], False, False)),
        ({"listen": ["nonsense"]}, (["nonsense"], True, False)),
    ],
    ids=str,
)
def test_where_a_server_listens(told: dict[str, Any], expected: tuple[list[str], bool, bool]) -> None:
    assert chosen(**told) == expected


@pytest.mark.parametrize("told", [{"listen": [HERE]}, {"is_private": True}, {"is_private": True, "contacts": [FAR]}])
def test_mdns_that_could_tell_nothing_is_an_error(told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--mdns"):
        chosen(mdns=True, **told)
