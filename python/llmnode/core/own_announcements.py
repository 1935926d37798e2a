"""Our own announcements: their numbers, and whether another node announces itself with our identity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.view import is_news

if TYPE_CHECKING:
    from llmnode.core.announcement import Announcement
    from llmnode.core.policy import SwarmPolicy


class OwnAnnouncements:
    """Numbers our announcements, and tells them from those that another node has made with our key."""

    def __init__(self, policy: SwarmPolicy, now_ms: int) -> None:
        self._policy = policy
        self._began_ms = self._former_ms = now_ms
        self._said_again_s = self._double_until_s = -math.inf
        self._sequence = 0
        self._said: set[int] = set()
        self._double: Announcement | None = None

    def double(self, now_s: float) -> Announcement | None:
        """The announcement of another node that uses our identity; None if there is none, or it is long ago."""
        return self._double if now_s < self._double_until_s else None

    def next_sequence(self, now_ms: int) -> int:
        """The sequence number of the announcement that we make now, the newest of all that bear our name.

        A clock may be set back, as NTP does after a start with a wrong one. Former numbers that are now further in the
        future than peers tolerate, by a lifetime, were believed by nobody. So the numbers begin anew.
        """
        if self._sequence > now_ms + int(1000 * (self._policy.clock_skew_s + self._policy.lifetime_s)):
            self._sequence, self._began_ms, self._former_ms = 0, now_ms, now_ms
        self._sequence = max(now_ms, self._sequence + 2)
        ours = {self._sequence, self._sequence - 1}  # the second one is of the form for protocol 1
        lifetime_ms = int(1000 * self._policy.lifetime_s)
        self._said = {each for each in self._said if each + lifetime_ms > now_ms} | ours
        return self._sequence

    def is_foreign(self, announcement: Announcement) -> bool:
        """Whether another node with our key made it since we began.

        Our own former run made its announcements before that. Since then it says at most that it has left.
        """
        is_former = announcement.sequence <= self._former_ms or announcement.offer.state is PeerState.LEFT
        return not is_former and announcement.sequence not in self._said

    def take_foreign(self, announcement: Announcement, now_ms: int, now_s: float) -> bool:
        """Another node announces itself with our identity. Returns whether we have to announce ourselves again at once.

        Others believe the newest announcement, so ours must be newer. The first that is ahead of our clock may be from
        our former run, before this clock was set back.
        """
        self._sequence = max(self._sequence, announcement.sequence)
        if announcement.sequence > now_ms and self._former_ms == self._began_ms:
            self._former_ms = announcement.sequence
            again = True
        else:
            known, self._double = self.double(now_s), announcement
            self._double_until_s = now_s + 2 * self._policy.lifetime_s
            again = known is None or is_news(known, announcement)
            # Else it may never hear of us, since its next announcement is newer than ours.
            again = again or now_s > self._said_again_s + self._policy.announce_every_s / 3
        if again:
            self._said_again_s = now_s
        return again
