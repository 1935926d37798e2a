"""Announcements as bytes: round trips, and whatever else may come under their name."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.adapters import MOST_ADAPTERS, MOST_RANK, AnnouncedAdapter
from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.ids import AdapterId, PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.speed import AnnouncedSpeed
from llmnode.core.view import online, online_or_draining
from llmnode.errors import RemoteProtocolError
from llmnode.wire import version_1
from llmnode.wire.announcement import (
    form_in_version_1,
    is_form_signed,
    is_signed_by_peer,
    pack_news,
    pack_sequences,
    sign_announcement,
    unpack_announcement,
)
from llmnode.wire.messages import AnnouncementBody
from unit.calls import calls_counted
from unit.grown import sign_grown
from unit.wire.whole_payloads import unpack_news, unpack_sequences

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
    return sign_announcement(announcement, lambda _body: b"s" * 64)


def test_measured_speeds_are_read_by_those_who_know_them_and_cost_older_peers_nothing() -> None:
    speed = AnnouncedSpeed(1500, 20, 30_000, ((PeerId("near"), 900), (PeerId("far"), 90_000)))
    measured = signed(offer=replace(OFFER, speed=speed))
    assert measured.announcement.offer.speed == speed
    form = form_in_version_1(measured)
    assert form is not None
    old = msgpack.unpackb(form.body)
    assert set(old) == set(version_1.ANNOUNCED)
    assert not {"tokens_per_1000_s", "round_trips_us"} & set(msgpack.unpackb(signed().signed.body)), "not measured"


@pytest.mark.parametrize(
    "round_trips_us",
    [{f"peer{number}": 1 for number in range(17)}, {"p" * 101: 1}, {"peer": -1}, {"peer": 2**32}, {"peer": True}, [1]],
)
def test_round_trips_beyond_their_bounds_are_refused(round_trips_us: object) -> None:
    body = msgpack.packb(msgpack.unpackb(signed().signed.body) | {"round_trips_us": round_trips_us})
    with pytest.raises(RemoteProtocolError, match="round_trips_us"):
        unpack_announcement(body, b"s" * 64)


def test_where_a_peer_moves_to_is_announced_and_must_be_in_its_model() -> None:
    moving = signed("one", offer=replace(OFFER, moves_to=Span(7, 11)))
    assert unpack_announcement(moving.signed.body, moving.signed.signature).announcement.offer.moves_to == Span(7, 11)
    body = msgpack.unpackb(moving.signed.body)
    for start, end in ((11, 11), (7, 31), (11, 7)):
        false = msgpack.packb({**body, "next_start": start, "next_end": end})
        with pytest.raises(RemoteProtocolError, match="moves to a span that its model does not have"):
            unpack_announcement(false, moving.signed.signature)
    half = msgpack.packb({name: value for name, value in body.items() if name != "next_end"})
    assert unpack_announcement(half, moving.signed.signature).announcement.offer.moves_to is None


def test_what_is_packed_is_unpacked() -> None:
    one, other = signed("one"), signed("other", offer=replace(OFFER, state=PeerState.JOINING, block_us=0))
    assert unpack_announcement(one.signed.body, one.signed.signature) == one
    news = unpack_news(pack_news([one.signed, other.signed], [PeerId("third")], POLICY), POLICY)
    assert list(news.read()) == [one, other]
    assert list(news.wanted) == ["third"]
    assert unpack_sequences(pack_sequences({PeerId("one"): 7}), POLICY) == {"one": 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span_end": 31}, "span that its model does not have"),
        ({"span_start": 7}, "span that its model does not have"),
        ({"blocks": 1025}, "1025 blocks, and no model has more than 1024"),
        ({"blocks": 2**32 - 1, "span_start": 0, "span_end": 2**32 - 1}, "no model has more than 1024"),
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
        *(
            ({"adapters": value}, "adapters")
            for value in (
                [],
                [["name", b"d" * 32, 8]] * 9,
                [["", b"d" * 32, 8]],
                [["a/b", b"d" * 32, 8]],
                [["\x1b[2J", b"d" * 32, 8]],
                [["x" * 65, b"d" * 32, 8]],
                [["name", b"d" * 31, 8]],
                [["name", "d" * 32, 8]],
                [["name", b"d" * 32, 0]],
                [["name", b"d" * 32, MOST_RANK + 1]],
                [["name", b"d" * 32, True]],
                [["name", b"d" * 32]],
                [["name", b"d" * 32, 8, 1]],
                [b"name"],
                {"name": 1},
                "name",
                None,
            )
        ),
    ],
    ids=str,
)
def test_an_announcement_of_something_impossible_is_refused(changes: dict[str, object], message: str) -> None:
    fields = msgpack.unpackb(signed().signed.body) | changes
    with pytest.raises(RemoteProtocolError, match=message):
        unpack_announcement(msgpack.packb(fields), b"s" * 64)


ADAPTERS = tuple(AnnouncedAdapter(f"{number}" * 64, AdapterId(bytes([number] * 32)), MOST_RANK) for number in range(8))


def test_adapters_are_announced_within_the_limit_of_an_announcement_and_left_out_for_protocol_1() -> None:
    assert len(ADAPTERS) == MOST_ADAPTERS
    addresses = tuple(f"/dns/{'x' * 100}/tcp/65535/p2p/p2p-circuit/p2p/{'y' * 52}/p2p/peer" for _ in range(8))
    offer = replace(OFFER, model="m" * 100, adapters=ADAPTERS)
    announcement = Announcement(PeerId("peer"), addresses, NOW_MS, NOW_MS + 45_000, "llmnode/1", offer)
    one = sign_announcement(announcement, lambda _body: b"s" * 64)
    assert one.announcement == announcement
    assert len(one.signed.body) < POLICY.announcement_bytes
    assert unpack_announcement(one.signed.body, one.signed.signature) == one
    form = form_in_version_1(one)
    assert form is not None and "adapters" not in msgpack.unpackb(form.body)
    assert "adapters" not in msgpack.unpackb(signed().signed.body)


def test_a_unit_of_kv_is_announced_and_is_one_position_where_nothing_is_said() -> None:
    one = signed(offer=replace(OFFER, kv_page=256))
    assert unpack_announcement(one.signed.body, one.signed.signature).announcement.offer.in_pages(257) == 512
    assert signed().announcement.offer.in_pages(257) == 257
    assert "kv_page" not in msgpack.unpackb(signed().signed.body)
    form = form_in_version_1(one)
    assert form is not None and "kv_page" not in msgpack.unpackb(form.body)
    body = msgpack.packb({**msgpack.unpackb(one.signed.body), "kv_page": 0})
    with pytest.raises(RemoteProtocolError, match="kv_page"):
        unpack_announcement(body, b"s" * 64)


@pytest.mark.parametrize("load", [0.0, 0.25, 17.0])
def test_a_load_is_announced_and_is_unknown_where_nothing_is_said(load: float) -> None:
    one = signed(offer=replace(OFFER, load=load))
    assert unpack_announcement(one.signed.body, one.signed.signature).announcement.offer.load == load
    assert signed().announcement.offer.load is None
    body = msgpack.packb({**msgpack.unpackb(one.signed.body), "load_percent": -1})
    with pytest.raises(RemoteProtocolError, match="load_percent"):
        unpack_announcement(body, b"s" * 64)


def test_a_server_announces_that_it_moves_to_no_other_blocks() -> None:
    one = signed(offer=replace(OFFER, stays=True))
    assert unpack_announcement(one.signed.body, one.signed.signature).announcement.offer.stays
    assert not signed().announcement.offer.stays and "stays" not in msgpack.unpackb(signed().signed.body)
    for wrong in (0, -1, "1", True):
        body = msgpack.packb({**msgpack.unpackb(one.signed.body), "stays": wrong})
        with pytest.raises(RemoteProtocolError, match="stays"):
            unpack_announcement(body, b"s" * 64)


more = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)


KNOWN = {each.name for each in fields(AnnouncementBody)}
"""Hypothesis takes words from the source, and may find the names of optional fields."""
names = st.text(min_size=1, max_size=64).filter(lambda name: name not in KNOWN)


@given(st.dictionaries(names, more, max_size=9), st.randoms())
def test_fields_of_a_newer_node_are_ignored_wherever_they_stand_and_passed_on(
    added: dict[str, object], rng: object
) -> None:
    """A field that is nested too deep is the one exception; then the announcement is skipped."""
    one = signed()
    items = list(({**added, **msgpack.unpackb(one.signed.body)}).items())
    rng.shuffle(items)  # type: ignore[attr-defined]  # a random.Random
    grown = replace(one.signed, body=msgpack.packb(dict(items)))
    news = unpack_news(pack_news([grown], [], POLICY), POLICY)
    (read,) = news.read()
    if isinstance(read, RemoteProtocolError):
        assert "nested" in read.message
    else:
        assert (read.announcement, read.signed) == (one.announcement, grown)


def test_a_state_of_a_newer_node_is_unknown_and_neither_online_nor_serving() -> None:
    body = msgpack.packb(msgpack.unpackb(signed().signed.body) | {"state": "asleep"})
    read = unpack_announcement(body, b"s" * 64)
    assert (read.announcement.offer.state, read.signed.body) == (PeerState.UNKNOWN, body)
    assert form_in_version_1(read) is None, "peers of protocol 1 cannot read it"
    assert [*online([read.announcement]), *online_or_draining([read.announcement])] == []


def test_an_announcement_that_cannot_be_read_is_skipped_and_the_others_stand() -> None:
    one, other = signed("one"), signed("other")
    bad = [replace(one.signed, body=body) for body in (b"", b"\x80", msgpack.packb(7), one.signed.body[:-1])]
    news = unpack_news(pack_news([one.signed, *bad, other.signed], [PeerId("third")], POLICY), POLICY)
    first, *unread, last = news.read()
    assert (first, last) == (one, other)
    assert [type(each) for each in unread] == [RemoteProtocolError] * len(bad)
    assert list(news.wanted) == ["third"]


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
    news = bytearray(pack_news([signed().signed], [], POLICY))
    place %= len(news)
    news[place] = value
    with contextlib.suppress(RemoteProtocolError):
        list(unpack_news(news, POLICY).read())


@pytest.mark.parametrize("payload", [[], [[]], [[], {}], [{}, []], [[[b"", b""]], []], [[["a", "b"]], []], [[], [7]]])
def test_news_of_another_shape_is_refused(payload: object) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_news(msgpack.packb(payload), POLICY)


@pytest.mark.parametrize("many", [b"\xc0", b"\x90", b"\x92\xc0\x90"], ids=["nil", "lists", "pairs"])
def test_no_payload_is_made_into_more_objects_than_it_may_have(many: bytes) -> None:
    """Four million empty values fit in one frame, wherever an entry, a peer or a number may stand."""
    most, length = POLICY.exchange_bytes - 100, POLICY.announcement_bytes
    large = b"\xdd" + (most // len(many)).to_bytes(4, "big") + many * (most // len(many))
    deep = b"\x91" * (length * 2) + b"\xc0"
    for entry in (large, deep):
        for news in (
            b"\x92\x91" + entry + b"\x90",
            b"\x92\x91\x92" + entry + b"\xc4\x00\x90",
            b"\x92\x90\x91" + entry,
        ):
            with calls_counted() as calls, pytest.raises(RemoteProtocolError):
                unpack_news(news, POLICY)
            assert calls[0] < 100
        with pytest.raises(RemoteProtocolError):
            unpack_sequences(b"\x81\xa1x" + entry, POLICY)
    lists = b"\xdd" + (most // len(many)).to_bytes(4, "big") + many * (most // len(many))
    with pytest.raises(RemoteProtocolError):
        unpack_news(b"\x92" + lists + b"\x90", POLICY)


def test_no_value_of_a_view_is_made_into_objects_unless_it_is_as_small_as_a_number() -> None:
    """Maps within the map may have two million entries in one frame."""
    places = 2 * POLICY.view_peers
    inner = b"\xdf" + places.to_bytes(4, "big") + b"\xa0\xc0" * places
    outer = POLICY.exchange_bytes // (len(inner) + 2)
    maps = b"\xdf" + outer.to_bytes(4, "big") + b"".join(b"\xa1%c" % (97 + each % 26) + inner for each in range(outer))
    with pytest.raises(RemoteProtocolError, match="an entry of more than 9 bytes"):
        unpack_sequences(maps, POLICY)
    largest = {PeerId("p" * 100): 2**64 - 1, PeerId("q"): 0}
    assert unpack_sequences(pack_sequences(largest), POLICY) == largest


def test_more_news_than_a_frame_may_hold_is_cut() -> None:
    small = replace(POLICY, exchange_bytes=2 * 3 * 600)
    many = [signed(f"peer{number}").signed for number in range(50)]
    packed = pack_news(many, [], small)
    assert len(packed) < small.exchange_bytes
    assert 0 < len(unpack_news(packed, small).pairs) < 50
    with pytest.raises(RemoteProtocolError, match="at most"):
        unpack_news(bytes(small.exchange_bytes + 1), small)


# Peers of protocol 1

ANNOUNCED_1 = set(msgpack.unpackb(signed().signed.body))
"""The fields that such peers read, all of them, and no other."""


def test_an_announcement_without_new_fields_is_one_body_for_all_peers() -> None:
    assert form_in_version_1(signed()) == signed().signed
    assert set(version_1.ANNOUNCED) == ANNOUNCED_1


def test_an_announcement_with_a_new_field_has_a_second_body_that_is_one_older_and_signed_too() -> None:
    messages: list[bytes] = []

    def sign(message: bytes) -> bytes:
        messages.append(message)
        return bytes([len(messages)]) * 64

    grown = sign_grown(signed().announcement, sign)
    form = form_in_version_1(grown)
    assert form is not None
    old = unpack_announcement(form.body, form.signature)
    made = grown.announcement
    assert old.announcement == replace(made, sequence=made.sequence - 1, expires_ms=made.expires_ms - 1)
    assert set(msgpack.unpackb(form.body)) == ANNOUNCED_1
    read = unpack_announcement(grown.signed.body, grown.signed.signature)
    assert read == grown

    signatures = {bytes([number]) * 64: message for number, message in enumerate(messages, 1)}

    def verify(_peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signatures.get(signature) == message

    assert is_signed_by_peer(read, verify) and is_form_signed(made.peer, form, verify)
    assert not is_signed_by_peer(read, lambda *_: False)
    del signatures[form.signature]
    assert is_signed_by_peer(read, verify) and not is_form_signed(made.peer, form, verify)


def test_a_field_that_is_added_to_announcements_gives_them_a_second_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_1, "ANNOUNCED", tuple(name for name in version_1.ANNOUNCED if name != "kv_tokens_free"))
    one = signed()
    form = form_in_version_1(one)
    assert form is not None
    assert "signature_1" in msgpack.unpackb(one.signed.body)
    assert set(msgpack.unpackb(form.body)) == ANNOUNCED_1 - {"kv_tokens_free"}
