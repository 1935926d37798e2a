"""Prefills and replays that wait for direct connections: a relay is for small messages, and others use it too."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.relaying import RelayBudget, would_cut
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.policy import RelayedPolicy
    from llmnode.session.hop import SessionHop
    from llmnode.swarm.peer_connection import PeerConnection

log = logging.getLogger(__name__)

CHOICES = ("wait", "allow", "refuse")
"""The ways to treat a prefill that would go through a relay, see `RelayedPolicy.prefill`."""


def check_choice(choice: str, name: str) -> None:
    """Raises ConfigError unless it is one of `CHOICES`."""
    if choice not in CHOICES:
        raise ConfigError(f"{name} {choice!r}: give one of {', '.join(CHOICES)}")


class RelayGate:
    """Holds the prefills and replays of one session."""

    def __init__(self, policy: RelayedPolicy) -> None:
        self._policy = policy
        self._budget = RelayBudget(policy)
        self._waited: set[PeerConnection] = set()

    async def pass_when_allowed(self, chain: Sequence[SessionHop | None], positions: int, size_bytes: int) -> None:
        """Wait for direct connections before positions go along `chain`, where None is the client.

        It waits once for each relayed connection.

        Raises ConfigError if it may not go through a relay, or the relay would end the circuit.
        """
        if positions <= self._policy.step_positions or self._policy.prefill == "allow":
            return
        if not (relayed := _relayed(chain)):
            return
        if not _cut(relayed, size_bytes) and self._budget.allows(positions, size_bytes, trio.current_time()):
            return
        if new := [connection for connection in relayed if connection not in self._waited]:
            self._waited.update(new)
            await self._wait(new)
            if not (relayed := _relayed(chain)):
                return
        cut = _cut(relayed, size_bytes)
        peers = ", ".join(str(connection.peer) for connection in relayed)
        if self._policy.prefill == "refuse" or cut:
            why = "whose limit is too low for it" if cut else "which is refused here"
            raise ConfigError(
                f"a prefill of {size_bytes} bytes would go to {peers} through a relay, {why}: allow it with "
                "--relayed-prefill allow, or have them reached directly (`llmnode doctor --peers` says how)"
            )
        if new:
            log.warning("a prefill of %d bytes goes through a relay: no direct connection to %s", size_bytes, peers)

    async def _wait(self, connections: Sequence[PeerConnection]) -> None:
        with trio.move_on_after(self._policy.patience_s):
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    nursery.start_soon(connection.wait_better)


def _cut(connections: Sequence[PeerConnection], size_bytes: int) -> bool:
    return any(would_cut(connection.relay_limit_bytes, size_bytes) for connection in connections)


def _relayed(chain: Sequence[SessionHop | None]) -> list[PeerConnection]:
    """Connections through relays that hidden states go over: those that one hop pushes to the next do not come here."""
    here = [hop for pair in pairwise(chain) if pair[0] is None or not pair[0].pushing.works for hop in pair]
    best = [hop.connection.best for hop in here if hop is not None and hop.failure is None]
    return [connection for connection in dict.fromkeys(best) if connection.relayed]
