"""A `Node` within a program refuses wrong calls with a sentence, before it does anything."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmnode.errors import ConfigError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.invite import Invite, write_invite
from llmnode.node import Node, embed


@pytest.mark.parametrize(
    ("start", "end", "drain_s", "message"),
    [
        (5, 3, None, "blocks 5:3 are no range"),
        (3, 3, None, "blocks 3:3 are no range"),
        (-1, 4, None, "blocks -1:4 are no range"),
        (0, 4, -1.0, "drain_s is -1.0: give seconds"),
        (0, 4, math.nan, "drain_s is nan: give seconds"),
        (0, 4, None, "no node runs here"),
    ],
)
def test_a_span_that_cannot_be_served_is_refused(start: int, end: int, drain_s: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Node().change_span(start, end, drain_s)


OWN_IPS = ["203.0.113.7", "10.1.2.3", "127.0.0.1"]
IN_LAN, EVERYWHERE = ["/ip4/10.1.2.3/tcp/0"], ["/ip4/0.0.0.0/tcp/0"]
HERE = [LISTEN_ANY_LOOPBACK]
ID = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OF_US, OF_LAN, FAR = (f"/ip4/{host}/tcp/4001/p2p/{ID}" for host in ("127.0.0.1", "10.1.2.9", "198.51.100.7"))
CHOICE = ["/ip4/0.0.0.0/tcp/4001"]


@pytest.mark.parametrize(
    ("config", "listen", "tells"),
    [
        ({}, HERE, False),
        ({"peers": [OF_US]}, HERE, False),
        ({"peers": [OF_LAN]}, IN_LAN, False),
        ({"peers": [FAR]}, EVERYWHERE, False),
        ({"model": write_invite(Invite((FAR,)))}, EVERYWHERE, False),
        ({"relays": [FAR]}, EVERYWHERE, False),
        ({"peers": [FAR], "swarm_key": Invite((), bytes(32)), "mdns": True}, EVERYWHERE, False),
        ({"mdns": True}, IN_LAN, True),
        ({"mdns": True, "peers": [OF_US]}, IN_LAN, True),
        ({"mdns": True, "peers": [FAR]}, EVERYWHERE, True),
        ({"peers": [FAR], "listen": HERE}, HERE, False),
        ({"mdns": True, "listen": CHOICE}, CHOICE, True),
    ],
    ids=str,
)
def test_a_node_listens_where_its_swarm_reaches_it_and_says_so(
    config: dict[str, Any], listen: list[str], tells: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """It does as `llmnode serve`: a server that others in its swarm cannot dial is of no use to them."""
    monkeypatch.setattr(embed, "listenable_ips", lambda: OWN_IPS)
    placed = Node(**config)._placed()
    assert (list(placed.listen), placed.mdns) == (listen, tells)
    said = " ".join(caplog.messages)
    assert ("use it" in said) == (listen != HERE and "listen" not in config), said
    assert ("found there by mDNS" in said) == (tells and "listen" not in config), said


def test_a_node_with_a_wrong_address_says_nothing_of_where_it_listens(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError):
        Node(peers=["/ip4/198.51.100.7/tcp/x"])._placed()
    assert not caplog.messages
