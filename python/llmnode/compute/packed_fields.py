"""Frozen dataclasses as lists of their fields, and back. Buffers go elsewhere: the list has their sizes.

The forms come from the types of the fields, so that a new operation crosses to the worker process as it is declared.
Both ends are of one version, so a value that does not fit is a bug of ours: LocalProtocolError.
"""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from llmnode.core.field_values import getter_of
from llmnode.core.ids import ADAPTER_ID_BYTES, SESSION_ID_BYTES, AdapterId, PeerId, SessionId
from llmnode.core.operations import Buffer
from llmnode.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Packed = list[Any]  # Any: what msgpack can hold
    Put = Callable[[Buffer], int]
    """Puts a buffer where the other end finds it, and returns its size."""
    Take = Callable[[int], Buffer]

T = TypeVar("T")

MOST = 2**63 - 1
"""The largest number."""
LONGEST = 1000
"""The most characters, bytes or numbers of a field that is no buffer."""


def pack_fields(value: Any, put: Put) -> Packed:  # Any: a dataclass of any kind
    form = _form_of(type(value))
    return [each if pack is None else pack(each, put) for each, pack in zip(form.get(value), form.packs, strict=True)]


def unpack_fields(kind: type[T], packed: Sequence[Any], take: Take) -> T:  # Any: what msgpack can hold
    """Raises LocalProtocolError for another number of fields, or one of another type or beyond its limits."""
    form = _form_of(kind)
    if type(packed) is not list or len(packed) != len(form.unpacks):
        raise LocalProtocolError(f"{kind.__name__}: {reprlib.repr(packed)} does not have its fields")
    values = [unpack(each, take) for each, unpack in zip(packed, form.unpacks, strict=True)]
    try:
        return kind(*values)
    except ValueError as error:
        raise LocalProtocolError(f"{kind.__name__}: {error}") from error


class _Form:
    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        self.get = getter_of(kind)
        self.packs = [_pack_of(hints[name]) for name in names]
        self.unpacks = [_unpack_of(hints[name], f"{kind.__name__}.{name}") for name in names]


_FORMS: dict[type[Any], _Form] = {}


def _form_of(kind: type[Any]) -> _Form:
    form = _FORMS.get(kind)
    if form is None:
        form = _FORMS[kind] = _Form(kind)
    return form


def _pack_of(hint: Any) -> Callable[[Any, Put], Any] | None:
    """The function that packs a value; None if msgpack takes it as it is."""
    if hint == Buffer:
        return lambda value, put: put(value)
    return pack_fields if is_dataclass(hint) else None


def _unpack_of(hint: Any, name: str) -> Callable[[Any, Take], Any]:
    if is_dataclass(hint):
        return partial(_unpack_nested, hint)
    check, make = _check_of(hint), _maker_of(hint)

    def unpack(value: Any, take: Take) -> Any:
        if not check(value):
            raise LocalProtocolError(f"{name}: {reprlib.repr(value)} is not allowed")
        return value if make is None else make(value, take)

    return unpack


def _unpack_nested(kind: Any, packed: Any, take: Take) -> Any:
    return unpack_fields(kind, packed, take)


def _maker_of(hint: Any) -> Callable[[Any, Take], Any] | None:
    """The function that makes a value of what came; None if it stays as it is."""
    if hint == Buffer:
        return lambda size, take: take(size)
    if hint == tuple[int, ...]:
        return lambda value, _take: tuple(value)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return lambda value, _take: hint(value)
    return None


def _check_of(hint: Any) -> Callable[[Any], bool]:
    if hint is SessionId:
        return lambda value: _is_id(value, SESSION_ID_BYTES)
    if hint is PeerId:
        return lambda value: type(value) is str and len(value) <= LONGEST
    if hint == tuple[int, ...]:
        return lambda value: type(value) is list and len(value) <= LONGEST and all(map(_is_count, value))
    if hint == (int | None):
        return lambda value: value is None or _is_count(value)
    if hint in (AdapterId, AdapterId | None):
        may_lack = hint != AdapterId
        return lambda value: _is_id(value, ADAPTER_ID_BYTES) or (may_lack and value is None)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        numbers = {each.value for each in hint}
        return lambda value: type(value) is int and value in numbers
    if hint is float:
        return lambda value: type(value) is float
    if hint in (bytes, str):
        return lambda value: type(value) is hint and len(value) <= LONGEST
    if hint is bool:
        return lambda value: type(value) is bool
    assert hint is int or hint == Buffer, f"say how {hint} crosses to the worker process"
    return _is_count


def _is_id(value: Any, size: int) -> bool:
    return type(value) is bytes and len(value) == size


def _is_count(value: Any) -> bool:
    # a bool is an int to isinstance, but not to us
    return type(value) is int and 0 <= value <= MOST
