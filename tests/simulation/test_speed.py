"""Nodes measure their network against each other: what they announce, and what hostile peers can do about it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.ids import PeerId
from llmnode.core.policy import ProbePolicy, ServePolicy
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, PeerTimeout
from llmnode.node.serve import links, network_speed
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.network_speed import keep_measuring, measure_network, next_hops, relays_of
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.swarm.probing import measure_round_trip, measure_upload
from llmnode.testing import Conditions, open_world, simulated
from llmnode.wire.frame import Frame, FrameType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.speed import NetworkSpeed
    from llmnode.ports import Link
    from llmnode.testing import World
    from llmnode.testing.world import ServingNode
    from llmnode.wire.messages import Description

SPANS = [Span(0, 2), Span(2, 4), Span(4, 6)]
DELAY_S, BYTES_PER_S = 0.02, 1e6
NARROW = Conditions(delay_s=DELAY_S, bytes_per_s=BYTES_PER_S)


async def started(world: World) -> list[ServingNode]:
    nodes = [await world.start(f"s{number}", span) for number, span in enumerate(SPANS)]
    await trio.sleep(5)
    return nodes


@simulated
async def test_a_server_announces_its_round_trips_to_next_hops_and_its_upload() -> None:
    async with open_world(conditions=NARROW) as world, trio.open_nursery() as nursery:
        nodes = await started(world)
        for node in nodes:
            nursery.start_soon(keep_measuring, node.role, node.swarm, node.network)
        await trio.sleep(15)
        announced = {each.peer: each.offer.speed for each in nodes[0].swarm.view.announcements()}
        for node, following in zip(nodes, [[nodes[1]], [nodes[2]], []], strict=True):
            speed = announced[node.peer]
            assert [peer for peer, _ in speed.round_trips_us] == [each.peer for each in following]
            assert all(2e6 * DELAY_S <= us < 2.2e6 * DELAY_S for _, us in speed.round_trips_us)
            assert speed.upload_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.1)
            assert speed.tokens_per_s > 0
        nursery.cancel_scope.cancel()


@simulated
async def test_a_server_announces_the_upload_that_sessions_see_before_it_probes_again() -> None:
    policy = ProbePolicy()
    async with open_world(conditions=NARROW) as world, trio.open_nursery() as nursery:
        first, *_ = await started(world)
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network)
        await trio.sleep(15)
        assert first.role.network.upload_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.1)
        began_s, round_trips_s = trio.current_time(), first.role.network.round_trips_s
        for share in (0.6, 1.5):
            for name in ("a", "b"):
                first.network.send_rates.note(name, name, share * BYTES_PER_S, trio.current_time())
            first.swarm.say(replace(first.role.offer(), moves_to=SPANS[1]))  # the view changes, as it does all the time
            await trio.sleep(2 * policy.soon_s)
            assert first.role.offer().speed.upload_bytes_per_s == pytest.approx(share * BYTES_PER_S, rel=0.01)
        assert first.role.network.round_trips_s == round_trips_s
        assert trio.current_time() < began_s + policy.again_s / 2, "no probe was due"
        nursery.cancel_scope.cancel()


@simulated
async def test_a_server_that_comes_later_is_measured_soon() -> None:
    async with open_world(conditions=NARROW) as world, trio.open_nursery() as nursery:
        first = await world.start("s0", SPANS[0])
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network)
        await trio.sleep(60)
        assert first.role.offer().speed.tokens_per_1000_s == 0, "it is alone, and says that it knows nothing"
        later = await world.start("s1", SPANS[1])
        with trio.fail_after(20):
            while later.peer not in dict(first.role.offer().speed.round_trips_us):  # noqa: ASYNC110
                await trio.sleep(0.5)
        nursery.cancel_scope.cancel()


@simulated
async def test_a_next_hop_that_did_not_answer_is_measured_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may just have started, and be busy. Clients do not know the way to it until then."""
    asked: list[float] = []

    async def measure_later(connection: PeerConnection, policy: ProbePolicy) -> float:
        asked.append(trio.current_time())
        if len(asked) < 3:
            raise PeerTimeout("as told")
        return await measure_round_trip(connection, policy)

    monkeypatch.setattr(network_speed, "measure_round_trip", measure_later)
    async with open_world(conditions=NARROW) as world, trio.open_nursery() as nursery:
        first, second, _ = await started(world)
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network)
        soon_s = ProbePolicy().soon_s
        with trio.fail_after(10 * soon_s):
            while second.peer not in dict(first.role.offer().speed.round_trips_us):  # noqa: ASYNC110
                await trio.sleep(0.5)
        assert [round((late - early) / soon_s) for early, late in pairwise(asked)] == [2, 4], "ever later"
        nursery.cancel_scope.cancel()


@simulated
async def test_peers_that_are_announced_all_the_time_cause_no_more_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[int] = []
    answer = links._answer_probe

    def counted(conduct: Conduct, link: Link, frame: Frame) -> Frame:
        probes.append(len(frame.payload))
        return answer(conduct, link, frame)

    monkeypatch.setattr(links, "_answer_probe", counted)
    async with open_world(conditions=NARROW) as world, trio.open_nursery() as nursery:
        first = await world.start("s0", SPANS[0])
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network)
        policy, most = ProbePolicy(), 12
        for number in range(most):
            await world.start(f"t{number}", SPANS[1])
            await trio.sleep(2 * policy.soon_s)
        assert len(first.role.offer().speed.round_trips_us) == policy.next_peers
        assert most * 2 * policy.soon_s < policy.again_s
        assert 1 <= len(probes) <= policy.upload_peers * len(policy.sizes_bytes)
        nursery.cancel_scope.cancel()


@simulated
async def test_a_round_trip_is_kept_while_others_are_measured() -> None:
    policy = ProbePolicy(next_peers=1, again_s=20.0)
    async with open_world(conditions=NARROW) as world, trio.open_nursery() as nursery:
        first = await world.start("s0", SPANS[0])
        later = [await world.start(f"t{number}", SPANS[1]) for number in range(3)]
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network, policy, random.Random(1))
        with trio.fail_after(20 * policy.again_s):
            while (first.role.network.round_trips_s or {}).keys() != {each.peer for each in later}:  # noqa: ASYNC110
                await trio.sleep(1)
        world.kill("t0")
        with trio.fail_after(60 + policy.again_s):
            while later[0].peer in (first.role.network.round_trips_s or {}):  # noqa: ASYNC110
                await trio.sleep(1)
        nursery.cancel_scope.cancel()


async def change_the_view(node: ServingNode, times: int, every_s: float) -> None:
    """Its own announcement is another one each time."""
    for number in range(times):
        node.swarm.say(replace(node.role.offer(), moves_to=SPANS[number % 2]))
        await trio.sleep(every_s)


@simulated
async def test_peers_that_announce_themselves_and_cannot_be_reached_are_measured_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured_s: list[float] = []

    def next_hops_of_strangers(*_arguments: object) -> dict[PeerId, Sequence[str]]:
        name = f"peer-t{int(trio.current_time())}"
        return {PeerId(name): (f"/memory/nowhere/p2p/{name}",)}

    async def measured(*arguments: Any, **named: Any) -> NetworkSpeed:
        measured_s.append(trio.current_time())
        return await measure_network(*arguments, **named)

    async with open_world() as world, trio.open_nursery() as nursery:
        first = await world.start("s0", SPANS[0])
        monkeypatch.setattr(network_speed, "next_hops", next_hops_of_strangers)
        monkeypatch.setattr(network_speed, "measure_network", measured)
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network)
        await change_the_view(first, 600, 1.0)
        pauses_s = [round(late - early) for early, late in pairwise(measured_s)]
        assert len(measured_s) < 10
        assert pauses_s[-1] > 10 * pauses_s[0]
        nursery.cancel_scope.cancel()


@simulated
async def test_however_often_the_view_changes_it_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def counted(*arguments: Any) -> dict[PeerId, Sequence[str]]:
        looks.append(trio.current_time())
        return next_hops(*arguments)

    async with open_world() as world, trio.open_nursery() as nursery:
        first, *_ = await started(world)
        monkeypatch.setattr(network_speed, "next_hops", counted)
        seconds, policy = 100, ProbePolicy(soon_s=20.0)
        nursery.start_soon(keep_measuring, first.role, first.swarm, first.network, policy)
        await change_the_view(first, 10 * seconds, 0.1)
        assert 3 <= len(looks) <= 3 + seconds / policy.soon_s
        nursery.cancel_scope.cancel()


@simulated
async def test_a_server_measures_no_network_to_itself_and_does_not_ask_itself_how_it_is_reached() -> None:
    """All nodes of a swarm may be given one list of addresses."""
    async with open_world(conditions=NARROW) as world:
        node = await world.start("first", SPANS[0], contacts=["/memory/p2p/peer-first"])
        assert list(node.network.addresses) == ["/memory/p2p/peer-first"]
        await trio.sleep(5)
        assert (await measure_network(node.swarm, {})).upload_bytes_per_s == 0.0
        assert not node.swarm.contacts, "nor is it among those that say how others reach this node"


@simulated
async def test_contacts_are_probed_where_announced_peers_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that are announced, and refuse, would keep a server from ever announcing a throughput."""
    answer = links._answer_probe

    def refuse(conduct: Conduct, link: Link, frame: Frame) -> Frame:
        if conduct is relay_conduct:
            return answer(conduct, link, frame)
        raise PeerRefused("busy", "as told")

    async with open_world(conditions=NARROW) as world:
        conducts: list[Conduct] = []
        make = Conduct.__init__

        def note(conduct: Conduct, *given: Any) -> None:  # Any: it passes them on
            conducts.append(conduct)
            make(conduct, *given)

        monkeypatch.setattr(Conduct, "__init__", note)
        await world.start_relay("relay")
        (relay_conduct,) = conducts
        nodes = await started(world)
        monkeypatch.setattr(links, "_answer_probe", refuse)
        for node in nodes:
            nexts = next_hops(node.role.model, node.role.span, node.swarm)
            found = await measure_network(node.swarm, nexts)
            assert found.upload_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.1)


@simulated
async def test_a_peer_that_never_answers_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_world(conditions=NARROW) as world:
        nodes = await started(world)
        monkeypatch.setattr(links, "_answer_probe", lambda *_arguments: Frame(FrameType.HEARTBEAT))
        policy, began_s = ProbePolicy(), trio.current_time()
        found = await measure_network(nodes[0].swarm, next_hops(nodes[0].role.model, SPANS[0], nodes[0].swarm))
        assert found.upload_bytes_per_s == 0.0
        assert found.round_trips_s is not None and len(found.round_trips_s) == 1
        assert trio.current_time() - began_s < policy.connect_s + 2 * policy.answer_s


@simulated
async def test_an_answer_without_all_bytes_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that answers at once would make the sender seem fast, and draw sessions to it."""

    def answer_early(conduct: object, link: object, frame: Frame) -> Frame:
        return whole(conduct, link, Frame(frame.type, step=frame.step, payload=bytes(8)))  # type: ignore[arg-type]

    whole = links._answer_probe
    async with open_world(conditions=NARROW) as world:
        nodes = await started(world)
        monkeypatch.setattr(links, "_answer_probe", answer_early)
        found = await measure_network(nodes[0].swarm, next_hops(nodes[0].role.model, SPANS[0], nodes[0].swarm))
        assert found.upload_bytes_per_s == 0.0


@simulated
async def test_a_peer_that_is_late_with_its_description_makes_nobody_seem_more_than_twice_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The round trip is subtracted from the time of a probe."""
    describe = PeerConnection.describe

    async def describe_late(connection: PeerConnection, timeout_s: float) -> Description:
        await trio.sleep(1.0)
        return await describe(connection, timeout_s)

    async with open_world(conditions=NARROW) as world:
        node, other, _ = await started(world)
        monkeypatch.setattr(PeerConnection, "describe", describe_late)
        rate = await measure_upload(await node.pool.connect(other.network.addresses), ProbePolicy())
        assert BYTES_PER_S / 2 < rate <= 2 * BYTES_PER_S


@simulated
async def test_a_refused_probe_leaves_what_the_ones_before_have_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    answer = links._answer_probe

    def answer_once(conduct: Conduct, link: Link, frame: Frame) -> Frame:
        if taken:
            raise PeerRefused("busy", "your address sends many probes")
        taken.append(len(frame.payload))
        return answer(conduct, link, frame)

    async with open_world(conditions=NARROW) as world:
        node, other, _ = await started(world)
        monkeypatch.setattr(links, "_answer_probe", answer_once)
        policy, connection = ProbePolicy(long_s=10.0), await node.pool.connect(other.network.addresses)
        assert await measure_upload(connection, policy) == pytest.approx(BYTES_PER_S, rel=0.1)
        with pytest.raises(PeerRefused):
            await measure_upload(connection, policy)


@simulated
async def test_a_peer_answers_so_many_probes_of_an_address_and_no_larger_ones() -> None:
    policy = ServePolicy()
    async with open_world() as world:
        (node, *_) = await started(world)
        relay = await world.start_relay("relay")
        for target in (world.nodes["s1"].network, relay.network):
            connection = await node.pool.connect(target.addresses)
            for _ in range(policy.probes_burst):
                await connection.ask_peer(FrameType.PROBE, FrameType.PROBED, 5, payload=random.randbytes(100))
            with pytest.raises(PeerRefused, match="many probes") as refused:
                await connection.ask_peer(FrameType.PROBE, FrameType.PROBED, 5, payload=b"again")
            assert refused.value.retry_after_s is not None
            assert 0 < refused.value.retry_after_s <= 1 / policy.probes_per_s
            await trio.sleep(1.5 / policy.probes_per_s)
            await connection.ask_peer(FrameType.PROBE, FrameType.PROBED, 5, payload=b"later")
            with pytest.raises(PeerRefused, match="at most"):
                await connection.ask_peer(FrameType.PROBE, FrameType.PROBED, 5, payload=bytes(policy.probe_bytes + 1))


@simulated
async def test_a_frozen_peer_costs_one_deadline() -> None:
    async with open_world() as world:
        node, other, _ = await started(world)
        connection = await node.pool.connect(other.network.addresses)
        world.freeze("s1")
        began_s, policy = trio.current_time(), ProbePolicy()
        with pytest.raises(PeerTimeout):
            await measure_round_trip(connection, policy)
        with pytest.raises(PeerError):  # the link has noticed the silence by then
            await measure_upload(connection, policy)
        assert trio.current_time() - began_s <= 2 * policy.answer_s


@simulated
async def test_a_node_behind_a_relay_measures_what_it_sends_to_the_relay() -> None:
    async with open_world(conditions=NARROW) as world:
        relay = await world.start_relay("relay")
        node = await world.start("s0", SPANS[0])
        (address,) = relay.network.addresses
        circuit = f"{address}/p2p-circuit/p2p/{node.peer}"
        assert relays_of([circuit, circuit]) == [address]
        assert relays_of([circuit, *node.network.addresses]) == [] == relays_of([])
        found = await measure_network(node.swarm, {}, [address])
        assert found.upload_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.1)
