"""The adapters that a server keeps, and those that make way when another needs the memory. The time is told.

An adapter counts for the client that brought it, within the shares that a peer and an address group may have. When a
share is full, the adapter of the largest group there that was unused for longest makes way; never one that is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.budget import Kind, Resource

if TYPE_CHECKING:
    from llmnode.core.budget import Scope
    from llmnode.core.ids import AdapterId

ENTRY_BYTES = 1 << 14
"""An adapter costs this much besides its parts. It is more than it takes, so that nobody has thousands of them."""


@dataclass(slots=True, eq=False)
class Shelved:
    """An adapter on the shelf. `scope` is its own, within that of its client."""

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


class AdapterShelf:
    """The adapters that one worker holds, by their digests."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._shelved: dict[AdapterId, Shelved] = {}

    def __len__(self) -> int:
        return len(self._shelved)

    def find(self, adapter: AdapterId) -> Shelved | None:
        return self._shelved.get(adapter)

    def put(self, adapter: AdapterId, around: Scope, now_s: float) -> Shelved:
        """A new adapter without parts, for the client whose scope is `around`. It holds nothing yet."""
        shelved = Shelved(adapter, around.open(Kind.SESSION, "an adapter"), now_s)
        self._shelved[adapter] = shelved
        return shelved

    def free_memory(self, shelved: Shelved, size_bytes: int) -> tuple[bool, list[Shelved]]:
        """Whether it holds this much more now, and the adapters that have made way."""
        gone: list[Shelved] = []
        if not shelved.scope.could_hold(Resource.ADAPTERS, size_bytes):
            return False, gone
        while (full := shelved.scope.reserve(Resource.ADAPTERS, size_bytes)) is not None:
            if full.is_closed or (victim := self._victim(full, shelved)) is None:
                return False, gone
            self.remove(victim)
            gone.append(victim)
        return True, gone

    def remove(self, shelved: Shelved) -> None:
        """Nothing of it counts any more. Safe to call twice."""
        if self._shelved.get(shelved.adapter) is shelved:
            del self._shelved[shelved.adapter]
        shelved.scope.close()

    def remove_idle(self, now_s: float) -> list[Shelved]:
        """Remove those that nothing uses, nor has used for long, and return them."""
        unused = [each for each in self._shelved.values() if not each.users]
        idle = [each for each in unused if now_s - each.used_s >= self._idle_s]
        for each in idle:
            self.remove(each)
        return idle

    def _victim(self, full: Scope, asker: Shelved) -> Shelved | None:
        unused = [each for each in self._shelved.values() if not each.users and each is not asker]
        within = [each for each in unused if full in each.scope.around]
        return min(
            within, key=lambda each: (-each.holding(Kind.GROUP), -each.holding(Kind.PEER), each.used_s), default=None
        )
