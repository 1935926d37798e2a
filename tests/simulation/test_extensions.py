"""Nodes whose messages have an extension, beside nodes that do not know it and nodes of protocol 1."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from llmnode.core.span import Span
from llmnode.node.serve.server import Server
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.testing import Dialogue, open_world, simulated
from llmnode.testing.link import MemoryLink
from llmnode.testing.network import peer_named
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import EXTENSIONS
from unit.grown import ALTITUDE, EXTENDED, extended

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.wire.frame import Frame
    from llmnode.wire.messages import Description

SPANS = [Span(0, 2), Span(2, 4), Span(4, 6)]
SERVERS = {f"server{number}": span for number, span in enumerate(SPANS)}
EVERYBODY = {"client", *SERVERS}


def extend(monkeypatch: pytest.MonkeyPatch, names: Collection[str], required: FrameType = FrameType.HEARTBEAT) -> None:
    """All messages of these peers that may have an extension have one. The frames of one type require it."""
    peers = {peer_named(name) for name in names}
    tell, describe = PeerConnection.tell, Server.describe

    async def tell_more(self: PeerConnection, frame: Frame) -> None:
        link: Any = self._link
        if frame.type in EXTENDED and link.own.peer in peers:
            frame = extended(frame, required=frame.type is required)
        await tell(self, frame)

    def describe_more(self: Server, *, up_to_now: bool) -> Description:
        return replace(
            describe(self, up_to_now=up_to_now),
            extensions={"altitude": ALTITUDE} if self.network.peer in peers else None,
        )

    monkeypatch.setattr(PeerConnection, "tell", tell_more)
    monkeypatch.setattr(Server, "describe", describe_more)


def arrivals(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[FrameType, PeerId, PeerId, bool]]:
    """Each frame of `EXTENDED` that arrives: its type, sender, receiver, and whether it has an extension."""
    arrived: Counter[tuple[FrameType, PeerId, PeerId, bool]] = Counter()
    take = MemoryLink._take

    def count(self: MemoryLink, frame: Frame | None) -> None:
        if frame is not None and frame.type in EXTENDED:
            arrived[frame.type, self.peer, self.own.peer, "extensions" in msgpack.unpackb(frame.meta)] += 1
        take(self, frame)

    monkeypatch.setattr(MemoryLink, "_take", count)
    return arrived


@pytest.mark.parametrize("old", ["", "server1", "client", "server0 server2"])
@pytest.mark.parametrize("extending", ["client", "server0 server1 server2", "client server1", "client server0 server2"])
@simulated
async def test_an_extension_reaches_those_who_can_read_it_and_costs_nobody_a_session(
    extending: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, old_names = set(extending.split()), set(old.split())
    extend(monkeypatch, names - old_names)
    arrived = arrivals(monkeypatch)
    async with open_world() as swarm:
        swarm.internet.old |= {peer_named(name) for name in old_names}
        for name, span in SERVERS.items():
            await swarm.start(name, span)
        async with swarm.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(3)
    assert {kind for kind, *_ in arrived} == EXTENDED
    extended = {peer_named(name) for name in names - old_names}
    readers = {peer_named(name) for name in EVERYBODY - old_names}
    for kind, sender, receiver, has_extension in arrived:
        assert has_extension == (sender in extended and receiver in readers), (kind, sender, receiver)


@pytest.mark.parametrize("kind", [FrameType.OPEN, FrameType.NEIGHBOURS], ids=lambda kind: kind.name)
@simulated
async def test_a_server_of_protocol_1_is_not_asked_for_an_extension_that_a_client_requires(
    kind: FrameType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session goes to another server."""
    extend(monkeypatch, {"client"}, required=kind)
    arrived = arrivals(monkeypatch)
    for known in EXTENSIONS:
        monkeypatch.setitem(EXTENSIONS, known, {"altitude"})
    async with open_world() as swarm:
        swarm.internet.old = {peer_named("server0")}
        for name, span in SERVERS.items():
            await swarm.start(name, span)
        await swarm.start("other0", SPANS[0])
        async with swarm.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(3)
            assert session.route[0].peer == peer_named("other0")
    assert not arrived[kind, peer_named("client"), peer_named("server0"), True]
    assert not arrived[kind, peer_named("client"), peer_named("server0"), False]
