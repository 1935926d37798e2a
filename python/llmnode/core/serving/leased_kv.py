"""The sessions that wait for their clients to come back, and the KV that they hold: a share of all KV.

When it is all taken, address groups share it, and within a group the clients. It knows no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId, SessionId


@dataclass(frozen=True, slots=True)
class Leased:
    """A session without its client."""

    session: SessionId
    group: str
    client: PeerId
    positions: int
    """It has KV for this number."""


class LeasedKv:
    """Those of one server."""

    def __init__(self) -> None:
        self._leases: dict[SessionId, Leased] = {}
        self._groups: dict[str, dict[PeerId, dict[SessionId, None]]] = {}
        """The oldest session of a client first."""
        self._held: Counter[tuple[str, ...]] = Counter()
        """The positions of all, of each group, and of each client within its group."""

    @property
    def positions(self) -> int:
        """The sum over all."""
        return self._held[()]

    def put(self, lease: Leased, most: int) -> list[SessionId]:
        """Add a session, or tell that it holds another amount. All may hold `most` positions.

        Returns those that have to end, and are forgotten. It may be this one.
        """
        self.remove(lease.session)
        self._leases[lease.session] = lease
        self._groups.setdefault(lease.group, {}).setdefault(lease.client, {})[lease.session] = None
        self._held.update(dict.fromkeys(_paths(lease), lease.positions))
        ended = []
        while self.positions > most and lease.session in self._leases:
            victim = self._victim(lease)
            self.remove(victim)
            ended.append(victim)
        return ended

    def remove(self, session: SessionId) -> None:
        """Its client is back, or it has ended. Safe to call for one that is not here."""
        if (lease := self._leases.pop(session, None)) is None:
            return
        of_group = self._groups[lease.group]
        del of_group[lease.client][session]
        if not of_group[lease.client]:
            del of_group[lease.client]
        if not of_group:
            del self._groups[lease.group]
        self._held.subtract(dict.fromkeys(_paths(lease), lease.positions))
        for path in _paths(lease):
            if not self._held[path]:
                del self._held[path]

    def _victim(self, asking: Leased) -> SessionId:
        """The newest of the client that holds most in the group that holds most. The asking one, if its own group or
        client holds no less.
        """
        group = max(self._groups, key=lambda each: self._held[each,])
        client = max(self._groups[group], key=lambda each: self._held[group, each])
        rival: tuple[str, ...] = (group,) if group != asking.group else (group, client)
        own = _paths(asking)[len(rival)]
        return next(reversed(self._groups[group][client])) if self._held[rival] > self._held[own] else asking.session


def _paths(lease: Leased) -> tuple[tuple[str, ...], ...]:
    return (), (lease.group,), (lease.group, lease.client)
