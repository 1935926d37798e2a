"""The load of a server at the moment: an extension of `Description`, in whole numbers. Clients ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.core.peers.asked_loads import LoadNow
from llmnode.errors import RemoteProtocolError
from llmnode.wire.fields import U32, check_of
from llmnode.wire.messages import LOAD_NOW

if TYPE_CHECKING:
    from llmnode.wire.messages import Description

_is_u32 = check_of(U32)
_NAMES = ("load_percent", "fresh_percent", "asking", "kv_tokens_free")
_MOST = 2**32 - 1


def load_extension(load: LoadNow) -> dict[str, Any]:  # Any: each extension has its own values
    """The extension of a server with this load."""
    numbers = round(100 * load.load), round(100 * load.fresh), load.asking, load.kv_tokens_free
    return {LOAD_NOW: {name: min(number, _MOST) for name, number in zip(_NAMES, numbers, strict=True)}}


def load_of(description: Description) -> LoadNow | None:
    """None if the server does not say. Raises RemoteProtocolError."""
    values = (description.extensions or {}).get(LOAD_NOW)
    if values is None:
        return None
    if not isinstance(values, dict) or not all(_is_u32(values.get(name)) for name in _NAMES):
        raise RemoteProtocolError(f"Description.extensions: {LOAD_NOW} is no map of numbers")
    load_percent, fresh_percent, asking, kv_tokens_free = (values[name] for name in _NAMES)
    return LoadNow(load_percent / 100, fresh_percent / 100, asking, kv_tokens_free)
