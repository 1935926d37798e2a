"""Fields of messages: their types, their bounds, and how a map of them is read from bytes that a peer has sent.

`messages.py` declares the messages. Here nothing knows which messages there are.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import msgpack

from llmnode.core.adapters import MOST_ADAPTERS, MOST_RANK, NAME_PATTERN
from llmnode.core.ids import SESSION_ID_BYTES
from llmnode.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Bounds of a list of strings: its length, and the length of each string, both included."""

    most: int
    longest: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """Bounds of a list of numbers: its length, from 1 on, and each number, both included."""

    most: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Counts:
    """A map of at most `most` names, none longer than `longest` characters, to numbers within bounds."""

    most: int
    longest: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Named:
    """Bounds of a map of names to values of any kind: its size, and how deep the values may be nested."""

    most: int
    deepest: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Bounds of a list, from 1 on, of lists that have one value for each of `kinds`: `Annotated` types."""

    most: int
    kinds: tuple[Any, ...]  # Any: typing constructs


@dataclass(frozen=True, slots=True)
class Matches:
    """The whole text matches `pattern`, which bounds its length."""

    pattern: str


ADDRESS_CHARS = 300
NAME_CHARS = 64
"""The longest name of a field or an extension."""
DEEPEST = 4
"""The values of extensions, and of fields that are ignored, may be nested this deep."""
MOST_EXTENSIONS = 16
MOST_ROUND_TRIPS = 16
"""The most peers to which an announcement has round trips."""
MOST_SEQUENCES = 32
"""The most sequences of one pass."""

U32 = Annotated[int, Between(0, 2**32 - 1)]
Count = Annotated[int, Between(1, 2**32 - 1)]
Microseconds = Annotated[int, Between(0, 2**48)]
Milliseconds = Annotated[int, Between(0, 2**48)]
Signature = Annotated[bytes, Sized(64, 64)]
Total = Annotated[int, Between(0, 2**63 - 1)]
Addresses = Annotated[list[str], Texts(8, ADDRESS_CHARS)]
Flag = Annotated[bool, Between(0, 1)]
Digest = Annotated[bytes, Sized(32, 32)]
SessionName = Annotated[bytes, Sized(SESSION_ID_BYTES, SESSION_ID_BYTES)]
Name = Annotated[str, Sized(1, 200)]
PeerName = Annotated[str, Sized(0, 200)]
Text = Annotated[str, Sized(0, 2000)]
Lengths = Annotated[list[int], Numbers(MOST_SEQUENCES, 1, 2**32 - 1)]
_AdapterName = Annotated[str, Matches(NAME_PATTERN)]
_Rank = Annotated[int, Between(1, MOST_RANK)]

# Optional fields: left out of the map where they are None.
OptionalDigest = Annotated[bytes | None, Sized(32, 32)]
OptionalU32 = Annotated[int | None, Between(0, 2**32 - 1)]
RoundTrips = Annotated[dict[str, int] | None, Counts(MOST_ROUND_TRIPS, 100, 0, 2**32 - 1)]
"""Microseconds, by peer."""
OptionalSignature = Annotated[bytes | None, Sized(64, 64)]
OptionalCount = Annotated[int | None, Between(1, 2**32 - 1)]
OptionalAdapters = Annotated[list[list[Any]] | None, Rows(MOST_ADAPTERS, (_AdapterName, Digest, _Rank))]
Extensions = Annotated[dict[str, Any] | None, Named(MOST_EXTENSIONS, DEEPEST)]  # Any: each extension has its own values
ExtensionNames = Annotated[list[str] | None, Texts(MOST_EXTENSIONS, NAME_CHARS)]

MOST_MAP_BYTES = 16 << 10
"""The largest map. A refusal with the longest text has half of this. Each byte of an extension that nobody here knows
may become an object: 64 KiB of these take a tenth of a second.
"""
_MOST_ITEMS = 48
"""The limit of one map or array. msgpack reserves memory for all items before it reads one. A message has fewer."""


def read_map(what: str, content: Buffer) -> dict[Any, Any]:  # Any: what a peer sends is not known yet
    """The map that is packed in `content`. Raises RemoteProtocolError, which calls it `what`."""
    if len(content) > MOST_MAP_BYTES:
        raise RemoteProtocolError(f"{what}: {len(content)} bytes of fields, at most {MOST_MAP_BYTES} allowed")
    try:
        values = msgpack.unpackb(
            content,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_without_repeats,
            max_map_len=_MOST_ITEMS,
            max_array_len=_MOST_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:  # msgpack documents both
        raise RemoteProtocolError(f"{what}: not msgpack ({str(error) or type(error).__name__})") from error
    if not isinstance(values, dict):
        raise RemoteProtocolError(f"{what}: {reprlib.repr(values)} is no map of fields")
    return values


def check_ignored(what: str, name: object, value: object) -> None:
    """Raises RemoteProtocolError if a field that nobody here knows is out of its bounds all the same."""
    if type(name) is not str or not 1 <= len(name) <= NAME_CHARS:
        raise RemoteProtocolError(f"{what}: {reprlib.repr(name)} is no name of a field")
    if _is_deeper(value, DEEPEST):
        raise RemoteProtocolError(f"{what}.{name}: nested more than {DEEPEST} deep")


def check_of(hint: Any) -> Callable[[Any], bool]:  # Any: a typing construct
    """The test that a value of a field with this type must pass."""
    assert get_origin(hint) is Annotated, f"declare the bounds of {hint}"
    kind, bounds = get_args(hint)
    match bounds:
        case Texts():
            return lambda value: (
                type(value) is list
                and len(value) <= bounds.most
                and all(type(item) is str and 1 <= len(item) <= bounds.longest for item in value)
            )
        case Numbers():
            return lambda value: (
                type(value) is list
                and 1 <= len(value) <= bounds.most
                and all(type(item) is int and bounds.low <= item <= bounds.high for item in value)
            )
        case Counts():
            return lambda value: (
                type(value) is dict
                and len(value) <= bounds.most
                and all(type(name) is str and 1 <= len(name) <= bounds.longest for name in value)
                and all(type(item) is int and bounds.low <= item <= bounds.high for item in value.values())
            )
        case Rows():
            checks = [check_of(each) for each in bounds.kinds]
            return lambda value: (
                type(value) is list
                and 1 <= len(value) <= bounds.most
                and all(
                    type(row) is list
                    and len(row) == len(checks)
                    and all(check(item) for check, item in zip(checks, row, strict=True))
                    for row in value
                )
            )
        case Matches():
            return lambda value: type(value) is str and re.fullmatch(bounds.pattern, value) is not None
        case Named():
            return lambda value: (
                type(value) is dict
                and len(value) <= bounds.most
                and all(type(name) is str and 1 <= len(name) <= NAME_CHARS for name in value)
                and not any(_is_deeper(item, bounds.deepest) for item in value.values())
            )
    kind, *_ = get_args(kind) or (kind,)  # "bytes | None" is bytes where it is there
    if isinstance(bounds, Between):
        # bool is an int to isinstance, but not to us
        return lambda value: type(value) is kind and bounds.low <= value <= bounds.high
    return lambda value: type(value) is kind and bounds.low <= len(value) <= bounds.high


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, (list, dict)):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inside)


def _without_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:  # Any: what a peer sends is not known yet
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field comes twice")
    return values
