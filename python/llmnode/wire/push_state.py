"""Whether a hop pushes its results to the next one, and when it is asked to again after that went wrong.

Knows no clock: the time is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.peers.bans import Bans

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import PushPolicy


class PushState:
    """The pushes of one hop of a session."""

    def __init__(self, policy: PushPolicy) -> None:
        self.is_trusted = True
        """If it is False, the hop is not asked: two hops contradicted each other about a push."""
        self.receiver: PeerId | None = None
        """The peer that it pushes to: the hop has said so, and nothing has gone wrong since."""
        self._policy = policy
        self._failed: set[PeerId] = set()
        self._pauses = Bans(policy.retry_s, policy.longest_retry_s)
        self._asked_later_s = 0.0

    @property
    def works(self) -> bool:
        """Whether a result that it says to have pushed is likely to have arrived."""
        return self.is_trusted and self.receiver is not None

    @property
    def has_failed(self) -> bool:
        """Whether it may have to be told its neighbours anew between any two steps."""
        return bool(self._failed)

    def has_failed_to(self, receiver: str) -> bool:
        return receiver in self._failed

    def is_wanted_to(self, receiver: PeerId, now_s: float) -> bool:
        """Whether it is to be asked now."""
        waits = now_s < self._asked_later_s or self._pauses.is_banned(receiver, now_s)
        return self.is_trusted and not (waits and receiver in self._failed)

    def forget(self, receiver: PeerId) -> None:
        """It is to push to this one no more: whether it could is of no interest."""
        self._failed.discard(receiver)

    def fail(self, receiver: PeerId, now_s: float, retry_after_s: float | None = None) -> None:
        """It cannot push to `receiver`, or a push got lost. It may say when it will know more."""
        self.receiver = None
        self._failed.add(receiver)
        if retry_after_s is None:
            self._pauses.report(receiver, now_s)
        else:
            pause_s = min(max(retry_after_s, self._policy.retry_s), self._policy.longest_retry_s)
            self._asked_later_s = now_s + pause_s
