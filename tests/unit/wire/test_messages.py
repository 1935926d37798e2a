"""Messages: declared fields arrive, and all else is a RemoteProtocolError that names the place."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any, TypeAlias

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import LinkPolicy
from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.wire import messages as messages_module
from llmnode.wire import version_1
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import (
    Description,
    ForkRequest,
    Lease,
    Leased,
    Neighbours,
    Opened,
    OpenRequest,
    Pass,
    Passed,
    Pushed,
    Refusal,
    RefusalCode,
    Replay,
    Replayed,
    Result,
    Resumed,
    check_empty,
    pack,
    unpack,
)

Kind: TypeAlias = Any  # one of KINDS: the union of their types says no more
Value: TypeAlias = Any  # anything that msgpack can carry

MOST = 2**32 - 1
LONGEST_REASON = 250
"""The most characters of an error, whatever the peer sent, since errors go into our log."""


@dataclass(frozen=True)
class Rule:
    """The values of one field, written down a second time. `edges` are allowed, `wrong` is not."""

    allowed: st.SearchStrategy[Value]
    edges: list[Value]
    wrong: list[Value] = field(default_factory=list)
    is_optional: bool = False


NO_SCALAR: list[Value] = [None, [], [1], {}, {"a": 1}, [[[]]]]
NO_INT: list[Value] = [True, False, 1.0, math.nan, math.inf, "1", b"1", "", *NO_SCALAR]
NO_TEXT: list[Value] = [b"name", b"", 1, True, 1.0, *NO_SCALAR]
NO_BYTES: list[Value] = ["x" * 32, 32, True, 32.0, [0] * 32, *NO_SCALAR]


def number(low: int, high: int) -> Rule:
    return Rule(st.integers(low, high), [low, high], [low - 1, high + 1, -(2**63), 2**64 - 1, *NO_INT])


def text(low: int, high: int) -> Rule:
    wrong = ["x" * (high + 1), "x" * 50_000, *NO_TEXT]
    edges = ["x" * low, "x" * high, "\N{GRINNING FACE}" * high]
    return Rule(st.text(min_size=low, max_size=min(high, 300)), edges, wrong + [""] * (low > 0))


def octets(low: int, high: int) -> Rule:
    wrong = [bytes(high + 1), bytes(50_000), *NO_BYTES]
    short = [b"", bytes(low - 1)] if low else []
    return Rule(st.binary(min_size=low, max_size=high), [bytes(low), b"\xff" * high], wrong + short)


U32 = number(0, MOST)
COUNT = number(1, MOST)
MICROSECONDS = number(0, 2**48)
TOTAL = number(0, 2**63 - 1)
DIGEST, SESSION, SIGNATURE = octets(32, 32), octets(16, 16), octets(64, 64)
FLAG = Rule(st.booleans(), [False, True], [0, 1, 2, "true", b"\x01", 1.0, *NO_SCALAR])
NAME = text(1, 200)
LENGTHS = Rule(
    st.lists(st.integers(1, MOST), min_size=1, max_size=32),
    [[1], [MOST] * 32],
    [[], [0], [MOST + 1], [1] * 33, [1.0], [True], ["1"], [None], [[1]], 1, "1", b"1", None, {"a": 1}, True],
)
OPTIONAL_DIGEST = replace(DIGEST, is_optional=True)
DEEP: Value = [[[[1]]]]
EXTENSIONS = Rule(
    st.dictionaries(st.text(min_size=1, max_size=64), st.integers(0, 9) | st.just(DEEP), max_size=16),
    [{}, {"x" * 64: DEEP}, {f"name {number}": b"value" for number in range(16)}],
    [
        *({f"name {number}": 1 for number in range(size)} for size in (17, 40)),
        *({name: 1} for name in ("", "x" * 65, b"name")),
        *({"name": value} for value in ([DEEP], {"a": DEEP}, [[1], {"a": {"a": {"a": [1]}}}])),
        *(value for value in NO_SCALAR if not isinstance(value, dict)),
    ],
    is_optional=True,
)
REQUIRED_NAMES = Rule(
    st.just([]),
    [[]],
    [[""], ["x" * 65], [b"name"], [1], [["name"]], ["name"] * 17, "name", {"name": 1}, 1, True, None],
    is_optional=True,
)

KINDS: dict[Kind, dict[str, Rule]] = {
    Description: {
        "software": NAME,
        "model": NAME,
        "model_digest": DIGEST,
        "blocks": COUNT,
        "hidden_size": COUNT,
        "context_tokens": COUNT,
        "dtype": NAME,
        "span_start": U32,
        "span_end": COUNT,
        "kv_tokens_free": U32,
        "sessions": U32,
        "steps": TOTAL,
        "steps_given_directly": TOTAL,
        "results_pushed": TOTAL,
        "positions": TOTAL,
        "busy_us": TOTAL,
        "sent_bytes": TOTAL,
        "sent_plain_bytes": TOTAL,
        "received_bytes": TOTAL,
        "received_plain_bytes": TOTAL,
        "adapter": OPTIONAL_DIGEST,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    OpenRequest: {
        "model_digest": DIGEST,
        "span_start": U32,
        "span_end": COUNT,
        "max_length": COUNT,
        "dtype": NAME,
        "codec": NAME,
        "priority": NAME,
        "keep_outputs": FLAG,
        "adapter": OPTIONAL_DIGEST,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    Result: {
        "queue_us": MICROSECONDS,
        "compute_us": MICROSECONDS,
        "input_digest": DIGEST,
        "output_digest": DIGEST,
        "signature": SIGNATURE,
        "pushed": FLAG,
        "shown_input": octets(0, 32),
        "shown_signature": octets(0, 64),
    },
    Pass: {
        "model_digest": DIGEST,
        "span_start": U32,
        "span_end": COUNT,
        "dtype": NAME,
        "codec": NAME,
        "priority": NAME,
        "lengths": LENGTHS,
        "adapter": OPTIONAL_DIGEST,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    Passed: {"queue_us": MICROSECONDS, "compute_us": MICROSECONDS},
    Pushed: {"input_digest": DIGEST, "signature": SIGNATURE},
    Replay: {"push": FLAG},
    Replayed: {"output_digest": DIGEST, "pushed": FLAG},
    Lease: {"lease_ms": U32, "leaves": FLAG},
    Leased: {"lease_ms": U32},
    Opened: {"nonce": octets(16, 16)},
    Resumed: {"epoch": U32, "position": U32},
    Neighbours: {
        "sender": text(0, 200),
        "receiver": text(0, 200),
        "receiver_session": SESSION,
        "quiet": FLAG,
        "again": FLAG,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    ForkRequest: {"source": SESSION, "shared": U32},
    Refusal: {"code": NAME, "message": text(0, 2000), "retry_after_ms": U32},
}
FIELDS = [(kind, name) for kind, rules in KINDS.items() for name in rules]
VALID: dict[Kind, dict[str, Value]] = {
    kind: {name: rule.edges[0] for name, rule in rules.items()} for kind, rules in KINDS.items()
}

REQUIRED = [(kind, name) for kind, name in FIELDS if not KINDS[kind][name].is_optional]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_field = pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS]
)
every_required_field = pytest.mark.parametrize(
    ("kind", "name"), REQUIRED, ids=[f"{kind.__name__}.{name}" for kind, name in REQUIRED]
)

messages = st.one_of(
    [st.builds(kind, **{name: rule.allowed for name, rule in rules.items()}) for kind, rules in KINDS.items()]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
)
names = st.sampled_from(sorted({name for _, name in FIELDS}))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | scalars, inner, max_size=4),
    max_leaves=8,
)


def refused(kind: Kind, meta: bytes) -> str:
    """The reason why `meta` is not a `kind`."""
    with pytest.raises(RemoteProtocolError) as caught:
        unpack(kind, meta)
    assert caught.value.message.startswith(kind.__name__)
    assert len(caught.value.message) <= LONGEST_REASON
    return caught.value.message


def unpack_or_refuse(kind: Kind, meta: bytes) -> None:
    """Any `meta` is either a message that means the same when it is sent on, or the one short error."""
    try:
        message = unpack(kind, meta)
    except RemoteProtocolError as error:
        reason = error.message
    except PeerRefused as refusal:
        reason = f"{kind.__name__} {refusal.code}"
    else:
        assert unpack(kind, pack(message)) == message
        return
    assert reason.startswith(kind.__name__)
    assert len(reason) <= LONGEST_REASON


def test_there_is_a_rule_for_every_field() -> None:
    assert {kind: list(rules) for kind, rules in KINDS.items()} == {
        kind: [field.name for field in fields_of(kind)] for kind in KINDS
    }


@given(messages)
def test_a_message_arrives_as_it_was_sent(message: Kind) -> None:
    assert unpack(type(message), pack(message)) == message


@given(messages)
def test_a_message_is_read_from_any_kind_of_bytes(message: Kind) -> None:
    packed = pack(message)
    for buffer in (bytearray(packed), memoryview(packed), memoryview(bytearray(b"x" + packed))[1:]):
        assert unpack(type(message), buffer) == message


@every_field
def test_the_first_and_the_last_allowed_value_of_a_field_arrive(kind: Kind, name: str) -> None:
    for value in KINDS[kind][name].edges:
        assert getattr(unpack(kind, msgpack.packb({**VALID[kind], name: value})), name) == value


@every_field
def test_a_wrong_value_is_refused_by_the_name_of_its_field(kind: Kind, name: str) -> None:
    for value in KINDS[kind][name].wrong:
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            continue  # more than msgpack can carry
        assert refused(kind, msgpack.packb({**VALID[kind], name: value})).startswith(f"{kind.__name__}.{name}: ")


@every_required_field
def test_a_missing_field_is_named(kind: Kind, name: str) -> None:
    rest = {other: value for other, value in VALID[kind].items() if other != name}
    assert refused(kind, msgpack.packb(rest)) == f"{kind.__name__}.{name}: missing"


@every_required_field
def test_a_field_that_is_called_by_its_bytes_is_missing(kind: Kind, name: str) -> None:
    renamed: dict[Value, Value] = dict(VALID[kind])
    renamed[name.encode()] = renamed.pop(name)
    assert refused(kind, msgpack.packb(renamed)) == f"{kind.__name__}.{name}: missing"


@every_kind
@pytest.mark.parametrize("extra", ["surplus", "Queue_us", "", b"bytes", b"queue_us"], ids=repr)
def test_an_unknown_field_is_named(kind: Kind, extra: str | bytes) -> None:
    assert refused(kind, msgpack.packb(VALID[kind] | {extra: 1})) == f"{kind.__name__}: unknown fields {[extra]}"


@every_kind
@pytest.mark.parametrize("extras", [{"x" * 50_000: 1}, {f"field {n}": 1 for n in range(12)}], ids=["long", "many"])
def test_unknown_fields_make_no_long_error(kind: Kind, extras: dict[str, int]) -> None:
    assert "unknown fields" in refused(kind, msgpack.packb({**VALID[kind], **extras}))


@pytest.mark.parametrize(("kind", "name"), sorted(set(FIELDS) - set(REQUIRED), key=str))
def test_an_optional_field_without_a_value_is_left_out(kind: Kind, name: str) -> None:
    message = kind(**{**VALID[kind], name: None})
    assert name not in msgpack.unpackb(pack(message))
    assert unpack(kind, pack(message)) == message


@pytest.mark.parametrize("kind", messages_module.EXTENSIONS, ids=lambda kind: kind.__name__)
def test_an_extension_is_ignored_unless_it_is_required_and_the_refusal_names_it(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, unknown = {**VALID[kind], "extensions": {"known": 1}}, {**VALID[kind], "extensions": {"news": [1]}}
    assert unpack(kind, msgpack.packb(unknown)).extensions == {"news": [1]}
    for required in (["news"], ["known", "news"]):
        monkeypatch.setitem(messages_module.EXTENSIONS, kind, {"known"})  # type: ignore[misc]  # a mapping to others
        with pytest.raises(PeerRefused, match="'news'") as caught:
            unpack(kind, msgpack.packb({**unknown, "required": required}))
        assert caught.value.code == RefusalCode.UNKNOWN_EXTENSION
    assert unpack(kind, msgpack.packb({**known, "required": ["known"]})).required == ["known"]


# Peers of protocol 1

GROWN = {FrameType.DESCRIPTION: Description, FrameType.OPEN: OpenRequest, FrameType.NEIGHBOURS: Neighbours}


@pytest.mark.parametrize("kind", GROWN, ids=lambda kind: kind.name)
def test_a_peer_of_protocol_1_gets_messages_without_extensions_or_none(kind: FrameType) -> None:
    fields = {name: value for name, value in VALID[GROWN[kind]].items() if name not in version_1.LATER}
    plain = Frame(kind, meta=msgpack.packb(fields))
    assert not version_1.has_more(plain)
    assert version_1.without_more(plain) == plain
    optional = replace(plain, meta=msgpack.packb(fields | {"extensions": {"a": 1}, "required": []}))
    assert version_1.has_more(optional)
    assert version_1.without_more(optional) == plain
    for more in ({"extensions": {"a": 1}, "required": ["news"]}, {"required": ["news"]}):
        with pytest.raises(PeerRefused, match="the extension 'news'") as caught:
            version_1.without_more(replace(plain, meta=msgpack.packb(fields | more)))
        assert caught.value.code == RefusalCode.UNKNOWN_EXTENSION
    with pytest.raises(PeerRefused, match="adapter"):
        version_1.without_more(replace(plain, meta=msgpack.packb(fields | {"adapter": bytes(32)})))


def test_every_field_that_came_after_protocol_1_is_known_as_such() -> None:
    """A field that is added to a message must be left out for such peers, or be an extension."""
    grown = {kind for kind in KINDS if any(rule.is_optional for rule in KINDS[kind].values())}
    assert grown == set(messages_module.EXTENSIONS) == {*GROWN.values(), Pass}, "Pass came with its frames"
    assert set(GROWN) == version_1.GROWN
    for kind in GROWN.values():
        assert {name for name, rule in KINDS[kind].items() if rule.is_optional} <= version_1.LATER
        assert not version_1.LATER.intersection(name for name, rule in KINDS[kind].items() if not rule.is_optional)


@pytest.mark.parametrize("kind", version_1.NEW)
def test_a_peer_of_protocol_1_is_not_asked_for_what_it_does_not_know(kind: FrameType) -> None:
    assert version_1.has_more(Frame(kind))
    with pytest.raises(PeerRefused, match="needs an update") as refused:
        version_1.without_more(Frame(kind))
    assert refused.value.code == RefusalCode.UNKNOWN_FRAME


@every_field
def test_a_field_that_comes_twice_is_refused_even_with_the_same_value(kind: Kind, name: str) -> None:
    pairs = [*VALID[kind].items(), (name, VALID[kind][name])]
    twice = b"\xde" + len(pairs).to_bytes(2) + b"".join(msgpack.packb(part) for pair in pairs for part in pair)
    assert "a field comes twice" in refused(kind, twice)


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
    meta = (b"\x84\xa8queue_us" + level * 1000).ljust(LinkPolicy().max_meta_bytes, b"\x00")
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack(Result, meta)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20


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


@pytest.mark.parametrize("code", RefusalCode)
def test_every_code_can_be_said_in_a_refusal(code: RefusalCode) -> None:
    assert unpack(Refusal, pack(Refusal(code, "no", 0))).code == code


def test_frames_without_metadata_carry_none() -> None:
    check_empty(b"", "CLOSE")
    check_empty(memoryview(b""), "CLOSE")
    with pytest.raises(RemoteProtocolError, match="CLOSE carries 1 unexpected bytes"):
        check_empty(memoryview(b"\x80"), "CLOSE")
