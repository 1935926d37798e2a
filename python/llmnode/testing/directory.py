"""The `Directory` port in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.ids import PeerId


class MemoryDirectory:
    """One for all nodes. Like the DHT it knows no better than what was last published, the dead included."""

    def __init__(self, *, delay_s: float = 0.2) -> None:
        self._delay_s = delay_s
        self._published: dict[PeerId, SignedAnnouncement] = {}

    async def publish(self, signed: SignedAnnouncement) -> None:
        await trio.sleep(self._delay_s)
        self._published[signed.announcement.peer] = signed

    async def find(self, model_digest: bytes) -> Sequence[SignedAnnouncement]:
        await trio.sleep(self._delay_s)
        return [
            each for each in self._published.values() if each.announcement.offer.profile.model_digest == model_digest
        ]
