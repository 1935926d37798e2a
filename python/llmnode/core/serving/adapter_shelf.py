"""The adapters that a server keeps, and those that make way when another needs the memory. The time is told.

An adapter counts for the client that brought it, within the shares that a peer and an address group may have. When a
share is full, an adapter of the largest group there makes way: of the peer that holds most, the one that was unused for
longest; never one that is in use. To find it takes a time that hardly grows with the number of adapters.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.budget import Kind, Resource
from llmnode.core.fair_shares import FairShares

if TYPE_CHECKING:
    from llmnode.core.budget import Scope
    from llmnode.core.ids import AdapterId

ENTRY_BYTES = 1 << 14
"""An adapter costs this much besides its parts. It is more than it takes, so that nobody has thousands of them."""


@dataclass(slots=True, eq=False)
class Shelved:
    """An adapter on the shelf. `scope` is its own, within that of its client. The shelf alone changes it."""

    adapter: AdapterId
    scope: Scope
    used_s: float
    blocks: set[int] = field(default_factory=set)
    """The blocks whose parts are here."""
    users: int = 0
    """Sessions, passes and transfers. While there are any it stays."""

    def holding(self, kind: Kind) -> int:
        """All that the group or peer holds that brought it."""
        around = self.scope.of_kind(kind)
        return 0 if around is None else around.held[Resource.ADAPTERS]


@dataclass(slots=True)
class _Client:
    """The peer that brought some adapters, and its address group."""

    path: tuple[Scope | None, Scope | None]
    adapters: int = 0
    unused: OrderedDict[Shelved, None] = field(default_factory=OrderedDict)
    """The one that was used last is the last."""


class AdapterShelf:
    """The adapters that one worker holds, by their digests."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._shelved: dict[AdapterId, Shelved] = {}
        self._clients: dict[Scope | None, _Client] = {}
        self._shares: FairShares[Scope | None] = FairShares()
        """The clients. Those whose adapters are all in use stay."""
        self._rng = random.Random(0)  # decides nothing: a client is the only member of its path
        self._unused: OrderedDict[Shelved, None] = OrderedDict()
        """Those of all clients, in the same order."""

    def __len__(self) -> int:
        return len(self._shelved)

    def find(self, adapter: AdapterId) -> Shelved | None:
        return self._shelved.get(adapter)

    def put(self, adapter: AdapterId, around: Scope, now_s: float) -> Shelved:
        """A new adapter without parts, for the client whose scope is `around`. It holds nothing yet."""
        shelved = Shelved(adapter, around.open(Kind.SESSION, "an adapter"), now_s)
        self._shelved[adapter] = shelved
        group, peer = (shelved.scope.of_kind(kind) for kind in (Kind.GROUP, Kind.PEER))
        self._clients.setdefault(peer, _Client((group, peer))).adapters += 1
        self._offer(shelved)
        return shelved

    def touch(self, shelved: Shelved, now_s: float) -> None:
        """Its client has asked for it."""
        shelved.used_s = now_s
        if not shelved.users and self._has(shelved):
            for unused in (self._client(shelved).unused, self._unused):
                unused.move_to_end(shelved)

    def use(self, shelved: Shelved, now_s: float) -> None:
        """It stays until the same number of calls of `release`."""
        shelved.used_s = now_s
        shelved.users += 1
        if shelved.users == 1 and self._has(shelved):
            self._withhold(shelved)

    def release(self, shelved: Shelved, now_s: float) -> None:
        shelved.used_s = now_s
        shelved.users -= 1
        if not shelved.users and self._has(shelved):
            self._offer(shelved)

    def free_memory(self, shelved: Shelved, size_bytes: int) -> tuple[bool, list[Shelved]]:
        """Whether it holds this much more now, and the adapters that have made way."""
        gone: list[Shelved] = []
        if not shelved.scope.could_hold(Resource.ADAPTERS, size_bytes):
            return False, gone
        self.use(shelved, shelved.used_s)
        try:
            while (full := shelved.scope.reserve(Resource.ADAPTERS, size_bytes)) is not None:
                if full.is_closed or (victim := self._victim(full, shelved)) is None:
                    return False, gone
                self.remove(victim)
                gone.append(victim)
        finally:
            self.release(shelved, shelved.used_s)
        return True, gone

    def give_back(self, shelved: Shelved, size_bytes: int) -> None:
        """It does not hold this much after all."""
        if self._has(shelved):
            shelved.scope.release(Resource.ADAPTERS, size_bytes)
            self._count(self._client(shelved))

    def remove(self, shelved: Shelved) -> None:
        """Nothing of it counts any more. Safe to call twice."""
        if not self._has(shelved):
            return
        del self._shelved[shelved.adapter]
        client = self._client(shelved)
        client.adapters -= 1
        client.unused.pop(shelved, None)
        self._unused.pop(shelved, None)
        shelved.scope.close()
        self._count(client)

    def remove_idle(self, now_s: float) -> list[Shelved]:
        """Remove those that nothing uses, nor has used for long, and return them."""
        idle: list[Shelved] = []
        while self._unused and now_s - (first := next(iter(self._unused))).used_s >= self._idle_s:
            self.remove(first)
            idle.append(first)
        return idle

    def _victim(self, full: Scope, asker: Shelved) -> Shelved | None:
        """None if everything within `full` is in use."""
        path = self._client(asker).path
        within = path[: path.index(full) + 1] if full in path else ()
        try:
            client = self._clients[self._shares.victim(self._rng, within)]
        except KeyError:
            return None
        return next(iter(client.unused))

    def _has(self, shelved: Shelved) -> bool:
        """One that was removed while in use may be released later."""
        return self._shelved.get(shelved.adapter) is shelved

    def _client(self, shelved: Shelved) -> _Client:
        return self._clients[shelved.scope.of_kind(Kind.PEER)]

    def _offer(self, shelved: Shelved) -> None:
        """It may make way from now on, after all others."""
        client = self._client(shelved)
        for unused in (client.unused, self._unused):
            unused[shelved] = None
        self._count(client)

    def _withhold(self, shelved: Shelved) -> None:
        client = self._client(shelved)
        for unused in (client.unused, self._unused):
            del unused[shelved]
        self._count(client)

    def _count(self, client: _Client) -> None:
        """The client holds another amount, or has something that nothing uses, or nothing more."""
        _, peer = client.path
        if not client.adapters:
            del self._clients[peer]
            self._shares.remove(peer)
            return
        held = 0 if peer is None else peer.held[Resource.ADAPTERS]
        self._shares.put(peer, client.path, held, stays=not client.unused)
