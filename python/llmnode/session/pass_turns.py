"""How many passes of one client each server does at a time: the others wait at the client, and not there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import trio

from llmnode.core.peers.at_once import AtOnce
from llmnode.wire.refusal import memory_in_s

if TYPE_CHECKING:
    from llmnode.errors import PeerError
    from llmnode.swarm.peer_connection import PeerConnection

AT_ONCE = 4
"""Microbatches that one server has together. It takes this number of passes over one link."""


class PassTurns:
    """A server that has no memory for some passes of ours beside each other gets fewer at a time, for a while."""

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[PeerConnection, tuple[trio.CapacityLimiter, AtOnce]] = WeakKeyDictionary()

    def turn(self, connection: PeerConnection) -> trio.CapacityLimiter:
        """A context in which the server does one pass."""
        return self._turns.setdefault(connection, (trio.CapacityLimiter(AT_ONCE), AtOnce(AT_ONCE)))[0]

    def has_fewer(self, connection: PeerConnection, error: PeerError) -> bool:
        """Whether the `error` of a pass only says that the server had no memory for it beside others of ours."""
        turn, at_once = self._turns[connection]
        if memory_in_s(error) is None or turn.borrowed_tokens < 2:
            return False
        at_once.refused(turn.borrowed_tokens)
        turn.total_tokens = at_once.number
        return True

    def worked(self, connection: PeerConnection) -> None:
        """The server has done a pass."""
        turn, at_once = self._turns[connection]
        at_once.worked()
        turn.total_tokens = at_once.number
