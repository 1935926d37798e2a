"""A `Node` within a program refuses wrong calls with a sentence, before it does anything."""

from __future__ import annotations

import math

import pytest

from llmnode.errors import ConfigError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
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


def test_a_node_that_is_told_of_listens_where_others_in_its_network_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "listenable_ips", lambda: ["203.0.113.7", "10.1.2.3", "127.0.0.1"])
    assert Node(mdns=True)._placed().listen == ["/ip4/10.1.2.3/tcp/0"]
    elsewhere = ["/ip4/0.0.0.0/tcp/4001"]
    assert Node(mdns=True, listen=elsewhere)._placed().listen == elsewhere
    assert list(Node()._placed().listen) == [LISTEN_ANY_LOOPBACK]
