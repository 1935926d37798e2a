"""The limits of a relay: what each peer and address group may have, and when a circuit or reservation ends."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from llmnode.core.budget import Kind, Resource
from llmnode.core.policy import BudgetPolicy, CircuitPolicy, PunchPolicy, RelayPolicy
from llmnode.errors import PeerUnreachable, single_error
from llmnode.net import circuit_relay
from llmnode.net.addresses import parse_peer
from llmnode.net.admission import groups_of
from llmnode.net.circuit_splice import LEAST_PIECE_BYTES
from llmnode.net.circuit_wire import HOP, PIECE_BYTES, STOP, receive, send
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.link import Libp2pLink
from llmnode.net.punch import PUNCH
from unit.circuits import (
    IMPATIENT,
    MEGABYTE,
    POLICY,
    RESERVE,
    Intruder,
    check_echo,
    connect_to,
    dialling,
    echoing,
    listening_behind,
    noting,
    relaying,
    reserving,
    through,
    until,
)
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from libp2p.abc import IMuxedConn
    from libp2p.network.swarm import Swarm


@in_trio
async def test_a_relay_grants_no_more_than_its_policy() -> None:
    tight = RelayPolicy(reservations=2, circuits=2, circuits_per_peer=1)
    async with relaying(tight) as relay, reserving(relay) as one, reserving(relay) as other:
        with pytest.raises(PeerUnreachable, match="the relay is full"), single_error():
            async with reserving(relay):
                pass
        async with dialling() as first, dialling() as second, dialling() as third, echoing(one), echoing(other):
            link = await first.dial(one.addresses[0])
            with pytest.raises(PeerUnreachable, match="the relay is full"):  # for the dialled peer
                await second.dial(one.addresses[0])
            with pytest.raises(PeerUnreachable, match="the relay is full"):  # and for the dialling peer
                await first.dial(other.addresses[0])
            await check_echo(await second.dial(other.addresses[0]))
            await link.end("done")
            await until(lambda: relay.count_open().circuits == 1)
            await check_echo(await third.dial(one.addresses[0]))


@in_trio
async def test_the_nodes_at_one_host_get_their_share_of_a_relay() -> None:
    async with relaying(RelayPolicy(reservations_per_host=1)) as relay, reserving(relay) as server:
        with pytest.raises(PeerUnreachable, match="the relay is full"), single_error():
            async with reserving(relay):
                pass
        answer = await Intruder(server).ask(relay, RESERVE)  # its own again
        assert answer.status == pb.OK


@in_trio
async def test_a_relay_does_not_take_all_connections_of_a_peer() -> None:
    few = replace(POLICY, budget=BudgetPolicy(connections_per_host=1))
    async with (
        relaying() as relay,
        relaying(listen="/ip4/127.0.0.2/tcp/0") as other,
        reserving(relay, other, link=few) as server,
        echoing(server),
        dialling() as first,
        dialling() as second,
    ):
        link = await first.dial(through(relay, server))
        with pytest.raises(PeerUnreachable):
            await second.dial(through(relay, server))
        await check_echo(await second.dial(through(other, server)))
        await check_echo(link)


async def connect_from(source: str, network: Libp2pNetwork, relay: Libp2pNetwork) -> None:
    """Every address of 127.0.0.0/8 is an address group. Its requests to the relay go over this connection."""
    info = parse_peer(relay.addresses[0])
    network.vouch(relay.addresses)
    await cast("Swarm", network.host.get_network()).dial_addr(info.addrs[0], info.peer_id, (source, 0))


@asynccontextmanager
async def strangers(relay: Libp2pNetwork, sources: list[str]) -> AsyncIterator[list[Libp2pNetwork]]:
    """One identity for each of `sources`, connected to the relay."""
    async with AsyncExitStack() as stack:
        networks = [await stack.enter_async_context(dialling()) for _ in sources]
        for source, network in zip(sources, networks, strict=True):
            await connect_from(source, network, relay)
        yield networks


@in_trio
@pytest.mark.parametrize("limits", [{"circuits_per_peer": 4}, {"circuits": 4}], ids=["of the server", "of all"])
async def test_one_address_with_all_circuits_does_not_keep_others_out(limits: dict[str, int]) -> None:
    hostile = ["127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.2"]
    async with relaying(RelayPolicy(**limits)) as relay, reserving(relay) as server:
        others = strangers(relay, hostile), strangers(relay, ["127.0.0.1"] * 3)
        async with echoing(server), others[0] as rude, others[1] as polite:
            links = [await each.dial(through(relay, server)) for each in rude]
            mine = [await polite[0].dial(through(relay, server))]
            await until(lambda: links[3].has_ended)
            assert relay.count_open().circuits == 4 and not any(each.has_ended for each in links[:3])
            for each in (*polite[1:], rude[3]):
                with pytest.raises(PeerUnreachable, match="the relay is full"):
                    await each.dial(through(relay, server))
            for link in (*links[:3], *mine):
                await check_echo(link)
            await links[2].end("done")
            await until(lambda: relay.count_open().circuits == 3)
            await check_echo(await polite[1].dial(through(relay, server)))


@in_trio
async def test_one_address_with_all_places_for_hole_punching_does_not_keep_others_out() -> None:
    """Its identities dial through the relay, and answer no message about punching."""
    few = CircuitPolicy(punch=PunchPolicy(at_once=2, talk_s=1000.0, grace_s=0.1))
    async with relaying() as relay, listening_behind(relay, policy=few) as server, echoing(server):
        others = strangers(relay, ["127.0.0.2"] * 3), strangers(relay, ["127.0.0.1"])
        async with others[0] as rude, others[1] as polite:
            for each in rude:
                each.host.set_stream_handler(PUNCH, never)
                await each.dial(through(relay, server))
            await until(lambda: len(server._puncher._places) == 2)
            await polite[0].dial(through(relay, server))
            await polite[0]._puncher.wait_direct(parse_peer(server.addresses[0]).peer_id)
            await until(lambda: len(server._puncher._places) == 1)


@in_trio
async def test_a_circuit_that_makes_way_leaves_nothing() -> None:
    """Not even one that does not stand yet."""
    async with relaying(RelayPolicy(circuits_per_peer=2, handshake_s=4.0)) as relay, dialling() as target:
        assert (await Intruder(target).ask(relay, RESERVE)).status == pb.OK
        target.host.set_stream_handler(STOP, never)
        request = connect_to(parse_peer(through(relay, target)).peer_id.to_bytes())
        async with strangers(relay, ["127.0.0.2", "127.0.0.2", "127.0.0.3"]) as (first, second, other):
            streams = [await Intruder(each).open(relay, HOP) for each in (first, second, other)]
            for most, stream in zip((1, 2, 2), streams, strict=True):
                await send(stream.muxed_stream, request)
                await until(lambda most=most: relay.count_open().circuits == most)  # type: ignore[misc]
            with pytest.raises(PeerUnreachable):
                await receive(streams[1].muxed_stream, pb.HopMessage())
            for stream in (streams[0], streams[2]):
                assert (await receive(stream.muxed_stream, pb.HopMessage())).status == pb.CONNECTION_FAILED
        await until(lambda: not relay.count_open().circuits)
        assert not relay._relay._circuits_to and not relay._relay._circuits_of
        assert not list(relay.budget.process.within(Kind.SESSION))


async def never(_stream: Any) -> None:
    await trio.sleep_forever()


@in_trio
async def test_two_addresses_with_all_reservations_do_not_keep_a_newcomer_out() -> None:
    sources = ["127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.3", "127.0.0.2"]
    async with relaying(RelayPolicy(reservations=5)) as relay:
        hostile = strangers(relay, sources)
        async with hostile as rude:
            for each in rude:
                assert (await Intruder(each).ask(relay, RESERVE)).status == pb.OK
            async with reserving(relay) as server, echoing(server):
                assert relay.count_open().reservations == 5
                await until(lambda: not rude[4].count_open().connections)
                assert [each.count_open().connections for each in rude] == [1, 1, 1, 1, 0], "the newest has made way"
                for each in rude[:4]:
                    assert (await Intruder(each).ask(relay, RESERVE)).status == pb.OK, "its own again"
                await connect_from("127.0.0.2", rude[4], relay)
                assert (await Intruder(rude[4]).ask(relay, RESERVE)).status == pb.RESERVATION_REFUSED
                await check_echo(await rude[0].dial(through(relay, server)))
                assert relay.count_open().reservations == 5


@in_trio
async def test_a_reservation_that_makes_way_leaves_the_circuits_to_its_peer() -> None:
    async with relaying(RelayPolicy(reservations=2)) as relay, reserving(relay) as first, reserving(relay) as second:
        other = strangers(relay, ["127.0.0.2"])
        async with dialling() as client, echoing(second), other as (newcomer,):
            link = await client.dial(through(relay, second))
            assert (await Intruder(newcomer).ask(relay, RESERVE)).status == pb.OK
            await check_echo(link)
            assert relay.count_open().reservations == 2
            async with dialling() as late:
                with pytest.raises(PeerUnreachable, match="no reservation at the relay"):
                    await late.dial(through(relay, second))
            assert first.addresses == [through(relay, first)]


@in_trio
async def test_a_peer_whose_reservation_makes_way_hears_of_it_whatever_links_it_has() -> None:
    """A node has a link to its relay. Circuits over the same connection, from the peer or to it, end first."""
    async with relaying(RelayPolicy(reservations=2)) as relay, echoing(relay), AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(reserving(relay)) for _ in range(2)]
        await stack.enter_async_context(echoing(first))
        await stack.enter_async_context(echoing(second))
        links = [await each.dial(relay.addresses[0]) for each in (first, second)]
        for link in links:
            await check_echo(link)
        client = await stack.enter_async_context(dialling())
        circuits = [await client.dial(through(relay, second)), await second.dial(through(relay, first))]
        (newcomer,) = await stack.enter_async_context(strangers(relay, ["127.0.0.2"]))
        assert (await Intruder(newcomer).ask(relay, RESERVE)).status == pb.OK
        for circuit in circuits:
            assert not links[1].has_ended
            await check_echo(circuit)
            await check_echo(links[1])
            await circuit.end("done")
        await until(lambda: links[1].has_ended)
        await check_echo(links[0])


@in_trio
async def test_the_addresses_of_one_group_have_a_share_of_the_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback each address is a group. So these are named one here."""
    monkeypatch.setattr("llmnode.net.circuit_relay.groups_of", lambda connection: ("one", groups_of(connection)[1]))
    sources = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    async with relaying(RelayPolicy(reservations_per_group=2)) as relay, strangers(relay, sources) as networks:
        answers = [(await Intruder(each).ask(relay, RESERVE)).status for each in networks]
        assert answers == [pb.OK, pb.OK, pb.RESERVATION_REFUSED]


async def keep_talking(link: Libp2pLink, size: int) -> None:
    while True:
        await check_echo(link, size)


@in_trio
async def test_a_request_for_a_reservation_looks_at_no_address_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def count(connection: IMuxedConn) -> tuple[str, str]:
        looked_at.append(connection)
        return groups_of(connection)

    monkeypatch.setattr(circuit_relay, "groups_of", count)
    async with relaying() as relay, AsyncExitStack() as stack:
        for number in range(1, 5):
            await stack.enter_async_context(reserving(relay))
            assert len(looked_at) == number


@in_trio
async def test_a_circuit_that_carries_too_much_or_lives_too_long_is_cut() -> None:
    for policy, cut_by in ((RelayPolicy(circuit_bytes=50_000), 40_000), (RelayPolicy(circuit_s=1.0), 1)):
        async with relaying(policy) as relay, reserving(relay) as server, echoing(server), dialling() as client:
            link = await client.dial(server.addresses[0])
            await check_echo(link)
            with pytest.raises(PeerUnreachable):
                await keep_talking(link, cut_by)
            await until(lambda: relay.count_open().circuits == 0 and server.count_open().links == 0)


@in_trio
async def test_a_reservation_that_is_not_renewed_ends_and_one_that_is_stays() -> None:
    async with relaying(RelayPolicy(reservation_s=2.0)) as relay, dialling() as network, dialling() as client:
        assert (await Intruder(network).ask(relay, RESERVE)).status == pb.OK
        assert relay.count_open().reservations == 1
        await until(lambda: relay.count_open().reservations == 0)
        with pytest.raises(PeerUnreachable, match="no reservation at the relay"):
            await client.dial(through(relay, network))
        async with reserving(relay) as server, echoing(server):
            lived = trio.current_time()
            await until(lambda: trio.current_time() > lived + 5.0)  # two lives and a half
            assert relay.count_open().reservations == 1
            await check_echo(await client.dial(server.addresses[0]))


@in_trio
async def test_links_end_when_a_relay_falls_silent() -> None:
    async with (
        relaying() as relay,
        reserving(relay, link=IMPATIENT) as server,
        echoing(server),
        dialling(IMPATIENT) as client,
    ):
        link = await client.dial(server.addresses[0])
        await check_echo(link)
        async with noting(server) as told:
            freeze(relay)
            with pytest.raises(PeerUnreachable):
                await link.receive()
            await until(lambda: client.count_open().connections == 0)
            await until(lambda: len(told) == 2)
            assert told == [[], [through(relay, server)]], "over another connection, which is not frozen"


def freeze(network: Libp2pNetwork) -> None:
    """Have its connections neither send nor say that they do not, as if it were cut off."""
    for connection in cast(Any, network.host.get_network()).get_connections():
        muxed = connection.muxed_conn
        muxed.machine = muxed.sender.machine = Mute(muxed.machine)
        for stream in muxed._streams.values():
            stream._machine = muxed.machine


class Mute:
    """A protocol machine that lets nothing out and nothing in."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def receive(self, data: Any) -> Any:
        return ([], [], [], [])

    def seal_output(self) -> bytes:
        return b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


@in_trio
async def test_a_circuit_that_carries_nothing_is_closed() -> None:
    """One that carries heartbeats alone is not."""
    impatient = RelayPolicy(circuit_idle_s=0.3)
    async with relaying(impatient) as relay, reserving(relay, link=IMPATIENT) as server, echoing(server):
        async with open_network([], IMPATIENT) as client:
            link = await client.dial(through(relay, server))
            await trio.sleep(0.8)
            assert not link.has_ended and relay.count_open().circuits == 1
        async with dialling() as silent:
            request = connect_to(parse_peer(through(relay, server)).peer_id.to_bytes())
            assert (await Intruder(silent).ask(relay, request)).status == pb.OK
            await until(lambda: relay.count_open().circuits == 0)


@in_trio
async def test_an_address_group_has_a_share_of_the_circuits_whatever_its_identities() -> None:
    few = RelayPolicy(circuits_per_group=2)
    async with relaying(few) as relay, reserving(relay) as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(dialling()) for _ in range(3)]
        for client in clients[:2]:
            await client.dial(through(relay, server))
        with pytest.raises(PeerUnreachable, match="the relay is full"):
            await clients[2].dial(through(relay, server))


@in_trio
async def test_circuits_are_in_the_budget_of_their_relay_and_leave_nothing() -> None:
    async with relaying() as relay, reserving(relay) as server:
        held, before = relay.budget.process.held, relay.budget.process.held[Resource.MEMORY]
        async with dialling() as client:
            await client.dial(through(relay, server))
            circuits = list(relay.budget.process.within(Kind.SESSION))
            assert [each.held[Resource.MEMORY] for each in circuits] == [2 * PIECE_BYTES]
        await until(lambda: relay.count_open().circuits == 0)
        assert not list(relay.budget.process.within(Kind.SESSION))
        assert held[Resource.MEMORY] < before + MEGABYTE


@in_trio
async def test_a_relay_without_memory_refuses_circuits() -> None:
    async with relaying() as relay, reserving(relay) as server, dialling() as client:
        process = relay.budget.process
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY] + LEAST_PIECE_BYTES)
        with pytest.raises(PeerUnreachable):
            await client.dial(through(relay, server))
        assert not relay.count_open().circuits


@in_trio
async def test_many_relays_of_one_machine_are_one_address_group() -> None:
    async with relaying() as one, relaying() as another, reserving(one, another) as server, dialling() as client:
        for relay in (one, another):
            await client.dial(through(relay, server))
        for network in (client, server):
            assert {each.name for each in network.budget.process.within(Kind.GROUP)} == {"127.0.0.1"}
