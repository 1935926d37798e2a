"""Messages: declared fields arrive, and all else is a RemoteProtocolError that names the place."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given

from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.wire import messages as messages_module
from llmnode.wire import version_1
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, Neighbours, OpenRequest, Refusal, RefusalCode, check_empty, pack, unpack
from llmnode.wire.pass_messages import Pass
from unit.message_rules import (
    FIELDS,
    KINDS,
    REQUIRED,
    VALID,
    Kind,
    Value,
    every_field,
    every_kind,
    every_required_field,
    messages,
    refused,
)


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
@pytest.mark.parametrize("extras", [{"x" * 15_000: 1}, {f"field {n}": 1 for n in range(12)}], ids=["long", "many"])
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


@pytest.mark.parametrize("code", RefusalCode)
def test_every_code_can_be_said_in_a_refusal(code: RefusalCode) -> None:
    assert unpack(Refusal, pack(Refusal(code, "no", 0))).code == code


def test_frames_without_metadata_carry_none() -> None:
    check_empty(Frame(FrameType.CLOSE))
    check_empty(Frame(FrameType.CLOSE, meta=memoryview(b"")))
    with pytest.raises(RemoteProtocolError, match="CLOSE carries 1 unexpected bytes"):
        check_empty(Frame(FrameType.CLOSE, meta=memoryview(b"\x80")))
