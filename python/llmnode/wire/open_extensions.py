"""The extensions of OPEN that are known here. Peers that do not know them ignore them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.errors import RemoteProtocolError
from llmnode.wire.messages import POSITIONS

if TYPE_CHECKING:
    from llmnode.wire.messages import OpenRequest


def open_extensions(positions: int) -> dict[str, Any] | None:  # Any: each extension has its own values
    """By `POSITIONS`, the positions that come as soon as the session opens, in a replay or a copy.

    The server reserves KV for them at once.
    """
    return {POSITIONS: positions} if positions else None


def positions_at_once(request: OpenRequest) -> int:
    """The positions that come at once, as far as the client says. Raises RemoteProtocolError."""
    positions = (request.extensions or {}).get(POSITIONS, 0)
    if type(positions) is not int or not 0 <= positions <= request.max_length:
        raise RemoteProtocolError(f"OPEN: {positions!r} positions at once, of {request.max_length}")
    return positions
