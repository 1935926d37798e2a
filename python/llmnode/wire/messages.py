"""The metadata of each frame type, as strict frozen dataclasses. `fields.py` has the types and bounds of their fields;
`pass_messages.py`, `adapter_messages.py`, `push_messages.py` and `probe_messages.py` have those of passes, adapters,
pushes and probes.

A message can be read only if every field is there, none is unknown, and each has its type and range: what a peer may
send is exactly what is declared here. Everything else raises RemoteProtocolError. Optional fields, extensions and
signed bodies are how messages grow all the same; `README.md` has the rules.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import msgpack

from llmnode.core.field_values import getter_of
from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.fields import (
    U32,
    Addresses,
    Count,
    Digest,
    ExtensionNames,
    Extensions,
    Flag,
    Microseconds,
    Milliseconds,
    Name,
    OptionalAdapters,
    OptionalCount,
    OptionalDigest,
    OptionalSignature,
    OptionalU32,
    PeerName,
    RoundTrips,
    SessionName,
    Signature,
    Sized,
    Text,
    Total,
    check_ignored,
    check_of,
    read_map,
)
from llmnode.wire.pass_messages import ALONE, DROPOUT, FROZEN_ADAPTER, Pass, Passed
from llmnode.wire.probe_messages import Probed
from llmnode.wire.push_messages import Pushed, PushLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from llmnode.wire.frame import Buffer, Frame


class RefusalCode(StrEnum):
    """Why a peer refuses. A code that is not known here is treated like BUSY: the peer refuses, and is not at fault."""

    BUSY = "busy"
    NO_ROOM = "no-room"
    WRONG_MODEL = "wrong-model"
    UNKNOWN_ADAPTER = "unknown-adapter"
    BAD_ADAPTER = "bad-adapter"
    UNKNOWN_CODEC = "unknown-codec"
    UNKNOWN_EXTENSION = "unknown-extension"
    UNKNOWN_FRAME = "unknown-frame"
    SPAN_NOT_HELD = "span-not-held"
    UNKNOWN_SESSION = "unknown-session"
    WRONG_POSITION = "wrong-position"
    STALE_EPOCH = "stale-epoch"
    TOO_FAR_AHEAD = "too-far-ahead"
    CONFLICT = "conflict"
    BAD_MESSAGE = "bad-message"
    COMPUTE_FAILED = "compute-failed"
    OVERFLOW = "overflow"
    CANNOT_FORWARD = "cannot-forward"


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to DESCRIBE: the blocks of a server, and its work since it started.

    A hop before it pushed `steps_given_directly` of its `steps`, and it pushed `results_pushed` results to a hop after
    it. `positions` counts those of all steps. The byte counts are of hidden states as they crossed its links, and the
    `plain` ones are without packing. Its blocks computed for `busy_us`.
    """

    software: Name
    model: Name
    model_digest: Digest
    blocks: Count
    hidden_size: Count
    context_tokens: Count
    dtype: Name
    span_start: U32
    span_end: Count
    kv_tokens_free: U32
    sessions: U32
    steps: Total
    steps_given_directly: Total
    results_pushed: Total
    positions: Total
    busy_us: Total
    sent_bytes: Total
    sent_plain_bytes: Total
    received_bytes: Total
    received_plain_bytes: Total
    adapter: OptionalDigest = None
    extensions: Extensions = None
    required: ExtensionNames = None


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Ask for a session over a part of the server's span, which may use KV for `max_length` positions.

    Its hidden states cross the wire in `codec` (`payload.Codec`). `priority` is the purpose that the client names
    (`core.priority`); a server that does not know it takes the lowest that it knows. With `keep_outputs` the server
    logs its results, so that REPLAY can ask for them, and a result that it pushes does not go to the client too.
    """

    model_digest: Digest
    span_start: U32
    span_end: Count
    max_length: Count
    dtype: Name
    codec: Name
    priority: Name
    keep_outputs: Flag
    adapter: OptionalDigest = None
    extensions: Extensions = None
    required: ExtensionNames = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to OPEN. `nonce` is under every receipt of the session. In protocol 1 there is no such message."""

    nonce: Annotated[bytes, Sized(16, 16)]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a step. Its hidden states, after the server's blocks, are the payload.

    The digests are the BLAKE3 of the step's payload and of the result's; `signature` makes a receipt of them
    (`receipt.py`). If `pushed`, the result went to the next hop; then it is not sent here too if the session keeps
    outputs. `shown_input` and `shown_signature` came with a step that a hop pushed; else they are empty.
    """

    queue_us: Microseconds
    compute_us: Microseconds
    input_digest: Digest
    output_digest: Digest
    signature: Signature
    pushed: Flag
    shown_input: Annotated[bytes, Sized(0, 32)]
    shown_signature: Annotated[bytes, Sized(0, 64)]


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask for logged results. With `push` they go to the next hop as a step, if that is possible, and else here."""

    push: Flag


@dataclass(frozen=True, slots=True)
class Replayed:
    """Logged results: the payload, unless they were pushed."""

    output_digest: Digest
    pushed: Flag


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The neighbours of a session on its route: one may push steps to it, and results are pushed to the other.

    `sender` may push steps to this session. Results go to the session `receiver_session` at `receiver`, which the
    server knows by its announcement. A name is empty if there is no such neighbour; the session is then all zeros. If
    `quiet`, the client does not want the results themselves. `again`: pushes to this receiver have failed, so the
    server answers at once, and agrees only if it has reached the receiver since the first such request.
    """

    sender: PeerName
    receiver: PeerName
    receiver_session: SessionName
    quiet: Flag
    again: Flag
    extensions: Extensions = None
    required: ExtensionNames = None


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The session takes the KV of `source` from now on, up to the frame's `start`.

    The first `shared` positions are the same in both already.
    """

    source: SessionName
    shared: U32


@dataclass(frozen=True, slots=True)
class Lease:
    """Ask that the session outlive its link by `lease_ms`, so that this client can RESUME it over another one.

    If the client `leaves`, the session has no link from now on.
    """

    lease_ms: U32
    leaves: Flag


@dataclass(frozen=True, slots=True)
class Leased:
    """The lease that is granted, at most `lease_ms`. It is 0 if the session ends with its link."""

    lease_ms: U32


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state of a session that has moved to this link. It ends with the link, unless it is leased again."""

    epoch: U32
    position: U32


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed no. `retry_after_ms` is 0 where waiting does not help or is not known."""

    code: Name
    message: Text
    retry_after_ms: U32


@dataclass(frozen=True, slots=True)
class Clock:
    """The metadata of VIEW, NEWS, DIGESTS, DIFFERING and MISSING frames: the sender's time, in ms since 1970."""

    now_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class AnnouncementBody:
    """The bytes under an announcement's signature; `core.announcement` says what the fields mean."""

    peer: Name
    addresses: Addresses
    sequence: Milliseconds
    expires_ms: Milliseconds
    software: Name
    model: Name
    model_digest: Digest
    blocks: Count
    dtype: Name
    span_start: U32
    span_end: Count
    state: Name
    block_us: U32
    kv_tokens: U32
    kv_tokens_free: U32
    adapter: OptionalDigest = None
    tokens_per_1000_s: OptionalU32 = None
    prefill_ns: OptionalU32 = None
    upload_kb_per_s: OptionalU32 = None
    round_trips_us: RoundTrips = None
    signature_1: OptionalSignature = None
    """The same peer's signature of the form for protocol 1 (`version_1.py`), if that is not this body itself."""
    next_start: OptionalU32 = None
    next_end: OptionalCount = None
    """The span that the peer is going to serve instead, if both are there."""
    adapters: OptionalAdapters = None
    """Adapters that the peer holds for its blocks: a name, a digest and a rank of each."""
    kv_page: OptionalCount = None
    load_percent: OptionalU32 = None
    stays: OptionalCount = None
    """1 if the peer's user has chosen its blocks."""


Extended: TypeAlias = Description | OpenRequest | Neighbours | Pass
"""The messages that have extensions."""
DEADLINE_MS = "deadline_ms"
PROMPTS = "prompts"
POSITIONS = "positions"
FIGURES = "figures"
LOAD_NOW = "load_now"
EXTENSIONS: Mapping[type[Any], Set[str]] = {
    **{kind: frozenset() for kind in get_args(Extended)},
    Description: {FIGURES, LOAD_NOW},
    OpenRequest: {PROMPTS, POSITIONS},
    Pass: {ALONE, DEADLINE_MS, DROPOUT, FROZEN_ADAPTER, PROMPTS},
}
"""The names that are known here. Others are ignored, unless the message requires them."""

AnyMessage = (
    Description
    | OpenRequest
    | Opened
    | Result
    | Pass
    | Passed
    | AdapterUse
    | AdapterPart
    | Pushed
    | PushLimit
    | Probed
    | Replay
    | Replayed
    | Neighbours
    | ForkRequest
    | Lease
    | Leased
    | Resumed
    | Refusal
    | Clock
    | AnnouncementBody
)
Message = TypeVar("Message", bound=AnyMessage)


def pack(message: AnyMessage) -> bytes:
    kind = type(message)
    values = zip(_CHECKS[kind], _VALUES[kind](message), strict=True)
    packed = msgpack.packb({name: value for name, value in values if value is not None})
    assert isinstance(packed, bytes)
    return packed


def unpack(kind: type[Message], meta: Buffer) -> Message:
    """Read `meta` as a `kind`.

    Raises RemoteProtocolError naming the field that is wrong, and PeerRefused naming a required extension that is not
    known here.
    """
    values = read_map(kind.__name__, meta)
    message = _checked(kind, values)
    if not values.keys() <= (known := _CHECKS[kind].keys()):
        unknown = [name for name in values if name not in known]
        raise RemoteProtocolError(f"{kind.__name__}: unknown fields {reprlib.repr(unknown)}")
    if isinstance(message, (Description, OpenRequest, Neighbours, Pass)):
        _check_required(message)
    return message


def unpack_signed(kind: type[Message], body: Buffer) -> tuple[Message, Set[str]]:
    """Read a signed body as `unpack` does, but ignore the fields of newer versions, whose names are returned.

    A peer that passes the body on keeps its bytes, so these fields reach the peers that know them. Raises
    RemoteProtocolError, also where an ignored field is out of its bounds.
    """
    values = read_map(kind.__name__, body)
    ignored = values.keys() - _CHECKS[kind].keys()
    for name in ignored:
        check_ignored(kind.__name__, name, values[name])
    return _checked(kind, values), ignored


def _checked(kind: type[Message], values: dict[Any, Any]) -> Message:  # Any: what a peer sends is not known yet
    """A `kind` of the fields that it has."""
    known = {}
    for name, check in _CHECKS[kind].items():
        if name not in values:
            if name in _OPTIONAL[kind]:
                continue
            raise RemoteProtocolError(f"{kind.__name__}.{name}: missing")
        value = values[name]
        if not check(value):
            # reprlib: the value may be nested deeper than repr can follow
            raise RemoteProtocolError(f"{kind.__name__}.{name}: {reprlib.repr(value)} is not allowed")
        known[name] = value
    return kind(**known)


def _check_required(message: Extended) -> None:
    for name in message.required or []:
        if name not in EXTENSIONS[type(message)]:
            why = f"this llmnode does not know the extension {name!r}, which is required: it needs an update"
            raise PeerRefused(RefusalCode.UNKNOWN_EXTENSION, why)


def check_empty(frame: Frame) -> None:
    """Frames whose header says it all carry no metadata."""
    if frame.meta:
        raise RemoteProtocolError(f"{frame.type.name} carries {len(frame.meta)} unexpected bytes of metadata")


def _checks(kind: type[Any]) -> dict[str, Callable[[Any], bool]]:
    """Field names of a message and the test that each value must pass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: check_of(hints[field.name]) for field in fields(kind)}


_CHECKS: dict[type[Any], dict[str, Callable[[Any], bool]]] = {kind: _checks(kind) for kind in get_args(AnyMessage)}
_VALUES = {kind: getter_of(kind) for kind in get_args(AnyMessage)}
_OPTIONAL: dict[type[Any], Set[str]] = {
    kind: {field.name for field in fields(kind) if field.default is None} for kind in get_args(AnyMessage)
}
