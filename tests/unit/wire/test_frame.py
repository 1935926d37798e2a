"""Frames on a byte stream: what is sent arrives, and nothing else does."""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import fields, replace
from itertools import pairwise
from struct import pack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode import _native
from llmnode.core.ids import NO_SESSION, Epoch, SessionId, Step
from llmnode.core.links.write_size import LEAST_BYTES
from llmnode.core.policy import LinkPolicy
from llmnode.errors import LocalProtocolError, RemoteProtocolError
from llmnode.wire.frame import HEADER_BYTES, Frame, FrameDecoder, FrameType, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

POLICY = LinkPolicy(max_meta_bytes=48, max_payload_bytes=200)
LONGEST_FRAME = HEADER_BYTES + POLICY.max_meta_bytes + POLICY.max_payload_bytes
MOST = 2**32 - 1

u32 = st.integers(0, MOST)
WHOLE = [kind for kind in FrameType if kind is not FrameType.PIECE]
UNKNOWN = [FrameType(number) for number in range(128) if number not in set(FrameType)]
frames = st.builds(
    Frame,
    st.sampled_from([*WHOLE, *UNKNOWN]),
    st.binary(min_size=16, max_size=16).map(SessionId),
    u32.map(Epoch),
    u32.map(Step),
    u32,
    u32,
    st.binary(max_size=POLICY.max_meta_bytes),
    st.binary(max_size=POLICY.max_payload_bytes),
)
LARGE, SMALL = SessionId(b"L" * 16), SessionId(b"S" * 16)
FRAME = Frame(FrameType.STEP, SessionId(bytes(range(16))), Epoch(1), Step(2), 3, 4, b"meta", b"some payload")


def stream_of(sent: Iterable[Frame], policy: LinkPolicy = POLICY) -> bytes:
    return b"".join(encode(frame, policy) for frame in sent)


def decoded(stream: bytes, policy: LinkPolicy = POLICY) -> list[Frame]:
    return list(FrameDecoder(policy).feed(stream))


def decoded_until_error(stream: bytes) -> tuple[list[Frame], bool]:
    """The frames that came out, and whether an error came after them."""
    received: list[Frame] = []
    try:
        for frame in FrameDecoder(POLICY).feed(stream):
            received.append(frame)
    except RemoteProtocolError:
        return received, True
    return received, False


def header_twin(magic: bytes, version: int, kind: int, meta_bytes: int, payload_bytes: int) -> bytes:
    """A header by the words of `frame.py`'s docstring, with a checksum that is right for an empty body."""
    covered = magic + bytes([version, kind]) + bytes(16) + bytes(16) + pack("<II", meta_bytes, payload_bytes)
    return covered + pack("<I", _native.crc32c(covered))


def test_the_bytes_of_a_frame_are_the_documented_ones() -> None:
    numbers = b"".join(number.to_bytes(4, "little") for number in (1, 2, 3, 4, 4, 12))
    covered = b"LN" + bytes([1, 5]) + bytes(range(16)) + numbers
    checksum = _native.crc32c(covered + b"metasome payload").to_bytes(4, "little")
    assert encode(FRAME, POLICY) == covered + checksum + b"metasome payload"
    assert len(covered + checksum) == HEADER_BYTES


def test_a_type_of_a_newer_version_has_its_number_and_a_name() -> None:
    assert len(UNKNOWN) + len(FrameType) == 128
    for kind in UNKNOWN:
        assert not kind.is_known
        assert kind.name == f"TYPE_{int(kind)}"
        assert decoded(encode(replace(FRAME, type=kind), POLICY)) == [replace(FRAME, type=kind)]
    assert all(kind.is_known for kind in FrameType)
    for number in (-1, 128, 255):
        with pytest.raises(ValueError, match=str(number)):
            FrameType(number)


def test_a_packed_frame_differs_in_one_bit_and_the_checksum_and_arrives_as_packed() -> None:
    packed = replace(FRAME, packed=True)
    plain, stream = encode(FRAME, POLICY), encode(packed, POLICY)
    differ = [at for at, (one, other) in enumerate(zip(plain, stream, strict=True)) if one != other]
    assert differ[0] == 3 and stream[3] == plain[3] | 0x80 and set(differ[1:]) <= set(range(44, HEADER_BYTES))
    assert decoded(stream) == [packed] != [FRAME]


def test_what_numbers_a_payload_is_does_not_cross_the_link() -> None:
    (arrived,) = decoded(encode(replace(FRAME, value_bytes=4), POLICY))
    assert (arrived, arrived.value_bytes) == (FRAME, 0)


def test_the_number_of_a_frame_type_never_changes() -> None:
    assert {kind.name: kind.value for kind in FrameType} == {
        "HEARTBEAT": 0,
        "DESCRIBE": 1,
        "DESCRIPTION": 2,
        "OPEN": 3,
        "OPENED": 4,
        "STEP": 5,
        "RESULT": 6,
        "TRUNCATE": 7,
        "TRUNCATED": 8,
        "CLOSE": 9,
        "REFUSAL": 10,
        "VIEW": 11,
        "NEWS": 12,
        "NEIGHBOURS": 13,
        "FORWARDED": 14,
        "REPLAY": 15,
        "REPLAYED": 16,
        "FORK": 17,
        "FORKED": 18,
        "LEASE": 20,
        "LEASED": 21,
        "RESUME": 22,
        "RESUMED": 23,
        "PIECE": 24,
        "EVALUATE": 25,
        "EVALUATED": 26,
        "BACKWARD": 27,
        "GRADIENT": 28,
        "ADAPTER": 29,
        "LACKING": 30,
        "PART": 31,
        "HELD": 32,
        "WANT": 33,
        "GRANT": 34,
        "PROBE": 35,
        "PROBED": 36,
        "DIGESTS": 37,
        "DIFFERING": 38,
        "MISSING": 39,
    }


@given(st.lists(frames, max_size=4), st.data())
def test_frames_arrive_as_they_were_sent_however_the_stream_is_chunked(sent: list[Frame], data: st.DataObject) -> None:
    stream = stream_of(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder(POLICY)
    chunks = [stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])]
    assert [frame for chunk in chunks for frame in decoder.feed(chunk)] == sent
    assert decoder.at_boundary()


@given(st.lists(frames, max_size=2))
def test_frames_arrive_a_byte_at_a_time(sent: list[Frame]) -> None:
    decoder = FrameDecoder(POLICY)
    assert [frame for byte in stream_of(sent) for frame in decoder.feed(bytes([byte]))] == sent
    assert decoder.at_boundary()


@given(frames)
def test_a_frame_has_the_size_that_it_tells(frame: Frame) -> None:
    assert frame.size_bytes == len(encode(frame, POLICY))


@pytest.mark.parametrize("of", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_can_be_sent_and_fed(of: Any) -> None:  # Any: a type that takes bytes
    stream = encode(replace(FRAME, meta=of(FRAME.meta), payload=of(FRAME.payload)), POLICY)
    assert list(FrameDecoder(POLICY).feed(of(stream))) == [FRAME]


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_a_stream_cut_short_yields_the_whole_frames_and_is_not_at_a_boundary(
    sent: list[Frame], data: st.DataObject
) -> None:
    stream = stream_of(sent)
    cut = data.draw(st.integers(0, len(stream)))
    whole = [frame for n, frame in enumerate(sent) if len(stream_of(sent[: n + 1])) <= cut]
    decoder = FrameDecoder(POLICY)
    assert list(decoder.feed(stream[:cut])) == whole
    assert decoder.at_boundary() == (cut == len(stream_of(whole)))


def test_a_frame_with_any_bit_flipped_never_arrives() -> None:
    stream = encode(FRAME, POLICY)
    for bit in range(8 * len(stream)):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        decoder = FrameDecoder(POLICY)
        try:
            assert list(decoder.feed(flipped)) == []
        except RemoteProtocolError:
            continue
        assert not decoder.at_boundary()  # the length grew: it waits for bytes that do not come


@given(frames, st.data())
def test_a_flipped_bit_is_an_error_as_soon_as_the_longest_frame_would_have_ended(
    frame: Frame, data: st.DataObject
) -> None:
    stream = bytearray(encode(frame, POLICY))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    assert decoded_until_error(bytes(stream) + bytes(LONGEST_FRAME)) == ([], True)


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_a_stream_overwritten_somewhere_yields_sent_frames_alone(sent: list[Frame], data: st.DataObject) -> None:
    stream = bytearray(stream_of(sent))
    at = data.draw(st.integers(0, len(stream) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=len(stream) - at))
    stream[at : at + len(noise)] = noise
    received, _ = decoded_until_error(bytes(stream))
    assert received == sent[: len(received)]


def test_frames_before_the_wrong_one_arrive() -> None:
    broken = bytearray(encode(FRAME, POLICY))
    broken[-1] ^= 1
    assert decoded_until_error(encode(FRAME, POLICY) + broken) == ([FRAME], True)


@given(st.binary(max_size=3 * LONGEST_FRAME))
def test_random_bytes_are_no_frame(noise: bytes) -> None:
    received, failed = decoded_until_error(noise)
    assert received == []
    assert failed or len(noise) < LONGEST_FRAME


@given(st.sampled_from(FrameType), st.binary(max_size=3 * LONGEST_FRAME))
def test_random_bytes_after_a_good_beginning_are_no_frame(kind: FrameType, noise: bytes) -> None:
    received, failed = decoded_until_error(b"LN" + bytes([1, kind]) + noise)
    assert received == []
    assert failed or len(noise) < LONGEST_FRAME


HEADERS_REFUSED = {
    "another magic": (header_twin(b"NL", 1, 0, 0, 0), "starts with b'NL'"),
    "half a magic": (header_twin(b"LX", 1, 0, 0, 0), "starts with b'LX'"),
    "a newer version": (header_twin(b"LN", 2, 0, 0, 0), "version 2, we speak 1"),
    "an older version": (header_twin(b"LN", 0, 0, 0, 0), "version 0, we speak 1"),
    "too much metadata": (header_twin(b"LN", 1, 5, 49, 0), "49 bytes of metadata, at most 48"),
    "too much payload": (header_twin(b"LN", 1, 5, 0, 201), "201 payload bytes, at most 200"),
    "all the metadata there can be": (header_twin(b"LN", 1, 5, MOST, 0), "metadata"),
    "all the payload there can be": (header_twin(b"LN", 1, 5, 0, MOST), "payload"),
    "all of both": (header_twin(b"LN", 1, 5, MOST, MOST), "metadata"),
}


def test_the_headers_refused_below_are_wrong_in_one_thing_alone() -> None:
    assert decoded(header_twin(b"LN", 1, 5, 0, 0)) == [Frame(FrameType.STEP)]


@pytest.mark.parametrize(("header", "reason"), HEADERS_REFUSED.values(), ids=HEADERS_REFUSED.keys())
def test_a_bad_header_is_refused_before_a_byte_of_the_body_arrives(header: bytes, reason: str) -> None:
    decoder = FrameDecoder(POLICY)
    assert list(decoder.feed(header[:-1])) == []
    with pytest.raises(RemoteProtocolError, match=reason):
        list(decoder.feed(header[-1:]))


LIMITS = LinkPolicy()
CLAIMS = {
    "within the limits": (LIMITS.max_meta_bytes, LIMITS.max_payload_bytes),
    "just beyond them": (0, LIMITS.max_payload_bytes + 1),
    "metadata far beyond them": (MOST, 0),
    "payload far beyond them": (0, MOST),
    "both far beyond them": (MOST, MOST),
}


@pytest.mark.parametrize(("meta_bytes", "payload_bytes"), CLAIMS.values(), ids=CLAIMS.keys())
def test_a_header_takes_no_memory_for_the_body_that_it_claims(meta_bytes: int, payload_bytes: int) -> None:
    header = header_twin(b"LN", 1, 5, meta_bytes, payload_bytes)
    decoder = FrameDecoder(LIMITS)
    tracemalloc.start()
    try:
        with contextlib.suppress(RemoteProtocolError):
            list(decoder.feed(header + b"the body's beginning"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_the_largest_allowed_frame_arrives() -> None:
    largest = replace(FRAME, meta=b"m" * POLICY.max_meta_bytes, payload=b"p" * POLICY.max_payload_bytes)
    assert decoded(encode(largest, POLICY)) == [largest]


@pytest.mark.parametrize(
    "frame",
    [
        replace(FRAME, meta=bytes(POLICY.max_meta_bytes + 1)),
        replace(FRAME, payload=bytes(POLICY.max_payload_bytes + 1)),
    ],
    ids=["meta", "payload"],
)
def test_our_own_frame_beyond_the_limits_is_our_bug(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError, match=r"STEP frame .* exceeds"):
        encode(frame, POLICY)


@pytest.mark.parametrize("name", ["epoch", "step", "start", "length"])
@pytest.mark.parametrize("value", [-1, MOST + 1, 2**64, 1.0, None, "1"], ids=repr)
def test_our_own_number_that_does_not_fit_is_our_bug(name: str, value: Any) -> None:  # Any: that is the point
    with pytest.raises(LocalProtocolError, match="STEP"):
        encode(replace(FRAME, **{name: value}), POLICY)


@pytest.mark.parametrize("session", [b"", b"short", bytes(15), bytes(17), "0123456789abcdef"], ids=repr)
def test_our_own_session_name_of_another_length_is_our_bug(session: Any) -> None:  # Any: that is the point
    with pytest.raises(LocalProtocolError, match="STEP"):
        encode(replace(FRAME, session=session), POLICY)


def test_what_is_sent_without_more_belongs_to_the_link() -> None:
    (frame,) = decoded(encode(Frame(FrameType.HEARTBEAT), POLICY))
    assert frame.session == NO_SESSION
    others = [field.name for field in fields(frame) if field.name not in ("type", "session")]
    assert not any(getattr(frame, name) for name in others)


@given(frames, frames)
def test_a_payload_is_writable_memory_of_its_own(first: Frame, second: Frame) -> None:
    chunk = bytearray(stream_of([first, second]))
    one, other = FrameDecoder(POLICY).feed(chunk)
    chunk[:] = bytes(len(chunk))
    assert [one, other] == [first, second]
    assert isinstance(one.payload, memoryview) and not one.payload.readonly
    one.payload[:] = bytes(byte ^ 0xFF for byte in one.payload)
    assert one.meta == first.meta
    assert other == second


@given(st.lists(frames, max_size=5), st.lists(frames, max_size=5), st.data())
def test_frames_in_pieces_arrive_whole_between_others(
    large: list[Frame], small: list[Frame], data: st.DataObject
) -> None:
    """Two streams in one, each in order, however the pieces are cut and mixed."""
    large, small = [replace(each, session=LARGE) for each in large], [replace(each, session=SMALL) for each in small]
    rest, sent, policy = stream_of(large), b"", replace(POLICY, piece_bytes=data.draw(st.integers(1, 200)))
    waiting = list(small)
    while rest or waiting:
        if rest and (not waiting or data.draw(st.booleans())):
            sent += encode(Frame(FrameType.PIECE, payload=rest[: policy.piece_bytes]), POLICY)
            rest = rest[policy.piece_bytes :]
        else:
            sent += encode(waiting.pop(0), POLICY)
    arrived = decoded(sent, policy)
    assert [frame for frame in arrived if frame.session == LARGE] == large
    assert [frame for frame in arrived if frame.session == SMALL] == small


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (encode(Frame(FrameType.PIECE), POLICY), "within a piece"),
        (b"x" * HEADER_BYTES, "starts with"),
        (header_twin(b"LN", 1, 5, 0, POLICY.max_payload_bytes + 1), "payload bytes"),
    ],
    ids=["a piece", "no frame", "a frame that is too large"],
)
def test_what_may_not_be_in_pieces_is_refused(payload: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        decoded(encode(Frame(FrameType.PIECE, payload=payload), POLICY))


def test_a_piece_that_is_too_large_or_packed_is_refused() -> None:
    piece = Frame(FrameType.PIECE, payload=encode(FRAME, POLICY))
    policy = replace(POLICY, piece_bytes=len(piece.payload))
    assert list(FrameDecoder(policy).feed(encode(piece, policy))) == [FRAME]
    with pytest.raises(RemoteProtocolError, match="at most"):
        list(FrameDecoder(replace(policy, piece_bytes=policy.piece_bytes - 1)).feed(encode(piece, policy)))
    with pytest.raises(RemoteProtocolError, match="packed"):
        list(FrameDecoder(policy).feed(encode(replace(piece, packed=True), policy)))


def test_only_a_frame_s_last_piece_may_be_small_and_none_is_empty() -> None:
    policy = LinkPolicy()
    large = encode(replace(FRAME, payload=bytes(LEAST_BYTES)), policy)
    first, last, small, empty = (
        encode(Frame(FrameType.PIECE, payload=each), policy)
        for each in (large[:LEAST_BYTES], large[LEAST_BYTES:], large[: LEAST_BYTES - 1], b"")
    )
    assert len(list(FrameDecoder(policy).feed(first + last))) == 1
    for refused in (small, empty, first + empty):
        with pytest.raises(RemoteProtocolError, match="a piece of"):
            list(FrameDecoder(policy).feed(refused))


def test_a_stream_that_ends_within_a_frame_in_pieces_is_cut_short() -> None:
    piece = Frame(FrameType.PIECE, payload=encode(FRAME, POLICY)[:-1])
    decoder = FrameDecoder(replace(POLICY, piece_bytes=len(piece.payload)))
    assert list(decoder.feed(encode(piece, POLICY))) == []
    assert not decoder.at_boundary()
