"""The groups in which peers count: whatever a stranger announces, its identities have the share of where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmnode
from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.whereabouts import NOWHERE, RELAYED, claimed_group, groups_of, in_turns, votes
from llmnode.core.span import Span

OFFER = Offer("m", Profile(b"m" * 32, Precision()), 8, Span(0, 8), PeerState.ONLINE, 1000, 64, 64)
EVIL = ("6.6.6.6", "6.6.7.6", "6.6.8.6")
"""The hosts of a stranger, in three groups."""
HONEST = [f"8.8.{number}.8" for number in range(6)]
HOSTS = st.sampled_from([*HONEST, *EVIL, "7.7.7.7", "10.0.0.1", "2001:db8::1"])


def announced(name: str, *hosts: str) -> Announcement:
    addresses = tuple(f"/ip{6 if ':' in host else 4}/{host}/tcp/1/p2p/{name}" for host in hosts)
    return Announcement(PeerId(name), addresses, 0, 1, "llmnode", OFFER)


def stranger(claims: list[list[str]], at: list[int]) -> list[Announcement]:
    """Identities at some of its hosts, which they name after what they claim beside: one that does not is not there."""
    found = [EVIL[number] for number in at]
    return [announced(f"sybil {n}", *claimed, found[n % len(found)]) for n, claimed in enumerate(claims)]


IDENTITIES = st.lists(st.lists(HOSTS, max_size=7), max_size=40)
AT = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)


@given(IDENTITIES, AT, st.sets(st.integers(0, 39)), st.sets(st.integers(0, 5)), st.randoms())
def test_identities_in_k_groups_have_k_places_of_a_round_whatever_they_announce(
    claims: list[list[str]], at: list[int], met_sybils: set[int], met_honest: set[int], rng: object
) -> None:
    sybils, honest = stranger(claims, at), [announced(f"honest {n}", host) for n, host in enumerate(HONEST)]
    met = {honest[n].peer: groups(HONEST[n]) for n in met_honest}
    met |= {sybils[n].peer: groups(sybils[n].addresses[-1].split("/")[2]) for n in met_sybils if n < len(sybils)}
    everybody = [*sybils, *honest]
    rng.shuffle(everybody)  # type: ignore[attr-defined]  # a random.Random
    order = in_turns(everybody, met)
    assert sorted(each.peer for each in order) == sorted(each.peer for each in everybody)
    own = {each.peer for each in sybils}
    for n in met_honest:  # all of them are in the first round
        before = order[: order.index(honest[n])]
        assert sum(each.peer in own for each in before) <= len(at)
        assert len({each.peer for each in before} & met.keys()) == len(before), "what is only claimed comes later"


def groups(host: str) -> str:
    return claimed_group(f"/ip4/{host}/tcp/1")


@given(IDENTITIES, AT)
def test_without_anybody_met_rounds_hold_too(claims: list[list[str]], at: list[int]) -> None:
    """A claim of an honest peer's group delays that peer; it gives the stranger no place."""
    sybils = stranger(claims, at)
    order = in_turns([*sybils, *(announced(f"{n}", f"9.{n // 250}.{n % 250}.9") for n in range(100))], {})
    places = [index for index, each in enumerate(order) if each.peer.startswith("sybil")]
    assert sum(index < 100 + len(at) for index in places) <= len(at), "a hundred others, that nobody claims, come first"


@given(IDENTITIES, AT, st.sets(st.integers(0, 39)))
def test_what_is_only_claimed_has_no_vote_and_identities_at_one_place_have_one(
    claims: list[list[str]], at: list[int], met_sybils: set[int]
) -> None:
    sybils = stranger(claims, at)
    peers = [each.peer for each in sybils]
    assert votes(peers, {}) == frozenset()
    met = {sybils[n].peer: groups(sybils[n].addresses[-1].split("/")[2]) for n in met_sybils if n < len(sybils)}
    assert len(votes(peers, met)) <= len(at)


@given(st.lists(HOSTS, max_size=8), st.booleans())
def test_a_peer_counts_where_it_was_met_or_in_all_groups_that_it_claims(hosts: list[str], is_met: bool) -> None:
    peer = announced("peer", *hosts)
    met = {peer.peer: "6.6.6.0/24"} if is_met else {}
    claimed = {claimed_group(each) for each in peer.addresses}
    assert groups_of(peer, met) == ({"6.6.6.0/24"} if is_met else claimed or {NOWHERE})


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("/ip4/8.8.8.8/tcp/1/p2p/x", "8.8.8.0/24"),
        ("/ip6/2a00:1450:4001:8aa::1/tcp/1/p2p/x", "2a00:1450:4001::/48"),
        ("/ip6/2002:808:808::1/tcp/1/p2p/x", "8.8.8.0/24"),
        ("/ip4/8.8.8.8/tcp/1/p2p/relay/p2p-circuit/p2p/x", RELAYED),
        ("/dns4/somewhere.org/tcp/1/p2p/x", NOWHERE),
        ("", NOWHERE),
    ],
)
def test_groups_of_addresses(address: str, group: str) -> None:
    """An IPv4 address has a /48 of 6to4. The owner of a /24 would have 256 groups there."""
    assert claimed_group(address) == group


def test_no_other_code_takes_a_group_from_what_a_peer_announces() -> None:
    """`claimed_group` is for this module and for invites, which name claims last. `address_groups` is for links, for
    addresses that were dialled, and for those at which a relay of ours sees a peer.
    """
    package = Path(llmnode.__file__).parent
    names = {"claimed_group": {"core/peers/whereabouts.py", "core/peers/invited.py"}}
    names["address_groups("] = {
        "core/address_groups.py", "core/budget.py", "core/peers/dial_gate.py", "core/peers/whereabouts.py",
        "net/admission.py", "net/punch.py", "testing/link.py",
    }  # fmt: skip
    for name, allowed in names.items():
        users = {path for path in package.rglob("*.py") if name in path.read_text(encoding="utf-8")}
        assert {str(path.relative_to(package)) for path in users} == allowed
