"""A session leaves a hop that is much slower than it says, for another one that can take it."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llmnode.core.peers.peer_speed import Word
from llmnode.core.span import Span
from llmnode.session.failures import Outdone
from llmnode.testing import Dialogue, open_world, simulated
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.session.hop import SessionHop
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder

ALL_BLOCKS = Span(0, 6)


@asynccontextmanager
async def slow_hop() -> AsyncIterator[tuple[SessionHops, SessionHop, PeerFinder]]:
    """A session over one of two servers, which took ten seconds a position lately."""
    async with open_world(0) as world:
        for name in ("0a", "0b"):
            await world.start(name, ALL_BLOCKS)
        async with world.client() as client, client.router.open_session(64, Codec.RAW) as session:
            await Dialogue(session, random.Random(0)).step(4)
            (hop,) = session._hops.hops
            hop.word = Word(position_s=0.001, patience_s=8.0)
            hop.overtime.total_s, hop.overtime.position_s = 20.0, 10.0
            yield session._hops, hop, client.router.finder


@simulated
async def test_it_is_left_for_another_that_has_computed_a_position() -> None:
    async with slow_hop() as (hops, _hop, _finder):
        with pytest.raises(Outdone, match=r"10\.0 s for a position"):
            await hops.leave_slow()


@simulated
async def test_it_stays_while_the_session_is_leased() -> None:
    async with slow_hop() as (hops, hop, _finder):
        hop.is_leased = True
        await hops.leave_slow()
        assert hop.failure is None


@simulated
async def test_it_stays_if_the_other_has_no_free_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_hop() as (hops, hop, finder):
        usable = [replace(each, offer=replace(each.offer, kv_tokens_free=0)) for each in finder._usable()]
        await finder.note_slow(ALL_BLOCKS, [hop.hop.peer])
        monkeypatch.setattr(finder, "_usable", lambda _length=0: list(usable))
        await hops.leave_slow()
        assert hop.failure is None


@simulated
async def test_it_stays_if_the_other_can_never_hold_the_session() -> None:
    async with slow_hop() as (_hops, hop, finder):
        await finder.note_slow(ALL_BLOCKS, [hop.hop.peer])
        held = max(each.offer.kv_tokens for each in finder._usable())
        found = [finder.is_outdone(hop.hop, 10.0, length, beside=(), at_once=4) for length in (64, held + 1)]
        assert found == [True, False]
