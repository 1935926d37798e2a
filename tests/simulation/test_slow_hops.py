"""A session leaves a hop that is much slower than it says, for another one that can take it."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.peers.peer_speed import PromisedTime
from llmnode.core.policy import AdmissionPolicy, ClientPolicy, RecoveryPolicy, RoutePolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute
from llmnode.session.failures import Outdone
from llmnode.testing import Dialogue, exact_input, open_world, simulated
from llmnode.testing.world import GENEROUS, KV_TOKENS
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.ids import PeerId
    from llmnode.session.hop import SessionHop
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.session import InferenceSession
    from llmnode.testing.world import SimulatedClient

ALL_BLOCKS = Span(0, 6)
LENGTH = 64
KEPT = replace(GENEROUS, admission=AdmissionPolicy(idle_s=inf, unused_s=inf, keeps_s=inf))
"""Nobody has to go for others."""


@asynccontextmanager
async def slow_hop() -> AsyncIterator[tuple[SessionHops, SessionHop, PeerFinder]]:
    """A session over one of two servers, which took ten seconds a position lately."""
    async with open_world(0) as world:
        for name in ("0a", "0b"):
            await world.start(name, ALL_BLOCKS)
        async with world.client() as client, client.router.open_session(64, Codec.RAW) as session:
            await Dialogue(session, random.Random(0)).step(4)
            (hop,) = session._hops.hops
            hop.promised = PromisedTime(position_s=0.001, patience_s=8.0)
            hop.overtime.total_s, hop.overtime.position_s = 20.0, 10.0
            yield session._hops, hop, client.router.finder


@simulated
async def test_it_is_left_for_another_that_has_computed_a_position() -> None:
    async with slow_hop() as (hops, _hop, _finder):
        with pytest.raises(Outdone, match=r"10\.0 s for a position"):
            await hops.leave_outdone()


@simulated
async def test_it_stays_while_the_session_is_leased() -> None:
    async with slow_hop() as (hops, hop, _finder):
        hop.is_leased = True
        await hops.leave_outdone()
        assert hop.failure is None


@simulated
async def test_it_stays_if_the_other_has_no_free_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_hop() as (hops, hop, finder):
        usable = [replace(each, offer=replace(each.offer, kv_tokens_free=0)) for each in finder._usable()]
        await finder.note_slow(ALL_BLOCKS, [hop.hop.peer])
        monkeypatch.setattr(finder, "_usable", lambda _length=0: list(usable))
        await hops.leave_outdone()
        assert hop.failure is None


@simulated
async def test_it_stays_if_the_other_can_never_hold_the_session() -> None:
    async with slow_hop() as (_hops, hop, finder):
        await finder.note_slow(ALL_BLOCKS, [hop.hop.peer])
        held = max(each.offer.kv_tokens for each in finder._usable())
        found = [finder.instead_s(hop.hop, length, beside=(), at_once=4) for length in (64, held + 1)]
        assert found[0] is not None and found[0] < 1.0 and found[1] is None


@pytest.mark.parametrize("frees", [True, False])
@simulated
async def test_a_session_that_has_left_a_slow_hop_waits_for_kv_as_long_as_one_whose_kv_others_took(frees: bool) -> None:
    """The other server is full when it is asked, and what the session had at the slow one went to others at once."""
    async with open_world(0, serve_policy=KEPT) as world, AsyncExitStack() as stack:
        for name in ("slow", "fast"):
            await world.start(name, ALL_BLOCKS)
        slow, fast = (world.nodes[name].peer for name in ("slow", "fast"))

        def other(peer: PeerId, number: int) -> AbstractAsyncContextManager[SimulatedClient]:
            policy = ClientPolicy(route=RoutePolicy(allowed=frozenset({peer})))
            return world.client(policy, name=f"client {number} of {peer}")

        async def fill(peer: PeerId, *lengths: int) -> list[InferenceSession]:
            router = (await stack.enter_async_context(other(peer, 1))).router
            return [await stack.enter_async_context(router.open_session(each, Codec.RAW)) for each in lengths]

        async def take_what_is_left(peer: PeerId) -> None:
            async with other(peer, 2) as (router, _), router.open_session(LENGTH, Codec.RAW):
                await trio.sleep_forever()

        client = await stack.enter_async_context(world.client(ClientPolicy(chunk_tokens=8)))
        finder = client.router.finder
        finder.records.bans.report(fast, trio.current_time())
        session = await stack.enter_async_context(client.router.open_session(LENGTH, Codec.RAW))
        patient = ClientPolicy(recovery=RecoveryPolicy(timeout_s=RecoveryPolicy().kv_patience_s))
        dialogue = Dialogue(session, random.Random(0), policy=patient)
        await dialogue.step(4)
        (hop,) = session._hops.hops
        assert hop.hop.peer == slow
        await trio.sleep(ClientPolicy().route.ban_s)
        await finder.note_slow(ALL_BLOCKS, [slow])
        hop.promised = PromisedTime(position_s=0.001, patience_s=8.0)
        hop.overtime.total_s, hop.overtime.position_s = 20.0, 10.0
        held = await fill(fast, KV_TOKENS // 2, KV_TOKENS // 2)
        await fill(slow, KV_TOKENS // 2, KV_TOKENS // 2 - LENGTH)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_what_is_left, slow)  # it waits for what the session has
            await trio.sleep(0.1)
            began_s, recovery = trio.current_time(), RecoveryPolicy()
            if frees:

                async def free() -> None:
                    await trio.sleep(recovery.kv_patience_s - 60)
                    for each in held:
                        await each.close()

                nursery.start_soon(free)
                await dialogue.step(1)
                took_s = trio.current_time() - began_s
                assert recovery.kv_patience_s - 60 <= took_s < recovery.kv_patience_s
            else:
                with pytest.raises(NoRoute):
                    await session.step(exact_input(random.Random(1), 1, world.model))
                took_s = trio.current_time() - began_s
                assert recovery.kv_patience_s <= took_s < recovery.kv_patience_s + 60
                for each in held:
                    await each.close()
                await dialogue.step(1)
            nursery.cancel_scope.cancel()
        assert session.route[0].peer == fast
        assert "longer than it says" in session.recoveries[0].cause
        assert not client.router.finder.banned
