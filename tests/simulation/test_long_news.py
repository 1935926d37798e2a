"""Frames with thousands of announcements, or of peers, are read in small parts: other tasks run between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgpack
import pytest
import trio

from llmnode.core.announcement import Announcement, SignedAnnouncement
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import RemoteProtocolError
from llmnode.swarm.view_exchange import READ_AT_ONCE
from llmnode.testing import open_world, simulated, simulated_ms
from llmnode.testing.network import _signature, peer_named
from llmnode.wire import announcement
from llmnode.wire.announcement import pack_news, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, pack
from llmnode.wire.packed_entries import ENTRIES_AT_ONCE, PackedEntries

if TYPE_CHECKING:
    from llmnode.wire.frame import Buffer

PEERS = 1000


class Steps(trio.abc.Instrument):
    """The most announcements that one step of a task reads, and all of them."""

    def __init__(self) -> None:
        self.now = self.most = self.all = 0

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.now = 0

    def note(self) -> None:
        self.now += 1
        self.all += 1
        self.most = max(self.most, self.now)


@simulated
async def test_other_tasks_run_between_some_announcements_whether_they_are_new_known_or_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, read = Steps(), announcement.unpack_announcement

    def noted(body: Buffer, signature: Buffer) -> SignedAnnouncement | RemoteProtocolError:
        steps.note()
        return read(body, signature)

    async with open_world() as world:
        server, other = await world.start("server", Span(0, 3)), await world.start("other", Span(3, 6))
        with trio.fail_after(60):
            while len(server.knows) < 2:
                await server.swarm.wait_changed()
        offer = other.role.offer()
        signed = []
        for number in range(PEERS):
            peer, now_ms = peer_named(f"told {number}"), simulated_ms()
            told = Announcement(peer, (f"/memory/p2p/{peer}",), now_ms, now_ms + 40_000, "llmnode/0", offer)
            signed.append(sign_announcement(told, partial(_signature, peer)).signed)
        unreadable = [replace(each, body=b"\x80") for each in signed]
        link = next(iter(server.network.links))
        monkeypatch.setattr(announcement, "unpack_announcement", noted)
        trio.lowlevel.add_instrument(steps)
        for forms in (signed, signed, unreadable):
            payload = pack_news(forms, [], SwarmPolicy())
            await server.swarm.take_news(Frame(FrameType.NEWS, meta=pack(Clock(simulated_ms())), payload=payload), link)
        trio.lowlevel.remove_instrument(steps)
        assert len(server.knows) == PEERS + 2
        assert server.swarm.unread == PEERS
        assert steps.all == 3 * PEERS
        assert steps.most <= READ_AT_ONCE


PAIRS = 2 * SwarmPolicy().view_peers
"""The most that a frame may have."""
FULL = {
    "announcements": Frame(FrameType.NEWS, payload=msgpack.packb(([(b"x", bytes(64))] * PAIRS, []))),
    "peers that are wanted": Frame(FrameType.NEWS, payload=msgpack.packb(([], [f"{each}" for each in range(PAIRS)]))),
    "a view": Frame(FrameType.VIEW, payload=msgpack.packb({f"{each}": each for each in range(PAIRS)})),
}


@pytest.mark.parametrize("kind", FULL)
@simulated
async def test_other_tasks_run_between_some_entries_of_the_fullest_frame(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, read = Steps(), PackedEntries.next

    def noted(entries: PackedEntries, most_bytes: int) -> object:
        steps.note()
        return read(entries, most_bytes)

    async with open_world() as world:
        server = await world.start("server", Span(0, 6))
        link = await world.internet.network("rude", "9.9.9.9").dial(server.network.addresses[0])
        monkeypatch.setattr(PackedEntries, "next", noted)
        trio.lowlevel.add_instrument(steps)
        await link.send(replace(FULL[kind], meta=pack(Clock(simulated_ms()))))
        await trio.sleep(1)
        trio.lowlevel.remove_instrument(steps)
        entries = 2 * PAIRS if kind == "a view" else PAIRS
        assert steps.all == entries
        assert steps.most <= 2 * ENTRIES_AT_ONCE < entries / 10
