"""Circuits over real libp2p hosts on loopback: a relay, a peer that reserves there, and others that dial it."""

from __future__ import annotations

import random
import secrets
from typing import Any, cast

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID

from llmnode.core.policy import RelayPolicy
from llmnode.errors import ConfigError, PeerUnreachable, single_error
from llmnode.net.addresses import parse_peer, parse_relay, relay_of
from llmnode.net.host import OpenCounts, open_network
from llmnode.net.punch import Door
from unit.circuits import (
    EAGER,
    MEGABYTE,
    OTHER,
    OTHER_ID,
    POLICY,
    check_echo,
    dialling,
    echoing,
    frame,
    mortal,
    nothing_of,
    noting,
    relaying,
    reserving,
    through,
    until,
)
from unit.in_trio import in_trio

RELAY_ID = "12D3KooWT1zLoHvuZuAgjW6GBSaHgLZvV3Xvfae9tjPBCti1c7vh"


@in_trio
async def test_who_cannot_be_dialled_is_reached_through_a_relay() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        assert server.addresses == [through(relay, server)]
        link = await client.dial(server.addresses[0])
        assert link.peer == server.peer
        assert link.relayed
        assert link.group == "127.0.0.1", "it counts as one that is at the relay"
        assert link.relay_limit_bytes == RelayPolicy().circuit_bytes
        await check_echo(link)
        await until(lambda: server.count_open().relayed == 1)
        assert relay.count_open() == OpenCounts(
            links=0, relayed=0, circuits=1, reservations=1, connections=2, streams=relay.count_open().streams
        )


@in_trio
async def test_through_a_relay_that_is_named_by_dns_it_is_reached_at_an_ip_address_too() -> None:
    """Others dial no names that they have heard from strangers."""
    async with relaying() as relay:
        named = relay.addresses[0].replace("/ip4/127.0.0.1/", "/dns4/localhost/")
        async with open_network([], POLICY, relays=[named], circuit_policy=EAGER) as server, echoing(server):
            name, ip = server.addresses
            assert (name, ip) == (f"{named}/p2p-circuit/p2p/{server.peer}", through(relay, server))
            async with dialling() as client:
                client.vouch(relay.addresses)
                with pytest.raises(PeerUnreachable, match="strangers name addresses of IP"):
                    await client.dial(name, is_heard=True)
                await check_echo(await client.dial(ip, is_heard=True))


@in_trio
async def test_megabytes_pass_both_ways_at_once() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        link = await client.dial(server.addresses[0])
        sent = [random.Random(number).randbytes(MEGABYTE) for number in range(24)]

        async def send_all() -> None:
            for number, payload in enumerate(sent):
                await link.send(frame(payload, number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            for payload in sent:
                assert bytes((await link.receive()).payload) == payload


@in_trio
async def test_several_dial_through_one_relay_and_one_dials_several() -> None:
    async with (
        relaying() as relay,
        reserving(relay) as one,
        echoing(one),
        reserving(relay) as other,
        echoing(other),
        dialling() as first,
        dialling() as second,
    ):
        links = [await client.dial(server.addresses[0]) for client in (first, second) for server in (one, other)]
        for link in links:
            await check_echo(link)
        assert relay.count_open().circuits == 4
        assert first.count_open().connections == 3, "the connection to the relay is shared"


@in_trio
async def test_those_who_reserve_at_the_same_relay_reach_each_other_and_the_relay_them() -> None:
    async with relaying() as relay, reserving(relay) as one, reserving(relay) as other, echoing(other):
        await check_echo(await one.dial(other.addresses[0]))
        link = await relay.dial(other.addresses[0])  # over the connection that the reservation is held by
        assert not link.relayed
        assert link.relay_limit_bytes is None
        await check_echo(link)
        await link.end("done")
        await link.wait_closed()
        assert relay.count_open().reservations == 2, "a link that ends does not end the reservation"


@in_trio
async def test_a_link_that_ends_leaves_nothing_anywhere() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        at_rest = server.count_open().connections
        for _ in range(3):
            link = await client.dial(server.addresses[0])
            await check_echo(link)
            await link.end("done")
            await until(lambda: client.count_open().connections == 0)  # to the relay, too
            await until(lambda: relay.count_open().circuits == 0)
            await until(lambda: server.count_open().connections == at_rest)
            await until(lambda: server.count_open().links == 0)
        assert relay.count_open().reservations == 1
        await until(lambda: relay.count_open().connections == 1)
        await until(lambda: server.count_open().streams == relay.count_open().streams == 1)  # the pings


@in_trio
async def test_the_link_to_a_relay_may_end_while_a_circuit_goes_through_it() -> None:
    async with relaying() as relay, echoing(relay), reserving(relay) as server, echoing(server), dialling() as client:
        to_relay = await client.dial(relay.addresses[0])
        link = await client.dial(server.addresses[0])
        await to_relay.end("done")
        await to_relay.wait_closed()
        await check_echo(link)
        await link.end("done")
        await until(lambda: client.count_open().connections == 0)


@in_trio
async def test_a_server_that_dies_ends_its_circuits_and_its_reservation() -> None:
    async with relaying() as relay, dialling() as client:
        async with reserving(relay) as server, echoing(server):
            address = server.addresses[0]
            link = await client.dial(address)
            await check_echo(link)
        with pytest.raises(PeerUnreachable):
            await link.receive()
        await until(lambda: nothing_of(relay))
        with pytest.raises(PeerUnreachable, match="no reservation at the relay"):
            await client.dial(address)
        await until(lambda: client.count_open().connections == 0)


@in_trio
async def test_a_relay_that_dies_ends_the_links_through_it_and_is_used_again_when_it_is_back() -> None:
    key = secrets.token_bytes(32)
    async with (
        relaying() as stays,
        mortal(relaying(identity=key)) as (dies, kill),
        reserving(stays, dies) as server,
        echoing(server),
        dialling() as client,
    ):
        place = dies.addresses[0].partition("/p2p/")[0]
        assert server.addresses == [through(stays, server), through(dies, server)]
        link = await client.dial(through(dies, server))
        await check_echo(link)
        await kill()
        with pytest.raises(PeerUnreachable):
            await link.receive()
        await until(lambda: server.addresses == [through(stays, server)])
        await check_echo(await client.dial(through(stays, server)))
        async with noting(server) as told, relaying(identity=key, listen=place) as back:
            await until(lambda: bool(told))
            assert told == [[through(stays, server), through(back, server)]]


@in_trio
async def test_two_peers_punch_where_their_relay_sees_them_and_nowhere_else() -> None:
    async with relaying() as relay, reserving(relay) as server, dialling() as client:
        await client.dial(through(relay, server))
        for network, other in ((client, server), (server, client)):
            (relayed,) = network._held.living(ID.from_string(other.peer))
            circuit = cast(Any, relayed).muxed_conn.secured_conn.raw
            assert circuit.seen_host == "127.0.0.1"
            named = [("8.8.8.8", 1), ("127.0.0.2", 2), ("127.0.0.1", 3), ("8.8.8.8", 4)]
            door = Door("127.0.0.1", 5, "127.0.0.1", 5)
            assert network._puncher._permitted(named, door, relayed) == [("127.0.0.1", 3)]
            circuit.seen_host = None  # as with other relays than ours
            assert network._puncher._permitted(named, door, relayed) == [("8.8.8.8", 1), ("8.8.8.8", 4)]


@pytest.mark.parametrize(
    ("address", "matching"),
    [
        (f"/p2p-circuit/p2p/{OTHER_ID}", "one relay"),
        (f"/ip4/127.0.0.1/tcp/1/p2p-circuit/p2p/{OTHER_ID}", "is not the address of a peer"),
        (f"{OTHER}/p2p-circuit", "is not the address of a peer"),
        (f"{OTHER}/p2p-circuit/p2p/{OTHER_ID}/p2p-circuit/p2p/{OTHER_ID}", "one relay"),
    ],
)
def test_an_address_that_names_no_relay_is_refused(address: str, matching: str) -> None:
    with pytest.raises(ConfigError, match=matching):
        parse_peer(address)


def test_a_circuit_address_is_that_of_its_peer() -> None:
    info = parse_peer(f"{OTHER}/p2p-circuit/p2p/{RELAY_ID}")
    relay = relay_of(info)
    assert info.peer_id.to_base58() == RELAY_ID
    assert relay is not None and relay.peer_id.to_base58() == OTHER_ID
    assert relay_of(parse_peer(OTHER)) is None
    with pytest.raises(ConfigError, match="itself reached through a relay"):
        parse_relay(f"{OTHER}/p2p-circuit/p2p/{RELAY_ID}")
    with pytest.raises(ConfigError, match="characters"):
        parse_relay(f"/dns/{'.'.join(['a' * 60] * 4)}/tcp/4001/p2p/{RELAY_ID}")


@in_trio
async def test_a_relay_that_cannot_be_reached_is_named() -> None:
    with (
        pytest.raises(PeerUnreachable, match=r"cannot connect to the relay at /ip4/127\.0\.0\.1/tcp/1 .*refused"),
        single_error(),
    ):
        async with open_network([], POLICY, relays=[OTHER]):
            pass
    async with dialling() as client:
        with pytest.raises(PeerUnreachable, match="cannot connect to the relay at"):
            await client.dial(f"{OTHER}/p2p-circuit/p2p/{RELAY_ID}")
    async with relaying() as relay, open_network([], POLICY, relays=[OTHER, relay.addresses[0]]) as server:
        assert server.addresses == [through(relay, server)], "one relay is enough"
