"""The peers of an invite: few, of different groups, and never those of one machine alone if others can be dialled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.peers.invited import (
    MOST_ADDRESSES,
    MOST_PEERS,
    Candidate,
    DialledFrom,
    candidate,
    choose_invited,
    dialled_from,
    reach_of,
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


def ours(*addresses: str) -> Candidate:
    return Candidate(addresses, is_ours=True)


def known(*addresses: str) -> Candidate:
    return Candidate(addresses)


def peer_in(address: str) -> str:
    return address.rpartition("/p2p/")[2]


@pytest.mark.parametrize(
    ("host", "where"),
    [
        (HERE, DialledFrom.MACHINE),
        ("127.5.5.5", DialledFrom.MACHINE),
        ("::1", DialledFrom.MACHINE),
        ("localhost", DialledFrom.MACHINE),
        ("Localhost.", DialledFrom.MACHINE),
        ("a.localhost", DialledFrom.MACHINE),
        (HOME, DialledFrom.NETWORK),
        ("100.64.0.1", DialledFrom.NETWORK),
        ("169.254.0.9", DialledFrom.NETWORK),
        ("fd77::1", DialledFrom.NETWORK),
        ("x.local", DialledFrom.NETWORK),
        ("x.LOCAL.", DialledFrom.NETWORK),
        ("router", DialledFrom.NETWORK),
        ("x.home.arpa", DialledFrom.NETWORK),
        (FAR, DialledFrom.INTERNET),
        ("2a00:1450::1", DialledFrom.INTERNET),
        ("llm.example.org", DialledFrom.INTERNET),
        ("64:ff9b::8.8.8.8", DialledFrom.INTERNET),
        ("::ffff:127.0.0.1", DialledFrom.NOWHERE),
        ("::ffff:8.8.8.8", DialledFrom.NOWHERE),
        ("64:ff9b::7f00:1", DialledFrom.NOWHERE),
        ("0.0.0.0", DialledFrom.NOWHERE),
        ("::", DialledFrom.NOWHERE),
        ("224.0.0.251", DialledFrom.NOWHERE),
        ("ff02::fb", DialledFrom.NOWHERE),
        ("192.0.2.2", DialledFrom.NETWORK),  # sandboxes of clouds have networks there
        ("2001:db8::1", DialledFrom.NETWORK),
        ("fe80::1", DialledFrom.NOWHERE),
    ],
)
def test_an_address_is_dialled_from_as_far_as_its_host_or_its_relay_means_something(
    host: str, where: DialledFrom
) -> None:
    assert dialled_from(at(host, "a")) is where is dialled_from(through(host, "a"))


def test_only_an_invite_that_could_name_nothing_else_names_loopback() -> None:
    assert choose_invited([known(at(HERE, "a"))]) == (at(HERE, "a"),)
    assert choose_invited([known(at(HERE, "a"), at(HOME, "a"))]) == (at(HOME, "a"),)
    assert choose_invited([known(at(HERE, "a")), known(at(HOME, "b"))]) == (at(HOME, "b"),)
    assert choose_invited([ours(at(HERE, "a")), Candidate([], [at(HOME, "b"), at(HERE, "b")])]) == (
        at(HERE, "a"),
        at(HOME, "b"),
    ), "what a stranger claims is not known to be anywhere"
    assert choose_invited([]) == choose_invited([known()]) == ()


def test_an_address_that_nobody_can_dial_is_never_named() -> None:
    hosts = ("0.0.0.0", "::ffff:127.0.0.1", "224.0.0.1", "fe80::1")
    assert choose_invited([known(*(at(host, "a") for host in hosts))]) == ()
    assert choose_invited([Candidate([at(HERE, "a")], [at(host, "a") for host in hosts])]) == (at(HERE, "a"),)
    assert reach_of([known(at("0.0.0.0", "a"))]) is widest([]) is DialledFrom.NOWHERE


def test_no_stranger_keeps_the_own_node_or_those_of_its_network_out_of_an_invite() -> None:
    own, other, evil = at("192.168.1.5", "own"), at("192.168.1.6", "b"), [at("8.8.8.8", "e"), at("x.local", "e")]
    assert choose_invited([ours(own), known(other), known(*evil)]) == (own, evil[0], other)
    for claims in (evil, evil[:1], evil[1:]):
        assert choose_invited([ours(own), known(other), Candidate([], claims)]) == (own, other, *claims)
        assert reach_of([ours(own), known(other), Candidate([], claims)]) is DialledFrom.NETWORK
    crowd = [known(at(f"9.9.{number}.9", f"e{number}")) for number in range(2 * MOST_PEERS)]
    assert choose_invited([*crowd, ours(own)])[0] == own


def test_the_address_where_a_stranger_is_met_goes_before_all_that_it_claims() -> None:
    claims = [at(host, "a") for host in (FAR, "8.8.8.8", "1.1.1.1", "llm.example.org", "9.9.9.9", "9.9.8.9")]
    stranger = candidate([*claims, at(HOME, "a")], HOME)
    assert stranger == Candidate([at(HOME, "a")], claims)
    assert choose_invited([stranger]) == (at(HOME, "a"), *claims[: MOST_ADDRESSES - 1])
    assert reach_of([stranger]) is DialledFrom.NETWORK
    assert candidate([at(HOME, "a"), through(FAR, "a")], claimed_group(through(FAR, "a"))).known == [through(FAR, "a")]
    assert candidate(claims, None) == Candidate([], claims)


def test_a_peer_that_the_internet_dials_goes_before_those_of_one_network() -> None:
    assert choose_invited([known(at(HOME, "b")), known(at(FAR, "a"))]) == (at(FAR, "a"), at(HOME, "b"))


def test_an_invite_tells_no_private_address_of_a_peer_that_the_internet_dials() -> None:
    private = [at(host, "a") for host in (HOME, DOCKER, "fd77::1", "x.local")]
    far, far_6 = at(FAR, "a"), at("2a00:1450::1", "a")
    assert choose_invited([known(*private, far)]) == (far,) == choose_invited([Candidate([far], private)])
    assert choose_invited([known(*private, far_6)]) == (far_6, at(HOME, "a"), at(DOCKER, "a"), at("x.local", "a")), (
        "behind a NAT over IPv4: its network needs these"
    )
    assert choose_invited([known(*private[:2], through(FAR, "a"))]) == (through(FAR, "a"), *private[:2])
    assert choose_invited([Candidate(private[:2], [far])]) == (*private[:2], far), "which is only claimed"


def test_peers_of_other_groups_go_first_and_their_neighbours_after_them() -> None:
    one, neighbour, other = (at(host, name) for host, name in ((FAR, "a"), ("198.41.0.5", "b"), ("8.8.8.8", "c")))
    assert choose_invited([known(one), known(neighbour), known(other)]) == (one, other, neighbour)


def test_a_peer_that_needs_no_relay_goes_before_one_behind_a_relay() -> None:
    one, relayed = at("8.8.8.8", "b"), through(FAR, "a")
    assert choose_invited([known(relayed), known(one)]) == (one, relayed)
    assert choose_invited([known(relayed, at("8.8.8.8", "a"))])[0] == at("8.8.8.8", "a")


def test_second_addresses_come_after_the_first_of_each_peer() -> None:
    """The first one may be of a network of containers, which nobody else is in."""
    peers = [known(at(DOCKER, "a"), at(HOME, "a")), known(at("192.168.1.6", "b"))]
    assert choose_invited(peers) == (at(DOCKER, "a"), at("192.168.1.6", "b"), at(HOME, "a"))


HOSTS = st.sampled_from([HERE, HOME, DOCKER, FAR, "8.8.8.8", "8.8.8.9", "1.1.1.1", "9.9.9.9", "fd77::1", "localhost"])
ADDRESSES = st.lists(st.tuples(HOSTS | st.sampled_from(["0.0.0.0", "x.local"]), st.booleans()), max_size=4)
PEERS = st.lists(st.tuples(ADDRESSES, ADDRESSES, st.booleans()), max_size=12)
Drawn = list[tuple[str, bool]]


@given(PEERS)
def test_whatever_strangers_claim_an_invite_names_few_and_keeps_those_that_are_known(
    drawn: list[tuple[Drawn, Drawn, bool]],
) -> None:
    def addresses(number: int, each: Drawn) -> Sequence[str]:
        return [(through if relayed else at)(host, f"peer{number}") for host, relayed in each]

    peers = [
        Candidate(addresses(number, there), addresses(number, claims), is_ours)
        for number, (there, claims, is_ours) in enumerate(drawn)
    ]
    chosen = choose_invited(peers)
    everything = [address for each in peers for address in (*each.known, *each.claims)]
    assert set(chosen) <= set(everything) and len(set(chosen)) == len(chosen) <= MOST_ADDRESSES
    by_peer = {peer_in(each): [one for one in chosen if peer_in(one) == peer_in(each)] for each in chosen}
    assert len(by_peer) <= MOST_PEERS
    reach, most = reach_of(peers), DialledFrom.NETWORK
    if reach is DialledFrom.MACHINE:
        most = DialledFrom.MACHINE
    assert all(dialled_from(each) <= most for each in chosen)
    there = [[one for one in each.known if dialled_from(one) <= most] for each in peers]
    for each in there:
        if any(claimed_group(one) == claimed_group(at(FAR, "a")) for one in each):
            assert not any(
                dialled_from(one) is DialledFrom.NETWORK for one in chosen if peer_in(one) == peer_in(each[0])
            )
    for each, names in by_peer.items():
        known_ones = there[int(each.removeprefix("peer"))]
        assert not known_ones or names[0] in known_ones, "what is known goes before what is claimed"
    own = [f"peer{number}" for number, each in enumerate(peers) if each.is_ours and there[number]]
    assert not own or peer_in(chosen[0]) in own
    answering = [f"peer{number}" for number, each in enumerate(there) if each]
    assert min(len(answering), MOST_PEERS) <= len([each for each in by_peer if each in answering])
    firsts = [min(each, key=lambda one: (dialled_from(one), "/p2p-circuit" in one)) for each in there if each]
    groups = {claimed_group(of[0]) for of in by_peer.values()}
    assert len(groups) >= min(MOST_PEERS, len(set(map(claimed_group, firsts)))), "as many groups as there are peers for"
