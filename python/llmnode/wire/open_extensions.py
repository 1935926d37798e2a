"""The extensions of OPEN. Servers that do not know one ignore it, unless its client requires it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.errors import RemoteProtocolError
from llmnode.wire.deep_prompts import prompts_extension
from llmnode.wire.messages import POSITIONS

if TYPE_CHECKING:
    from llmnode.core.operations import DeepPrompts
    from llmnode.wire.messages import OpenRequest


def open_extensions(prompts: DeepPrompts, at_once: int) -> dict[str, Any] | None:  # Any: each has its own values
    """The extensions of a session with `prompts`, to which `at_once` positions come as soon as it is open.

    The server lets it in when there is KV for all of these, and one more piece.
    """
    return {**prompts_extension(prompts), **({POSITIONS: at_once} if at_once else {})} or None


def positions_at_once(request: OpenRequest) -> int:
    """The positions that come at once, as far as the client says. Raises RemoteProtocolError."""
    positions = (request.extensions or {}).get(POSITIONS, 0)
    if type(positions) is not int or not 0 <= positions <= request.max_length:
        raise RemoteProtocolError(f"OPEN: {positions!r} positions at once, of {request.max_length}")
    return positions
