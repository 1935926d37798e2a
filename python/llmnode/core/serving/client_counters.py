"""Virtual token counters: how much of an executor each client was given, in positions times blocks.

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2. Identities are free, so the counters of
address groups come first, and those of peers decide within a group. KV is shared in the same way (`kv_shares.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from llmnode.core.ids import PeerId

if TYPE_CHECKING:
    from collections.abc import Hashable

K = TypeVar("K", bound="Hashable")

REMEMBERED = 256
"""Clients without a session whose counters are kept. A pass has parts, and a client has passes one after the other:
between them nothing of it is here."""
REMEMBERED_OF_GROUP = 64
"""This many of them in one address group. It is the group's counter that strangers with many identities pay with."""


class Client(NamedTuple):
    """The account that work is charged to."""

    group: str
    """The client's address group."""
    peer: PeerId


class ClientCounters:
    """The counters of address groups, and within each of its peers.

    The group with the lowest counter is next, and in it the peer with the lowest.
    """

    def __init__(self) -> None:
        self._groups: Counters[str] = Counters(REMEMBERED)
        self._within: dict[str, Counters[PeerId]] = {}
        self._sessions: Counter[Client | str] = Counter()
        """Those of each client, and of each group."""

    def given(self, client: Client) -> tuple[int, int]:
        """The counters of its group and of its own: the lowest is next."""
        return self._groups.given[client.group], self._within[client.group].given[client.peer]

    def open(self, client: Client) -> None:
        """It has one session more."""
        self._sessions.update((client, client.group))

    def close(self, client: Client) -> None:
        """It has one session less."""
        for each in (client, client.group):
            self._sessions[each] -= 1
            if not self._sessions[each]:
                del self._sessions[each]
        self.forget(client)

    def enter(self, client: Client) -> None:
        """One more of its requests waits."""
        within = self._within.get(client.group)
        if within is None:
            within = self._within[client.group] = Counters(REMEMBERED_OF_GROUP)
        within.enter(client.peer)
        self._groups.enter(client.group)

    def leave(self, client: Client) -> None:
        """One of its requests waits no more."""
        self._groups.leave(client.group)
        self._within[client.group].leave(client.peer)

    def charge(self, client: Client, cost: int) -> None:
        self._groups.charge(client.group, cost)
        self._within[client.group].charge(client.peer, cost)

    def forget(self, client: Client) -> None:
        """Unless it has a session, or a request of it waits, it is soon forgotten."""
        if client not in self._sessions and (within := self._within.get(client.group)) is not None:
            within.forget(client.peer)
        if client.group not in self._sessions and (gone := self._groups.forget(client.group)) is not None:
            del self._within[gone]


class Turns:
    """The order of clients if each that has its turn is charged for it. The counters stay as they are."""

    def __init__(self, counters: ClientCounters) -> None:
        self._counters = counters
        self._of_groups: Counter[str] = Counter()
        self._of_clients: Counter[Client] = Counter()

    def given(self, client: Client) -> tuple[int, int]:
        group, own = self._counters.given(client)
        return group + self._of_groups[client.group], own + self._of_clients[client]

    def charge(self, client: Client, cost: int) -> None:
        self._of_groups[client.group] += cost
        self._of_clients[client] += cost


class Counters(Generic[K]):
    """The one with the lowest counter is next. A new one starts level with the lowest of those that wait.

    One that comes back is at most one request behind that, so nobody saves up turns while away. It is not quite level:
    else a client with small requests one at a time, which is away for a moment after each, would get fewer positions
    than one with large requests. Nobody pays for positions that nobody else wanted.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.given: dict[K, int] = {}
        self._remembered = remembered
        self._latest: dict[K, int] = {}  # what each was charged last
        self._queued: defaultdict[K, int] = defaultdict(int)  # requests of each that has any
        self._left: K | None = None  # the latest one that had nothing left in the queue
        self._gone: dict[K, None] = {}  # those without a session or a request, the latest last

    def enter(self, client: K) -> None:
        """One more of its requests waits."""
        self._gone.pop(client, None)
        if client not in self._queued:
            others = [*self._queued]
            if not others and self._left in self.given:
                others = [self._left]
            if (own := self.given.get(client)) is None:
                self.given[client] = min((self.given[each] for each in others), default=0)
            elif others != [client]:  # else nobody has come between
                before = (self.given[each] - self._latest.get(each, 0) for each in others)
                self.given[client] = max(own, min(before, default=0))
        self._queued[client] += 1

    def leave(self, client: K) -> None:
        """One of its requests waits no more."""
        self._queued[client] -= 1
        if not self._queued[client]:
            del self._queued[client]
            self._left = client

    def charge(self, client: K, cost: int) -> None:
        self.given[client] += cost
        self._latest[client] = cost

    def forget(self, client: K) -> K | None:
        """Called for one without a session. Unless a request of it waits, it is soon forgotten. Returns one that is."""
        if client in self._queued or client not in self.given:
            return None
        self._gone.pop(client, None)
        self._gone[client] = None
        if len(self._gone) <= self._remembered:
            return None
        oldest = next(iter(self._gone))
        for counters in (self.given, self._latest, self._gone):
            counters.pop(oldest, None)
        return oldest
