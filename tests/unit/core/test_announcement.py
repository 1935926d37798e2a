"""Announcements as bytes: round trips, and whatever else may come under their name."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import online, online_or_draining
from llmnode.errors import RemoteProtocolError
from llmnode.wire.announcement import (
    pack_announcement,
    pack_news,
    pack_sequences,
    unpack_announcement,
    unpack_news,
    unpack_sequences,
)

POLICY = SwarmPolicy()
NOW_MS = 1_700_000_000_000
OFFER = Offer(
    "model",
    Profile(b"d" * 32, Precision()),
    30,
    Span(3, 7),
    PeerState.ONLINE,
    block_us=900,
    kv_tokens=9,
    kv_tokens_free=5,
)


def signed(peer: str = "peer", sequence: int = NOW_MS, offer: Offer = OFFER) -> SignedAnnouncement:
    announcement = Announcement(
        PeerId(peer), (f"/ip4/1.2.3.4/tcp/5/p2p/{peer}",), sequence, sequence + 45_000, "llmnode/1", offer
    )
    return SignedAnnouncement(announcement, pack_announcement(announcement), b"s" * 64)


def test_what_is_packed_is_unpacked() -> None:
    one, other = signed("one"), signed("other", offer=replace(OFFER, state=PeerState.JOINING, block_us=0))
    assert unpack_announcement(one.body, one.signature) == one
    news = unpack_news(pack_news([one, other], [PeerId("third")], POLICY), POLICY)
    assert list(news.announcements) == [one, other]
    assert list(news.wanted) == ["third"]
    assert unpack_sequences(pack_sequences({PeerId("one"): 7}), POLICY) == {"one": 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span_end": 31}, "span that its model does not have"),
        ({"span_start": 7}, "span that its model does not have"),
        ({"state": ""}, "state"),
        ({"extra": [[[[[[]]]]]]}, "extra: nested"),
        ({"x" * 65: 1}, "no name of a field"),
        ({"": 1}, "no name of a field"),
        ({f"field {number}": 1 for number in range(40)}, "not msgpack"),
        ({"addresses": ["/ip4/1.2.3.4/tcp/5/p2p/another"]}, "of another peer"),
        ({"addresses": ["/p2p/peer"] * 9}, "addresses"),
        ({"addresses": "/p2p/peer"}, "addresses"),
        ({"addresses": [7]}, "addresses"),
        ({"peer": ""}, "peer"),
        ({"sequence": -1}, "sequence"),
        ({"model_digest": b"short"}, "model_digest"),
    ],
    ids=str,
)
def test_an_announcement_of_something_impossible_is_refused(changes: dict[str, object], message: str) -> None:
    fields = msgpack.unpackb(signed().body) | changes
    with pytest.raises(RemoteProtocolError, match=message):
        unpack_announcement(msgpack.packb(fields), b"s" * 64)


more = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.text(min_size=1, max_size=64), more, max_size=9), st.randoms())
def test_fields_of_a_newer_node_are_ignored_wherever_they_stand_and_passed_on(
    added: dict[str, object], rng: object
) -> None:
    """A field that is nested too deep is the one exception; then the announcement is skipped."""
    one = signed()
    fields = list(({**added, **msgpack.unpackb(one.body)}).items())
    rng.shuffle(fields)  # type: ignore[attr-defined]  # a random.Random
    grown = replace(one, body=msgpack.packb(dict(fields)))
    news = unpack_news(pack_news([grown], [], POLICY), POLICY)
    assert list(news.announcements) == [grown] or "nested" in news.unread[0].message


def test_a_state_of_a_newer_node_is_unknown_and_neither_online_nor_serving() -> None:
    body = msgpack.packb(msgpack.unpackb(signed().body) | {"state": "asleep"})
    read = unpack_announcement(body, b"s" * 64)
    assert (read.announcement.offer.state, read.body) == (PeerState.UNKNOWN, body)
    assert [*online([read.announcement]), *online_or_draining([read.announcement])] == []


def test_an_announcement_that_cannot_be_read_is_skipped_and_the_others_stand() -> None:
    one, other = signed("one"), signed("other")
    bad = [replace(one, body=body) for body in (b"", b"\x80", msgpack.packb(7), one.body[:-1])]
    news = unpack_news(pack_news([one, *bad, other], [PeerId("third")], POLICY), POLICY)
    assert list(news.announcements) == [one, other]
    assert (len(news.unread), list(news.wanted)) == (len(bad), ["third"])


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for read in (
        lambda: unpack_announcement(noise, b"s" * 64),
        lambda: unpack_news(noise, POLICY),
        lambda: unpack_sequences(noise, POLICY),
    ):
        try:
            read()
        except RemoteProtocolError:
            continue
        assert noise == b"\x80", "only the empty map is a view"


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_another_announcement(place: int, value: int) -> None:
    news = bytearray(pack_news([signed()], [], POLICY))
    place %= len(news)
    news[place] = value
    with contextlib.suppress(RemoteProtocolError):
        unpack_news(news, POLICY)


@pytest.mark.parametrize("payload", [[], [[]], [[], {}], [{}, []], [[[b"", b""]], []], [[["a", "b"]], []], [[], [7]]])
def test_news_of_another_shape_is_refused(payload: object) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_news(msgpack.packb(payload), POLICY)


def test_more_news_than_a_frame_may_hold_is_cut() -> None:
    small = replace(POLICY, exchange_bytes=2 * 3 * 600)
    many = [signed(f"peer{number}") for number in range(50)]
    packed = pack_news(many, [], small)
    assert len(packed) < small.exchange_bytes
    assert 0 < len(unpack_news(packed, small).announcements) < 50
    with pytest.raises(RemoteProtocolError, match="at most"):
        unpack_news(bytes(small.exchange_bytes + 1), small)
