"""A client that names no precision gets the exact one if it is served whole, else the one with the most throughput."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo, Precision, PrecisionWish, Profile, precision_named, wish_named
from llmnode.core.peers.whereabouts import claimed_group
from llmnode.core.placement.claims import of_weights
from llmnode.core.placement.precisions import (
    backing_servers,
    describe_choice,
    describe_gaps,
    served_precisions,
)
from llmnode.core.span import Span
from llmnode.errors import ConfigError

MODEL = ModelInfo("ours", b"o" * 32, blocks=8, hidden_size=8, context_tokens=64)
WHOLE, FRONT, BACK = Span(0, 8), Span(0, 4), Span(4, 8)
ANY = PrecisionWish()


def offer(dtype: str, span: Span = WHOLE, block_us: int = 1000) -> Offer:
    profile = Profile(MODEL.digest, precision_named(dtype))
    return Offer(MODEL.name, profile, 8, span, PeerState.ONLINE, block_us, 64, 64)


def announced(*offers: Offer) -> list[Announcement]:
    return [Announcement(PeerId(f"peer{n}"), (), 0, 1, "llmnode", each) for n, each in enumerate(offers)]


def names(*offers: Offer, wish: PrecisionWish = ANY) -> list[str]:
    return [each.precision.name for each in served_precisions(MODEL, announced(*offers), wish, {})]


@pytest.mark.parametrize(
    ("offers", "wish", "found"),
    [
        ([], ANY, []),
        ([offer("float32", block_us=9000), offer("bfloat16"), offer("bfloat16")], ANY, ["float32", "bfloat16"]),
        ([offer("float32", FRONT), offer("float32+int8")], ANY, ["float32+int8", "float32"]),
        ([offer("float32+nf4"), offer("bfloat16", block_us=900)], ANY, ["bfloat16", "float32+nf4"]),
        ([offer("float32+nf4"), offer("bfloat16", block_us=0)], ANY, ["float32+nf4", "bfloat16"]),
        ([offer("float32", FRONT), offer("bfloat16", Span(2, 8))], ANY, ["bfloat16", "float32"]),
        ([offer("float32", FRONT), offer("float32", BACK), offer("bfloat16")], ANY, ["float32", "bfloat16"]),
        ([offer("float32"), offer("bfloat16+int8"), offer("bfloat16")], PrecisionWish(quant="int8"), ["bfloat16+int8"]),
        ([offer("bfloat16"), offer("float16")], wish_named("float16"), ["float16"]),
        ([offer("float4")], ANY, []),
    ],
    ids=[
        "nobody",
        "exact first, however slow",
        "not if blocks of it are missing",
        "else the one of the most throughput",
        "unmeasured counts as slow",
        "nothing whole: nearest to it",
        "several make a whole",
        "a named part is insisted on",
        "a named one is insisted on",
        "of a newer version",
    ],
)  # fmt: skip
def test_the_order_in_which_precisions_are_tried(offers: list[Offer], wish: PrecisionWish, found: list[str]) -> None:
    assert names(*offers, wish=wish) == found


def test_a_boast_does_not_make_a_precision_the_first() -> None:
    """It counts twice the median at most, of the servers of all precisions."""
    crowd = [offer("bfloat16")] * 3
    assert names(*crowd, offer("float16", block_us=1)) == ["bfloat16", "float16"]


def at(host: str, each: Offer, name: str = "", *claimed: str) -> Announcement:
    """Its true address comes after those that are `claimed`."""
    addresses = tuple(f"/ip4/{one}/tcp/1/p2p/{host}" for one in (*claimed, host))
    return Announcement(PeerId(name or host), addresses, 0, 1, "llmnode", each)


def test_what_a_single_address_group_serves_comes_after_what_two_serve() -> None:
    """Its identities do not count. It counts as before if there is nothing better."""
    crowd = [at("9.9.9.9", offer("float32", block_us=1), f"sybil {number}") for number in range(9)]
    alone, other = at("8.8.8.8", offer("bfloat16")), at("8.8.4.4", offer("bfloat16"))

    def order(*announcements: Announcement, gone: Announcement | None = None) -> list[str]:
        met = {each.peer: claimed_group(each.addresses[0]) for each in announcements if each is not gone}
        return [each.precision.name for each in served_precisions(MODEL, announcements, ANY, met)]

    assert order(*crowd, alone) == ["float32", "bfloat16"]
    assert order(*crowd, alone, other) == ["bfloat16", "float32"]
    far = at("7.7.7.7", offer("float32"))
    assert order(*crowd, far, alone, other) == ["float32", "bfloat16"]
    assert order(*crowd, far, alone, other, gone=far) == ["bfloat16", "float32"], "it was not met where it says it is"
    half = at("7.7.7.7", offer("float32", FRONT))
    assert order(*crowd, half, alone, other) == ["bfloat16", "float32"], "each block has to have two"


ANYWHERE = st.sampled_from(["8.8.8.8", "8.8.4.4", "1.1.1.1", "6.6.6.6", "9.9.9.9"])


@given(st.lists(st.lists(ANYWHERE, max_size=8), min_size=2, max_size=20), st.booleans())
def test_a_stranger_has_one_vote_whatever_its_identities_announce(claims: list[list[str]], is_met: bool) -> None:
    """Exact comes first if two groups serve it: the stranger alone does not make it so."""
    sybils = [at("9.9.9.9", offer("float32"), f"sybil {number}", *claimed) for number, claimed in enumerate(claims)]
    honest = [at("8.8.8.8", offer("bfloat16"), "one"), at("8.8.4.4", offer("bfloat16"), "other")]
    met = {each.peer: claimed_group(each.addresses[0]) for each in honest}
    if is_met:
        met |= {each.peer: "9.9.9.0/24" for each in sybils}
    served = served_precisions(MODEL, [*sybils, *honest], ANY, met)
    assert [(each.precision.name, each.groups) for each in served] == [("bfloat16", 2), ("float32", int(is_met))]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.integers(0, 3), st.booleans()), max_size=12))
def test_those_that_are_asked_are_of_two_groups_for_each_block_if_there_are_any(
    servers: list[tuple[int, int, int, bool]],
) -> None:
    announced = [
        at(f"8.8.{group}.8", offer("float32", Span(start, min(8, start + length))), f"peer {number}")
        for number, (start, length, group, _) in enumerate(servers)
    ]
    backed = {
        each.peer: f"8.8.{group}.0/24" for each, (*_, group, here) in zip(announced, servers, strict=True) if here
    }
    chosen = backing_servers(announced, backed, {})
    assert not {each.peer for each in chosen} & backed.keys()
    for block in range(8):
        there = {group for start, length, group, _ in servers if start <= block < start + length}
        held = {each.addresses[0].split("/")[2] for each in chosen if each.offer.span.covers(Span(block, block + 1))}
        here = {group for start, length, group, own in servers if own and start <= block < start + length}
        assert len(held | {f"8.8.{group}.8" for group in here}) >= min(2, len(there))


def test_only_the_same_weights_count_and_only_with_their_number_of_blocks() -> None:
    right = offer("float32")
    others = [
        replace(right, blocks=2**32 - 1, span=Span(0, 2**32 - 1)),
        replace(right, profile=Profile(b"t" * 32, Precision())),
        replace(right, profile=Profile(MODEL.digest, Precision(), b"a" * 32)),
    ]
    assert [each.offer for each in of_weights(announced(*others, right), MODEL)] == [right]
    assert names(*others) == []


def test_the_user_hears_why_it_is_not_exact() -> None:
    def said(*offers: Offer) -> str:
        served = served_precisions(MODEL, announced(*offers), ANY, {})
        return describe_choice(served[0], served, ANY)

    assert said(offer("float32")) == "float32: one server has the whole model in it"
    halves = offer("bfloat16", FRONT), offer("bfloat16", BACK)
    assert said(*halves) == "bfloat16: 2 servers have the whole model in it, and nobody serves float32"
    assert said(offer("bfloat16"), offer("float32", FRONT)).endswith("in it, and float32 lacks blocks [4, 8)")
    halves = announced(offer("bfloat16", BACK), offer("float32", FRONT))
    gaps = describe_gaps(served_precisions(MODEL, halves, ANY, {}))
    assert gaps.startswith("float32 lacks blocks [4, 8); bfloat16 lacks blocks [0, 4), and")


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no dtype 'fp32': choose one of auto, float32, "):
        wish_named("fp32")
