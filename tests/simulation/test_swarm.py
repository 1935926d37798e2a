"""Whole nodes on an internet in memory, on a mock clock: which nodes hear of each other, and how soon."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import Announcement, SignedAnnouncement, SignedBody
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import Source
from llmnode.errors import PeerError, RemoteProtocolError
from llmnode.swarm import membership
from llmnode.testing import Conditions, Dialogue, check_coverage, open_world, seeds, simulated, simulated_ms
from llmnode.testing.hostile.clients import read_all
from llmnode.testing.network import MemoryNetwork, peer_named
from llmnode.testing.world import SimulatedNode
from llmnode.wire.announcement import sign_announcement
from unit.grown import sign_grown

if TYPE_CHECKING:
    from llmnode.wire.receipt import Sign

FAR = Conditions(delay_s=0.05)
SPAN = Span(0, 2)
SPANS = [Span(0, 2), Span(2, 4), Span(4, 6)]
DIGESTS_ALWAYS = SwarmPolicy(digest_peers=1)
"""However few peers a node knows."""
STRANGE = peer_named("strange")
NEW_WITHIN_S = 10.0
DEAD_WITHIN_S = 60.0


async def until(condition: Callable[[], bool], within_s: float) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - simulated time costs nothing, and views change by expiry too
            await trio.sleep(0.1)


@pytest.mark.parametrize("seed", seeds(1, long_run=2))  # the second takes one more branch, of a link that ends
@simulated
async def test_a_hundred_nodes_hear_of_a_new_one_in_ten_seconds_and_of_a_death_in_sixty(seed: int) -> None:
    async with open_world(seed, conditions=FAR) as swarm:
        relay = await swarm.start_relay("relay")
        for number in range(100):
            await swarm.start(f"server{number}", SPAN, contacts=relay.network.addresses)
        await until(lambda: all(len(node.knows) == 100 for node in swarm.nodes.values()), 30)

        newcomer = await swarm.start("newcomer", SPAN, contacts=relay.network.addresses)
        await until(lambda: all(newcomer.peer in node.knows for node in swarm.nodes.values()), NEW_WITHIN_S)

        swarm.kill("newcomer")
        await until(lambda: not any(newcomer.peer in node.knows for node in swarm.nodes.values()), DEAD_WITHIN_S)
        await check_coverage(swarm)  # no living node was forgotten


@simulated
async def test_who_stops_on_purpose_is_out_of_views_at_once() -> None:
    async with open_world(conditions=FAR) as swarm:
        first = await swarm.start("first", SPAN)
        second = await swarm.start("second", SPAN)
        await until(lambda: second.peer in first.knows, NEW_WITHIN_S)
        await swarm.stop("second")
        await until(lambda: second.peer not in first.knows, 1)


@simulated
async def test_the_swarm_outlives_the_relay_that_introduced_it() -> None:
    async with open_world(conditions=FAR) as swarm:
        relay = await swarm.start_relay("relay")
        nodes = [await swarm.start(f"server{n}", SPAN, contacts=relay.network.addresses) for n in range(10)]
        await until(lambda: all(len(node.knows) == 10 for node in nodes), NEW_WITHIN_S)
        swarm.kill("relay")
        newcomer = await swarm.start("newcomer", SPAN, contacts=nodes[0].network.addresses)
        await until(lambda: all(newcomer.peer in node.knows for node in nodes), NEW_WITHIN_S)
        await trio.sleep(DEAD_WITHIN_S)
        assert all(len(node.knows) == 11 for node in [*nodes, newcomer])


@simulated
async def test_halves_that_could_not_hear_each_other_become_one_again() -> None:
    async with open_world(conditions=FAR) as swarm:
        first = ["/memory/p2p/peer-server0"]
        nodes = [await swarm.start(f"server{number}", SPAN, contacts=first) for number in range(8)]
        await until(lambda: all(len(node.knows) == 8 for node in nodes), NEW_WITHIN_S)
        swarm.internet.partition([node.peer for node in nodes[:4]], [node.peer for node in nodes[4:]])
        await until(lambda: all(len(node.knows) == 4 for node in nodes), DEAD_WITHIN_S)
        swarm.mend_all()
        await until(lambda: all(len(node.knows) == 8 for node in nodes), DEAD_WITHIN_S)


@simulated
async def test_a_model_is_found_in_the_directory_without_a_contact() -> None:
    async with open_world(conditions=FAR) as swarm:
        first = await swarm.start("first", SPAN)
        second = await swarm.start("second", SPAN)
        await until(lambda: second.peer in first.knows, NEW_WITHIN_S)
        stranger = await swarm.start_relay("stranger", contacts=[])
        await stranger.swarm.look_up(swarm.model.digest)
        assert stranger.knows == {first.peer, second.peer}


@simulated
async def test_a_clock_that_is_wrong_is_noticed_and_its_announcements_are_not_believed() -> None:
    async with open_world(conditions=FAR) as swarm:
        right = await swarm.start("right", SPAN)
        ahead = await swarm.start("ahead", SPAN, now_ms=lambda: simulated_ms() + 3_600_000)
        await until(lambda: right.peer in ahead.swarm.clock_offsets_ms, NEW_WITHIN_S)
        assert ahead.swarm.clock_offsets_ms[right.peer] == pytest.approx(-3_600_000, abs=1000)
        assert ahead.peer not in right.knows


@simulated
async def test_an_announcement_that_its_peer_did_not_sign_is_blamed_on_who_passes_it_on() -> None:
    async with open_world(conditions=FAR) as swarm:
        liar = await swarm.start("liar", SPAN)
        victim = await swarm.start("victim", SPAN, contacts=[])
        await until(lambda: liar.peer in liar.knows and victim.peer in victim.knows, 1)
        (signed,) = victim.swarm.view.newer_than({})
        changed = replace(signed.signed, body=signed.signed.body.replace(b"float32", b"float16"))
        lie = replace(signed, signed=changed)
        liar.swarm.view.accept(lie, simulated_ms(), Source(liar.peer, "of the liar"))
        reader = await swarm.start_relay("reader", contacts=[])
        with pytest.raises(RemoteProtocolError, match="did not sign") as raised:
            await reader.swarm.meet(liar.network.addresses[0])
        assert raised.value.peer == liar.peer
        assert victim.peer not in reader.knows


@simulated
async def test_an_old_announcement_replayed_does_not_bring_back_the_dead() -> None:
    async with open_world(conditions=FAR) as swarm:
        hoarder = await swarm.start("hoarder", SPAN)
        mortal = await swarm.start("mortal", SPAN)
        await until(lambda: mortal.peer in hoarder.knows, NEW_WITHIN_S)
        old = hoarder.swarm.view._newest[mortal.peer]
        swarm.kill("mortal")
        await until(lambda: mortal.peer not in hoarder.knows, DEAD_WITHIN_S)
        hoarder.swarm.view._newest[mortal.peer] = old
        hoarder.swarm.view.drop_expired = lambda _now_ms: []  # type: ignore[method-assign]  # it hoards
        reader = await swarm.start_relay("reader", contacts=[])
        await reader.swarm.meet(hoarder.network.addresses[0])
        assert reader.knows == {hoarder.peer}


def grow(monkeypatch: pytest.MonkeyPatch, names: Collection[str]) -> None:
    """The peers of these names are newer nodes, whose announcements have a field more."""

    def sign(announcement: Announcement, key: Sign) -> SignedAnnouncement:
        return (sign_grown if announcement.peer in names else sign_announcement)(announcement, key)

    monkeypatch.setattr(membership, "sign_announcement", sign)


def with_altitude(node: SimulatedNode) -> set[str]:
    """The peers whose new field this node passes on."""
    held = node.swarm.view.newer_than({})
    return {each.announcement.peer for each in held if b"altitude" in each.signed.body}


@pytest.mark.parametrize("policy", [SwarmPolicy(), DIGESTS_ALWAYS], ids=["sequences", "digests"])
@pytest.mark.parametrize("newer", [{0}, {1}, {0, 1}], ids=str)
@simulated
async def test_nodes_that_announce_a_field_more_and_nodes_without_it_are_one_swarm(
    newer: set[int], policy: SwarmPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The views are whole after a minute, and sessions run over servers of both kinds."""
    names = {peer_named(f"server{number}") for number in range(len(SPANS)) if number % 2 in newer}
    grow(monkeypatch, names)
    async with open_world(conditions=FAR, swarm_policy=policy) as swarm:
        relay = await swarm.start_relay("relay")
        nodes = [
            await swarm.start(f"server{number}", span, contacts=relay.network.addresses)
            for number, span in enumerate(SPANS)
        ]
        await trio.sleep(60)
        assert names <= {node.peer for node in nodes}
        for node in [relay, *nodes]:
            assert len(node.knows) == len(nodes)
            assert node.swarm.unread == 0
            assert with_altitude(node) == names, "fields are passed on"
        async with swarm.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(3)


@pytest.mark.parametrize("policy", [SwarmPolicy(), DIGESTS_ALWAYS], ids=["sequences", "digests"])
@pytest.mark.parametrize("old", ["relay", "server0", "server1 server2", "relay server0 server2"])
@simulated
async def test_nodes_of_protocol_1_are_told_only_what_they_can_read_and_keep_no_field_from_the_others(
    old: str, policy: SwarmPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_peers = {peer_named(name) for name in old.split()}
    names = {peer_named(f"server{number}") for number in range(len(SPANS))} - old_peers
    grow(monkeypatch, names)
    async with open_world(conditions=FAR, swarm_policy=policy) as swarm:
        swarm.internet.old |= old_peers
        relay = await swarm.start_relay("relay")
        nodes = [
            await swarm.start(f"server{number}", span, contacts=relay.network.addresses)
            for number, span in enumerate(SPANS)
        ]
        await trio.sleep(60)
        for node in [relay, *nodes]:
            assert len(node.knows) == len(nodes)
            assert with_altitude(node) == (set() if node.peer in old_peers else names)
            assert node.swarm.double is None, "the older form of its own announcement is no other node's"
        async with swarm.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(3)


@simulated
async def test_an_announcement_that_one_node_cannot_read_keeps_no_other_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sign(announcement: Announcement, key: Sign) -> SignedAnnouncement:
        signed = sign_announcement(announcement, key)
        return replace(signed, signed=SignedBody(b"\x91\x07", b"s" * 64)) if announcement.peer == STRANGE else signed

    monkeypatch.setattr(membership, "sign_announcement", sign)
    async with open_world(conditions=FAR) as swarm:
        first = await swarm.start("first", SPAN)
        strange = await swarm.start("strange", SPAN)
        second = await swarm.start("second", SPAN, contacts=strange.network.addresses)
        await trio.sleep(60)
        assert first.knows == {first.peer, second.peer}
        assert first.swarm.unread > 1
    said = [each.getMessage() for each in caplog.records if "cannot read" in each.getMessage()]
    assert len(said) == 2, "each of the two others says it once"


@simulated
async def test_a_server_that_strangers_have_connect_to_them_keeps_few_of_these_connections() -> None:
    """A server measures those that may be the next hop, and a connection that it has opened keeps its place."""
    async with open_world(conditions=FAR) as swarm, trio.open_nursery() as nursery:
        relay = await swarm.start_relay("relay")
        node = await swarm.start("server", SPAN, contacts=relay.network.addresses)
        await node.swarm.meet(*relay.network.addresses)

        async def live(stranger: MemoryNetwork) -> None:
            async with stranger.accept() as link:
                with suppress(PeerError):
                    await read_all(link)

        for number in range(200):
            stranger = swarm.internet.network(f"stranger {number}", "9.9.9.9")
            nursery.start_soon(live, stranger)
            await node.swarm.connect(stranger.addresses)
            await trio.sleep(0.5)
        await trio.sleep(10)
        assert len(node.pool.living()) <= SwarmPolicy().connections
        nursery.cancel_scope.cancel()
