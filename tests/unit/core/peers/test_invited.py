"""The peers of an invite: few, of different groups, and never those of one machine alone if others can be dialled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.peers.invited import (
    MOST_ADDRESSES,
    MOST_PEERS,
    DialledFrom,
    choose_invited,
    dialled_from,
    for_others,
    widest,
)
from llmnode.core.peers.whereabouts import claimed_group

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE, HOME, DOCKER, FAR = "127.0.0.1", "192.168.1.5", "172.17.0.1", "198.41.0.4"


def at(host: str, name: str) -> str:
    kind = "ip6" if ":" in host else "ip4" if host[0].isdigit() else "dns"
    return f"/{kind}/{host}/tcp/4001/p2p/{name}"


def through(relay: str, name: str) -> str:
    return f"{at(relay, 'relay')}/p2p-circuit/p2p/{name}"


def peer_in(address: str) -> str:
    return address.rpartition("/p2p/")[2]


@pytest.mark.parametrize(
    ("host", "where"),
    [
        (HERE, DialledFrom.MACHINE),
        ("127.5.5.5", DialledFrom.MACHINE),
        ("::1", DialledFrom.MACHINE),
        ("localhost", DialledFrom.MACHINE),
        (HOME, DialledFrom.NETWORK),
        ("100.64.0.1", DialledFrom.NETWORK),
        ("169.254.0.9", DialledFrom.NETWORK),
        ("fd77::1", DialledFrom.NETWORK),
        (FAR, DialledFrom.INTERNET),
        ("2a00:1450::1", DialledFrom.INTERNET),
        ("llm.example.org", DialledFrom.INTERNET),
    ],
)
def test_an_address_is_dialled_from_as_far_as_its_host_or_its_relay_means_something(
    host: str, where: DialledFrom
) -> None:
    assert dialled_from(at(host, "a")) is where is dialled_from(through(host, "a"))


def test_only_an_invite_that_could_name_nothing_else_names_loopback() -> None:
    assert choose_invited([[at(HERE, "a")]]) == (at(HERE, "a"),)
    assert choose_invited([[at(HERE, "a"), at(HOME, "a")]]) == (at(HOME, "a"),)
    assert choose_invited([[at(HERE, "a")], [at(HOME, "b")]]) == (at(HOME, "b"),)
    assert for_others([at(HERE, "a"), at(FAR, "a")]) == [at(FAR, "a")]
    assert for_others([at(HERE, "a")]) == [at(HERE, "a")]
    assert choose_invited([]) == choose_invited([[]]) == ()


def test_a_peer_that_the_internet_dials_goes_before_those_of_one_network_and_keeps_both_addresses() -> None:
    both = [at(HOME, "a"), at(FAR, "a")]
    assert choose_invited([[at(HOME, "b")], both]) == (at(FAR, "a"), at(HOME, "a"))


def test_peers_of_other_groups_go_first_and_their_neighbours_after_them() -> None:
    one, neighbour, other = (at(host, name) for host, name in ((FAR, "a"), ("198.41.0.5", "b"), ("8.8.8.8", "c")))
    assert choose_invited([[one], [neighbour], [other]]) == (one, other, neighbour)


def test_a_peer_that_needs_no_relay_goes_before_one_behind_a_relay() -> None:
    assert choose_invited([[through(FAR, "a")], [at("8.8.8.8", "b")]]) == (at("8.8.8.8", "b"), through(FAR, "a"))
    assert choose_invited([[through(FAR, "a"), at("8.8.8.8", "a")]])[0] == at("8.8.8.8", "a")


def test_second_addresses_come_after_the_first_of_each_peer() -> None:
    """The first one may be of a network of containers, which nobody else is in."""
    peers = [[at(DOCKER, "a"), at(HOME, "a")], [at("192.168.1.6", "b")]]
    assert choose_invited(peers) == (at(DOCKER, "a"), at("192.168.1.6", "b"), at(HOME, "a"))


HOSTS = st.sampled_from([HERE, HOME, DOCKER, FAR, "8.8.8.8", "8.8.8.9", "1.1.1.1", "9.9.9.9", "fd77::1", "localhost"])
PEERS = st.lists(st.lists(st.tuples(HOSTS, st.booleans()), max_size=4), max_size=12)


@given(PEERS)
def test_whatever_the_peers_are_an_invite_names_few_and_those_that_most_can_dial(
    drawn: list[list[tuple[str, bool]]],
) -> None:
    peers: Sequence[list[str]] = [
        [(through if relayed else at)(host, f"peer{number}") for host, relayed in each]
        for number, each in enumerate(drawn)
    ]
    chosen = choose_invited(peers)
    everything = [address for each in peers for address in each]
    assert set(chosen) <= set(everything) and len(set(chosen)) == len(chosen) <= MOST_ADDRESSES
    assert bool(chosen) == bool(everything)
    by_peer = {peer_in(each): [one for one in chosen if peer_in(one) == peer_in(each)] for each in chosen}
    assert len(by_peer) <= MOST_PEERS
    reach = widest(everything)
    assert all(dialled_from(of[0]) is reach for of in by_peer.values())
    if reach is not DialledFrom.MACHINE:
        assert not any(dialled_from(each) is DialledFrom.MACHINE for each in chosen)
    groups = {claimed_group(of[0]) for of in by_peer.values()}
    usable = [sorted(each, key=lambda one: (dialled_from(one), "/p2p-circuit" in one)) for each in peers if each]
    there = {claimed_group(each[0]) for each in usable if dialled_from(each[0]) is reach}
    assert len(groups) == min(MOST_PEERS, len(there)), "as many groups as there are peers for"
