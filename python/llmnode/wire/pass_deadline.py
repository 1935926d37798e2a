"""How long the client of a pass waits for its answer: an extension of `Pass`, for servers that compute nothing in vain.

The time counts from the arrival of the pass, since clocks differ. A server that does not know it computes the pass all
the same, and nobody takes its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.errors import RemoteProtocolError
from llmnode.wire.fields import Count, check_of
from llmnode.wire.messages import DEADLINE_MS

if TYPE_CHECKING:
    from llmnode.wire.pass_messages import Pass

_is_deadline = check_of(Count)


def deadline_extension(timeout_s: float) -> dict[str, Any]:  # Any: each extension has its own values
    """The extensions of a pass whose answer is waited for this long."""
    return {DEADLINE_MS: max(1, int(1000 * timeout_s))}


def deadline_s(request: Pass) -> float | None:
    """How long its client waits; None if it does not say. Raises RemoteProtocolError."""
    deadline_ms = (request.extensions or {}).get(DEADLINE_MS)
    if deadline_ms is None:
        return None
    if not _is_deadline(deadline_ms):
        raise RemoteProtocolError(f"Pass.extensions: {DEADLINE_MS} is no number of milliseconds")
    return float(deadline_ms) / 1000
