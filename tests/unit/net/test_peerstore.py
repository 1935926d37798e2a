"""The list of peers that a host has heard of stays small and quick, and the node itself stays in it."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from llmnode.core.budget import Resource
from llmnode.core.policy import BudgetPolicy, LinkPolicy, PeerstorePolicy
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, host_and_port, place_in
from llmnode.net.host import open_network
from llmnode.net.identity import fresh_identity
from llmnode.net.peerstore import KnownPeers
from unit.in_trio import in_trio
from unit.links import POLICY

if TYPE_CHECKING:
    from libp2p.abc import IHost

SMALL = PeerstorePolicy(peers=8, addresses=3, protocols=4)
HERE, THERE = ("10.0.0.1", 4001), ("10.0.0.2", 4001)


def peer(number: int) -> ID:
    return ID(b"\x00\x08" + number.to_bytes(8, "big"))


def hear_of(host: IHost, count: int) -> list[float]:
    """The processor time of each."""
    times = []
    for number in range(count):
        began_s = time.thread_time()
        host.get_peerstore().add_addrs(peer(number), [Multiaddr(f"/ip4/10.0.0.1/tcp/{number + 1}")], 600)
        times.append(time.thread_time() - began_s)
    return times


@in_trio
async def test_a_node_keeps_its_own_key_whatever_number_of_peers_it_hears_of() -> None:
    """It could not describe itself, nor publish anything: py-libp2p drops the node itself first."""
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        hear_of(network.host, 1200)
        assert network.host.get_private_key().sign(b"message")
        assert ID.from_pubkey(network.host.get_public_key()) == network.host.get_id()


@in_trio
async def test_one_peer_more_than_there_are_places_takes_no_time() -> None:
    """py-libp2p would sort all of them for each."""
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        times = hear_of(network.host, 1500)
        assert statistics.median(times[1100:]) < 2e-4
        assert len(network.host.get_peerstore().peer_data_map) <= 1000  # type: ignore[attr-defined]


def test_connected_peers_stay_and_of_the_others_the_oldest_make_way() -> None:
    known = KnownPeers(SMALL, BudgetPolicy())
    connected = [peer(number) for number in range(4)]
    known.is_connected = lambda each: each in connected
    for each in (*connected, peer(10), peer(11)):
        known.hear(each, [HERE])
    known.hear(peer(12), [HERE])
    known.note(peer(10), [THERE], [])  # heard of again
    for number in range(20, 22):
        known.hear(peer(number), [HERE])
    assert set(known.peer_data_map) == {*connected, *(peer(number) for number in (10, 12, 20, 21))}
    connected += [peer(number) for number in (10, 12, 20, 21)]
    known.hear(peer(30), [HERE])
    assert len(known.peer_data_map) == SMALL.peers, "a connected one goes if there are no others"
    assert known.has_peer(peer(30))


def test_a_peers_own_word_counts_for_more_than_that_of_others() -> None:
    known, one = KnownPeers(SMALL, BudgetPolicy()), peer(1)
    known.hear(one, [HERE])
    known.hear(one, [THERE])
    assert [host_and_port(each) for each in known.addrs(one)] == [HERE]
    known.note(one, [THERE], ["/one"])
    known.hear(one, [HERE])
    assert [host_and_port(each) for each in known.addrs(one)] == [THERE]
    known.note(one, [], ["/two"])
    assert [host_and_port(each) for each in known.addrs(one)] == [THERE], "one that listens nowhere else says nothing"
    assert known.get_protocols(one) == ["/two"]
    known.peer_data_map[one].last_identified -= SMALL.said_s + 1
    with pytest.raises(PeerStoreError):
        known.addrs(one)
    known.note(one, [THERE], [])
    known.peer_data_map[one].last_identified -= SMALL.said_s + 1
    known.hear(one, [HERE])
    assert [host_and_port(each) for each in known.addrs(one)] == [HERE]


def fill(known: KnownPeers, peers: int) -> None:
    """The longest addresses and protocols that are kept, all different."""
    policy, rng = known.policy, random.Random(0)
    for number in range(peers):
        name = [rng.randbytes((policy.address_bytes - 3) // 2).hex() for _ in range(policy.addresses)]
        size = bytes([0x80 | len(name[0]) & 0x7F, len(name[0]) >> 7])
        known.add_addrs(peer(number), [Multiaddr(b"\x36" + size + each.encode()) for each in name], 600)
        words = [rng.randbytes(policy.protocol_chars // 2).hex() for _ in range(policy.protocols)]
        known.set_protocols(peer(number), words if number < BudgetPolicy().connections else [])


@pytest.mark.parametrize("memory_mib", [16, 128, 512])
def test_a_full_list_takes_no_more_memory_than_the_budget_is_charged_for_it(memory_mib: int) -> None:
    budget = BudgetPolicy(memory_bytes=memory_mib << 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        known = KnownPeers(PeerstorePolicy(), budget)
        known.is_connected = lambda _peer: True
        fill(known, known.max_peers)
        assert len(known.peer_data_map) == known.max_peers <= PeerstorePolicy().peers
        assert known.most_bytes / 2 < tracemalloc.get_traced_memory()[0] - before <= known.most_bytes
        assert known.most_bytes <= budget.memory_bytes * PeerstorePolicy().memory_share
    finally:
        tracemalloc.stop()


@in_trio
async def test_the_list_is_in_the_figure_for_memory() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network:
        known = network.host.get_peerstore()
        assert isinstance(known, KnownPeers)
        assert known.max_peers == PeerstorePolicy().peers
        assert network.budget.process.held[Resource.MEMORY] >= known.most_bytes > 4 << 20


NUMBERS = st.integers(0, 20).map(peer)
PLACES = st.lists(st.tuples(st.integers(1, 9).map("10.0.0.{}".format), st.integers(1, 9)), max_size=9)
NAMES = st.lists(st.sampled_from(["/a", "/b", "/c", "x" * 65]), max_size=9)
CALLS = st.one_of(
    st.tuples(st.just("hear"), NUMBERS, PLACES),
    st.tuples(st.just("note"), NUMBERS, PLACES, NAMES),
    st.tuples(st.just("add_protocols"), NUMBERS, NAMES),
    st.tuples(st.just("forget_connected"), NUMBERS),
    st.tuples(st.just("clear_addrs"), NUMBERS),
)


@given(st.lists(CALLS, max_size=60), st.sets(NUMBERS))
def test_no_calls_make_it_larger_or_lose_the_node_itself(calls: list[tuple], connected: set[ID]) -> None:  # type: ignore[type-arg]
    known, identity = KnownPeers(SMALL, BudgetPolicy()), fresh_identity()
    own = ID.from_pubkey(identity.public_key)
    known.add_key_pair(own, identity)
    known.is_connected = connected.__contains__
    for name, *arguments in calls:
        getattr(known, name)(*arguments)
        assert len(known.peer_data_map) <= SMALL.peers
    assert known.privkey(own) == identity.private_key
    for data in known.peer_data_map.values():
        assert len(data.addrs) <= SMALL.addresses
        assert len(data.protocols) <= SMALL.protocols
        assert all(len(each) <= SMALL.protocol_chars for each in data.protocols)


PEER = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
PARTS = st.sampled_from(
    [
        *("/ip4/8.8.8.8", "/ip6/2001:4860::8888", "/ip6/::1", "/dns4/a.example", "/tcp/1", "/tcp/65535", "/udp/1"),
        *("/ws", f"/p2p/{PEER}", "/p2p-circuit", "/quic-v1"),
    ]
)


@given(st.lists(PARTS, max_size=4))
def test_places_are_read_as_from_a_multiaddr(parts: list[str]) -> None:
    address = Multiaddr("".join(parts))
    assert place_in(address.to_bytes()) == host_and_port(address)


@given(st.binary(max_size=80) | st.sampled_from([4, 41]).flatmap(lambda code: st.binary().map(bytes([code]).__add__)))
def test_places_are_read_of_nothing_else(packed: bytes) -> None:
    place = place_in(packed)
    assert place is None or host_and_port(Multiaddr(packed)) == place
