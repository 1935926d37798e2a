"""Bytes that are no message: whatever comes is a message that means the same when it is sent on, or one short error."""

from __future__ import annotations

import math
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import LinkPolicy
from llmnode.errors import RemoteProtocolError
from llmnode.wire.fields import MOST_MAP_BYTES
from llmnode.wire.messages import OpenRequest, Refusal, Result, pack, unpack
from unit.message_rules import (
    FIELDS,
    KINDS,
    MOST,
    VALID,
    Kind,
    Value,
    every_kind,
    messages,
    refused,
    unpack_or_refuse,
    values,
)


@every_kind
@pytest.mark.parametrize("value", [None, 1, "text", [], [1, 2], ["queue_us", "compute_us"], [{}], True, math.nan])
def test_what_is_no_map_of_fields_is_refused(kind: Kind, value: Value) -> None:
    assert refused(kind, msgpack.packb(value)).endswith("is no map of fields")


@every_kind
def test_a_message_cut_short_or_followed_by_more_is_refused(kind: Kind) -> None:
    packed = msgpack.packb(VALID[kind])
    for meta in [*(packed[:cut] for cut in range(len(packed))), packed + b"\x00", packed + packed]:
        assert "not msgpack (" in refused(kind, meta)


def in_a_field(value: bytes) -> bytes:
    """A Result whose first field is these raw bytes."""
    rest = {name: value for name, value in VALID[Result].items() if name != "queue_us"}
    return b"\x84\xa8queue_us" + value + msgpack.packb(rest)[1:]


LONG_CODES = {"text": b"\xdb", "blob": b"\xc6", "list": b"\xdd", "map": b"\xdf", "extension": b"\xc9"}
HOSTILE = {
    "nothing": b"",
    "the byte that msgpack never uses": b"\xc1",
    "text that is not UTF-8": in_a_field(b"\xa2\xff\xfe"),
    "text with half a surrogate": in_a_field(b"\xa3\xed\xa0\x80"),
    "a field name that is not UTF-8": b"\x81\xa2\xff\xfe\x00",
    "a signalling NaN": in_a_field(b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x01"),
    "a NaN in single precision": in_a_field(b"\xca\x7f\xc0\x00\x00"),
    "an empty extension": in_a_field(b"\xc7\x00\x05"),
    "a full extension": in_a_field(b"\xd8\x05" + bytes(16)),
    "an empty timestamp": in_a_field(b"\xc7\x00\xff"),
    "a timestamp": in_a_field(b"\xd6\xff" + bytes(4)),
    "a timestamp past the end of time": in_a_field(b"\xd7\xff" + b"\xff" * 8),
    "a number as field name": b"\x81\x01\x02",
    "a list as field name": b"\x81\x91\x01\x02",
    "a map as field name": b"\x81\x81\xa1a\x01\x02",
    "an extension as field name": b"\x81\xc7\x00\x05\x02",
    "a NaN as field name": b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x02",
    "a field twice, deep down": in_a_field(b"\x82\xa1a\x00\xa1a\x00"),
    **{
        f"{what} of {size} that does not come": in_a_field(code + size.to_bytes(4, "big"))
        for what, code in LONG_CODES.items()
        for size in (1000, 60_000, 2**31, MOST)
    },
}


@every_kind
@pytest.mark.parametrize("meta", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused(kind: Kind, meta: bytes) -> None:
    refused(kind, meta)


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\x92\x00"], ids=bytes.hex)
@pytest.mark.parametrize("depth", [2, 100, 500, 900, 990, 1000, 1010, 1020, 1023, 1024, 1025, 5000])
def test_nesting_of_any_depth_is_refused(level: bytes, depth: int) -> None:
    for meta in (level * depth + b"\x00", in_a_field(level * depth + b"\x00"), level * depth):
        refused(Result, meta)


@pytest.mark.parametrize("code", [b"\xdd", b"\xdf"], ids=["lists", "maps"])
@pytest.mark.parametrize("size", [48, 49, 1000, 30_000, 60_000])
def test_lengths_that_are_declared_and_never_come_take_no_memory(code: bytes, size: int) -> None:
    level = code + size.to_bytes(4, "big") + (b"\xa1a" if code == b"\xdf" else b"")
    meta = (b"\x84\xa8queue_us" + level * 1000)[:MOST_MAP_BYTES].ljust(MOST_MAP_BYTES, b"\x00")
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack(Result, meta)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20


def test_no_extension_is_made_of_more_objects_than_it_may_have() -> None:
    """Nobody here knows this one, so it would be read and ignored: 60,000 empty maps take a tenth of a second."""
    lists = [[[{}] * 48] * 48] * 26
    assert len(msgpack.packb(lists)) < LinkPolicy().max_meta_bytes - 1000
    with pytest.raises(RemoteProtocolError, match=f"bytes of fields, at most {MOST_MAP_BYTES} allowed"):
        unpack(OpenRequest, msgpack.packb({**VALID[OpenRequest], "extensions": {"x": lists}}))
    assert len(pack(Refusal(code="\U0001f600" * 200, message="\U0001f600" * 2000, retry_after_ms=0))) < MOST_MAP_BYTES


@given(st.sampled_from(list(KINDS)), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_the_one_error(kind: Kind, meta: bytes) -> None:
    unpack_or_refuse(kind, meta)


@given(st.sampled_from(list(KINDS)), values)
def test_any_msgpack_is_a_message_or_the_one_error(kind: Kind, value: Value) -> None:
    unpack_or_refuse(kind, msgpack.packb(value))


@given(st.sampled_from(FIELDS), values)
def test_any_value_of_a_field_is_a_message_or_the_one_error(field: tuple[Kind, str], value: Value) -> None:
    kind, name = field
    unpack_or_refuse(kind, msgpack.packb({**VALID[kind], name: value}))


@given(messages, st.data())
def test_a_message_overwritten_somewhere_is_a_message_or_the_one_error(message: Kind, data: st.DataObject) -> None:
    packed = bytearray(pack(message))
    at = data.draw(st.integers(0, len(packed) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=8))
    packed[at : at + len(noise)] = noise
    unpack_or_refuse(type(message), bytes(packed))
