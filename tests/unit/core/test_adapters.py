"""Adapters that servers announce: which one a client's name stands for, and which servers it may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmnode.core.adapters import AnnouncedAdapter
from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.errors import ConfigError
from llmnode.core.ids import AdapterId, PeerId
from llmnode.core.model import PRECISIONS, Profile
from llmnode.core.served_adapters import find_adapter, served_adapters
from llmnode.core.span import Span

EXACT = Profile(b"m" * 32, PRECISIONS["float32"])
ONE, OTHER = (AnnouncedAdapter(name, AdapterId(digest * 32), 8) for name, digest in (("one", b"1"), ("other", b"2")))


def announced(
    peer: str,
    span: Span,
    *adapters: AnnouncedAdapter,
    profile: Profile = EXACT,
    state: PeerState = PeerState.ONLINE,
    addresses: tuple[str, ...] = (),
) -> Announcement:
    offer = Offer("model", profile, 8, span, state, 1, 9, 9, adapters=adapters)
    return Announcement(PeerId(peer), addresses, 0, 1, "llmnode", offer)


def test_one_adapter_has_all_its_servers_and_the_blocks_that_nobody_holds_it_for() -> None:
    announcements = [
        announced("a", Span(0, 3), ONE, OTHER),
        announced("b", Span(3, 8), ONE, replace(OTHER, rank=9)),
        announced("c", Span(3, 8), OTHER, state=PeerState.LEFT),
        announced("d", Span(0, 8), OTHER, profile=replace(EXACT, model_digest=b"n" * 32)),
    ]
    found = served_adapters(announcements)
    assert [(each.adapter, [str(one.peer) for one in each.servers], each.missing) for each in found] == [
        (ONE, ["a", "b"], []),
        (OTHER, ["a", "c"], [Span(3, 8)]),
        (replace(OTHER, rank=9), ["b"], [Span(0, 3)]),
        (OTHER, ["d"], []),
    ]


def test_a_name_or_a_digest_stands_for_one_adapter_of_one_profile() -> None:
    announcements = [announced("a", Span(0, 3), ONE), announced("b", Span(3, 8), replace(ONE, name="uno"))]
    assert [str(each.peer) for each in find_adapter("one", announcements, EXACT, {}).servers] == ["a"]
    by_digest = find_adapter(ONE.digest.hex().upper(), announcements, EXACT, {})
    assert [str(each.peer) for each in by_digest.servers] == ["a", "b"]
    assert by_digest.missing == []
    with pytest.raises(ConfigError, match=r"in bfloat16, .* announced, float32"):
        find_adapter("one", announcements, replace(EXACT, precision=PRECISIONS["bfloat16"]), {})
    with pytest.raises(ConfigError, match="none is announced for this model and precision"):
        find_adapter("one", announcements, replace(EXACT, model_digest=b"n" * 32), {})


def test_a_name_of_two_adapters_is_refused_with_both_digests() -> None:
    announcements = [announced("a", Span(0, 8), ONE), announced("b", Span(0, 8), replace(OTHER, name="one"))]
    with pytest.raises(ConfigError, match=f"{ONE.digest.hex()}, {OTHER.digest.hex()}"):
        find_adapter("one", announcements, EXACT, {})
    gone = replace(announcements[1], offer=replace(announcements[1].offer, state=PeerState.LEFT))
    assert find_adapter("one", [announcements[0], gone], EXACT, {}).adapter == ONE


def test_the_digests_of_one_name_come_in_the_order_in_which_they_are_hard_to_make_up() -> None:
    """The forger announces both of its digests with 9 identities, at any addresses, and answers at one."""
    digests = (b"8", b"7", b"1", b"2")
    genuine, partial, *forged = (AnnouncedAdapter("one", AdapterId(digest * 32), 8) for digest in digests)
    announcements = [
        announced("a", Span(0, 5), genuine),
        announced("b", Span(5, 8), replace(genuine, rank=7)),
        announced("c", Span(0, 5), partial),
        announced("d", Span(0, 5), partial),
    ]
    met = {each.peer: f"1.2.{number}.0/24" for number, each in enumerate(announcements)}
    for each in range(9):
        addresses = tuple(f"/ip4/{host}/tcp/1" for host in (f"6.6.{each}.6", "7.7.7.7", "4.4.4.4"))
        announcements.append(announced(f"forger {each}", Span(0, 8), *forged, addresses=addresses))
        met[announcements[-1].peer] = "7.7.7.0/24"
    order = [each.digest.hex() for each in (genuine, *forged, partial)]
    for shuffled in (announcements, announcements[::-1]):
        with pytest.raises(ConfigError, match=", ".join(order)):
            find_adapter("one", shuffled, EXACT, met)


def test_an_adapter_of_another_precision_is_refused_with_the_precisions_that_it_has() -> None:
    rounded = [replace(EXACT, precision=PRECISIONS[name]) for name in ("float16", "bfloat16")]
    announcements = [announced(str(each), Span(0, 8), ONE, profile=each) for each in rounded]
    other = Profile(b"n" * 32, PRECISIONS["float16+int8"])
    announcements.append(announced("of another model", Span(0, 8), ONE, profile=other))
    for wanted in ("one", ONE.digest.hex()):
        with pytest.raises(ConfigError, match=r"in float32, .* announced, bfloat16 or float16$"):
            find_adapter(wanted, announcements, EXACT, {})
    with pytest.raises(ConfigError, match="none is announced for this model and precision"):
        find_adapter("other", announcements, EXACT, {})


def test_an_adapter_that_a_server_announces_twice_has_one_server() -> None:
    (found,) = served_adapters([announced("a", Span(0, 8), ONE, ONE)])
    assert len(found.servers) == 1


def test_a_server_computes_in_its_profile_and_with_the_adapters_that_it_announces() -> None:
    offer = announced("a", Span(0, 3), ONE).offer
    named = replace(EXACT, adapter=bytes(ONE.digest))
    assert offer.computes(EXACT)
    assert offer.computes(named)
    assert not offer.computes(replace(EXACT, adapter=bytes(OTHER.digest)))
    assert not offer.computes(replace(named, precision=PRECISIONS["bfloat16"]))
    with_its_own = replace(offer, profile=named)
    assert with_its_own.computes(named)
    assert not with_its_own.computes(EXACT)
    assert not with_its_own.computes(replace(EXACT, adapter=bytes(OTHER.digest)))
    assert not offer.computes(replace(named, model_digest=b"n" * 32))
