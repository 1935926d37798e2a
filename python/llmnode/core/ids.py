"""Names for things that would otherwise be bare strings, bytes and integers."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id in its base58 form, as in `/p2p/12D3Koo...`."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes, chosen by the client: only the peers of a session know its name."""

AdapterId = NewType("AdapterId", bytes)
"""The digest of an adapter: that of all of its numbers (`wire/adapter.py`)."""

Epoch = NewType("Epoch", int)
"""Raised by the client alone, at each rollback or reroute; frames of a lower epoch are dropped."""

Step = NewType("Step", int)
"""Counts the steps (prefill chunks and decodes) of a session, from 0."""

ADAPTER_ID_BYTES = 32
SESSION_ID_BYTES = 16
NO_SESSION = SessionId(bytes(SESSION_ID_BYTES))
"""The session field of frames that belong to the link itself."""
