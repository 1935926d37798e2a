"""The metadata of each frame type, as strict frozen dataclasses.

A message decodes only if every field is there, none is unknown, and each has its type and range: what a peer may send
is exactly what is declared here. Everything else raises RemoteProtocolError.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from llmnode.core.ids import SESSION_ID_BYTES
from llmnode.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from llmnode.wire.frame import Buffer


@dataclass(frozen=True, slots=True)
class Between:
    """Bounds of a number, both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Sized:
    """Bounds of a length in bytes (bytes) or characters (str), both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Bounds of a list of strings: how many, and how long each, both included."""

    most: int
    longest: int


ADDRESS_CHARS = 300

U32 = Annotated[int, Between(0, 2**32 - 1)]
Count = Annotated[int, Between(1, 2**32 - 1)]
Microseconds = Annotated[int, Between(0, 2**48)]
Milliseconds = Annotated[int, Between(0, 2**48)]
Signature = Annotated[bytes, Sized(64, 64)]
Total = Annotated[int, Between(0, 2**63 - 1)]
Addresses = Annotated[list[str], Texts(8, ADDRESS_CHARS)]
Flag = Annotated[bool, Between(0, 1)]
Digest = Annotated[bytes, Sized(32, 32)]
OptionalDigest = Annotated[bytes | None, Sized(32, 32)]
"""Left out of the map where it is None."""
SessionName = Annotated[bytes, Sized(SESSION_ID_BYTES, SESSION_ID_BYTES)]
Name = Annotated[str, Sized(1, 200)]
PeerName = Annotated[str, Sized(0, 200)]
Text = Annotated[str, Sized(0, 2000)]

_MOST_ITEMS = 48
"""In one map or array: msgpack reserves room for all before it has seen one. No message has as many fields."""


_LONGEST_FIELD_NAME = 64
_DEEPEST = 4
"""How deep an ignored field of a signed body may be nested."""


class RefusalCode(StrEnum):
    """Why a peer refuses. A code that we do not know is treated like BUSY: refused, no fault."""

    BUSY = "busy"
    NO_ROOM = "no-room"
    WRONG_MODEL = "wrong-model"
    UNKNOWN_ADAPTER = "unknown-adapter"
    UNKNOWN_CODEC = "unknown-codec"
    SPAN_NOT_HELD = "span-not-held"
    UNKNOWN_SESSION = "unknown-session"
    WRONG_POSITION = "wrong-position"
    STALE_EPOCH = "stale-epoch"
    TOO_FAR_AHEAD = "too-far-ahead"
    CONFLICT = "conflict"
    BAD_MESSAGE = "bad-message"
    COMPUTE_FAILED = "compute-failed"
    CANNOT_FORWARD = "cannot-forward"


@dataclass(frozen=True, slots=True)
class Description:
    """What a server holds, and what it has done since it started (the answer to DESCRIBE).

    Of its steps, so many were given to it by a hop before, and so many results it gave to a hop after. They were of so
    many `positions`, whose hidden states were so many bytes as they crossed its links, and `plain` without packing. Its
    blocks computed for `busy_us`.
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


@dataclass(frozen=True, slots=True)
class Open:
    """Ask for a session over a part of the server's span, with KV for `max_length` positions.

    `codec` says how hidden states cross the wire in it (`payload.Codec`), and `priority` what it is for as its client
    has it (`core.scheduling.PRIORITIES`). With `keep_outputs` the server logs its results, to be asked for by REPLAY,
    and what it pushes to a next hop it does not send to the client as well.
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


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a step. Its hidden states, after the server's blocks, are the payload.

    The digests are the BLAKE3 of the payload that was computed, and of what came of it; `signature` makes a receipt of
    them (`receipt.py`). `pushed` says that the next hop was given the result; then it is not sent here too if the
    session keeps outputs. `shown_input` and `shown_signature` came with a step that a hop pushed; else they are empty.
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
class Pushed:
    """What a hop shows the next one with a step that it has computed: of what, and its receipt for the client.

    The receiver cannot check it, and hands it on: if it is not what the client was told, it convicts its signer.
    """

    input_digest: Digest
    signature: Signature


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask for logged results: to be pushed to the next hop as a step of theirs if it can be done, or sent here."""

    push: Flag


@dataclass(frozen=True, slots=True)
class Replayed:
    """Logged results: the payload, unless they were pushed."""

    output_digest: Digest
    pushed: Flag


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Between whom a session stands on its route: results are pushed on, and steps may come from a peer.

    `sender` may push steps to this session. Results go to the session `receiver_session` at `receiver`, whom the server
    knows by its announcement. Empty where there is nobody; the session is then all zeros. If `quiet`, the client does
    not want the results themselves. `again`: pushes to this receiver have failed, so the server answers at once, and
    yes only if it has reached it since it was first asked so.
    """

    sender: PeerName
    receiver: PeerName
    receiver_session: SessionName
    quiet: Flag
    again: Flag


@dataclass(frozen=True, slots=True)
class Fork:
    """Whose KV a session is to have from now on: that of `source`, up to the frame's `start`.

    The first `shared` positions are the same in both already.
    """

    source: SessionName
    shared: U32


@dataclass(frozen=True, slots=True)
class Lease:
    """Ask that the session outlive its link by so long, for this client to RESUME it over another one.

    If the client `leaves`, the session has no link from now on.
    """

    lease_ms: U32
    leaves: Flag


@dataclass(frozen=True, slots=True)
class Leased:
    """For how long, at most: 0 if the session ends with its link."""

    lease_ms: U32


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a session stands that has moved to this link. It ends with it, unless it is leased again."""

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
    """What VIEW and NEWS frames carry besides their payload: the sender's time, in ms since 1970."""

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


AnyMessage = (
    Description
    | Open
    | Result
    | Pushed
    | Replay
    | Replayed
    | Neighbours
    | Fork
    | Lease
    | Leased
    | Resumed
    | Refusal
    | Clock
    | AnnouncementBody
)
Message = TypeVar("Message", bound=AnyMessage)


def pack(message: AnyMessage) -> bytes:
    values = {name: getattr(message, name) for name in _CHECKS[type(message)]}
    packed = msgpack.packb({name: value for name, value in values.items() if value is not None})
    assert isinstance(packed, bytes)
    return packed


def unpack(kind: type[Message], meta: Buffer) -> Message:
    """Read `meta` as a `kind`. Raises RemoteProtocolError naming the field that is wrong."""
    values = _read_map(kind, meta)
    if unknown := [name for name in values if name not in _CHECKS[kind]]:
        message = _checked(kind, values)  # a wrong field that we know is the better reason
        raise RemoteProtocolError(f"{type(message).__name__}: unknown fields {reprlib.repr(unknown)}")
    return _checked(kind, values)


def unpack_signed(kind: type[Message], body: Buffer) -> Message:
    """Read a signed body as `unpack` does, and ignore the fields of newer versions.

    Whoever passes the body on keeps its bytes, so these fields reach the peers that know them. Raises
    RemoteProtocolError, also where an ignored field has a long name or is nested deeper than `_DEEPEST`.
    """
    values = _read_map(kind, body)
    for name in values.keys() - _CHECKS[kind].keys():
        if type(name) is not str or not 1 <= len(name) <= _LONGEST_FIELD_NAME:
            raise RemoteProtocolError(f"{kind.__name__}: {reprlib.repr(name)} is no name of a field")
        if _is_deeper(values[name], _DEEPEST):
            raise RemoteProtocolError(f"{kind.__name__}.{name}: nested more than {_DEEPEST} deep")
    return _checked(kind, values)


def _read_map(kind: type[Any], meta: Buffer) -> dict[Any, Any]:  # Any: what a peer sends is not known yet
    try:
        values = msgpack.unpackb(
            meta,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_without_repeats,
            max_map_len=_MOST_ITEMS,
            max_array_len=_MOST_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:  # msgpack documents both
        raise RemoteProtocolError(f"{kind.__name__}: not msgpack ({str(error) or type(error).__name__})") from error
    if not isinstance(values, dict):
        raise RemoteProtocolError(f"{kind.__name__}: {reprlib.repr(values)} is no map of fields")
    return values


def _checked(kind: type[Message], values: dict[Any, Any]) -> Message:  # Any: likewise
    """A `kind` of the fields that it has."""
    checks = _CHECKS[kind]
    for name, check in checks.items():
        if name not in values:
            if name in _OPTIONAL[kind]:
                continue
            raise RemoteProtocolError(f"{kind.__name__}.{name}: missing")
        if not check(values[name]):
            # reprlib: the value may be nested deeper than repr can follow
            raise RemoteProtocolError(f"{kind.__name__}.{name}: {reprlib.repr(values[name])} is not allowed")
    return kind(**{name: values[name] for name in checks if name in values})


def _is_deeper(value: Any, levels: int) -> bool:  # Any: likewise
    if not isinstance(value, (list, dict)):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inside)


def check_empty(meta: Buffer, what: str) -> None:
    """Frames whose header says it all carry no metadata."""
    if len(meta):
        raise RemoteProtocolError(f"{what} carries {len(meta)} unexpected bytes of metadata")


def _without_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:  # Any: what a peer sends is not known yet
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field comes twice")
    return values


def _checks(kind: type[Any]) -> dict[str, Callable[[Any], bool]]:
    """Field names of a message and the test that each value must pass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _check_of(hints[field.name]) for field in fields(kind)}


def _check_of(hint: Any) -> Callable[[Any], bool]:  # Any: a typing construct
    assert get_origin(hint) is Annotated, f"declare the bounds of {hint}"
    kind, bounds = get_args(hint)
    kind, *_ = get_args(kind) or (kind,)  # "bytes | None" is bytes where it is there
    if isinstance(bounds, Texts):
        return lambda value: (
            type(value) is list
            and len(value) <= bounds.most
            and all(type(item) is str and 1 <= len(item) <= bounds.longest for item in value)
        )
    if isinstance(bounds, Between):
        # bool is an int to isinstance, but not to us
        return lambda value: type(value) is kind and bounds.low <= value <= bounds.high
    return lambda value: type(value) is kind and bounds.low <= len(value) <= bounds.high


_CHECKS: dict[type[Any], dict[str, Callable[[Any], bool]]] = {kind: _checks(kind) for kind in get_args(AnyMessage)}
_OPTIONAL: dict[type[Any], Set[str]] = {
    kind: {field.name for field in fields(kind) if field.default is None} for kind in get_args(AnyMessage)
}
