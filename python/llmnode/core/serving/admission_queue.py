"""Decides which sessions get KV memory on a server, and in which order they wait for it. Knows no clock: it is told the
time.

Among the waiting sessions, higher priorities come first, then the clients that hold the least, then the oldest. A
session that fits does not wait for one that does not fit. But after some times of being passed over, memory is kept
free until the large one fits.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.priority import Priority


@dataclass(slots=True)
class _Session:
    client: PeerId
    priority: Priority
    positions: int
    since_s: float
    """When it was put in line; once it has come in, when that was."""
    passed_over: int = 0


class AdmissionQueue:
    """A server's KV memory of `positions`. A session is put in line with `add`, comes in with `admit`, and goes with
    `remove`.
    """

    def __init__(self, positions: int, policy: AdmissionPolicy) -> None:
        self.positions = positions
        self._policy = policy
        self._inside: dict[SessionId, _Session] = {}
        self._line: dict[SessionId, _Session] = {}
        self._held: Counter[PeerId] = Counter()  # positions of each client
        self._stays_s: deque[float] = deque(maxlen=policy.stays_kept)

    @property
    def free(self) -> int:
        return self.positions - self._held.total()

    @property
    def line(self) -> int:
        """How many wait."""
        return len(self._line)

    def has_place(self, client: PeerId) -> bool:
        """Whether one more session of it may wait."""
        own = sum(each.client == client for each in self._line.values())
        return len(self._line) < self._policy.line and own < self._policy.line_per_client

    def add(self, session: SessionId, client: PeerId, priority: Priority, positions: int, now_s: float) -> None:
        """Put it in line. With more `positions` than there are, it would wait for ever."""
        assert positions <= self.positions
        self._line[session] = _Session(client, priority, positions, now_s)

    def admit(self, now_s: float) -> Sequence[SessionId]:
        """Those that come in now, in order."""
        admitted: list[SessionId] = []
        while (session := self._next(now_s)) is not None:
            entering = self._inside[session] = self._line.pop(session)
            entering.since_s = now_s
            self._held[entering.client] += entering.positions
            admitted.append(session)
        return admitted

    def remove(self, session: SessionId, now_s: float) -> None:
        """It has ended, or waits no longer. An unknown one does nothing."""
        self._line.pop(session, None)
        if (left := self._inside.pop(session, None)) is not None:
            self._stays_s.append(now_s - left.since_s)
            self._held[left.client] -= left.positions
            if not self._held[left.client]:
                del self._held[left.client]

    def retry_after_s(self, positions: int, now_s: float) -> float:
        """The time until `positions` may be free, after all that wait, if sessions stay as long as they have till
        now.
        """
        policy, held = self._policy, self._held.total()
        waiting = sum(each.positions for each in self._line.values())
        missing = positions + waiting - self.free
        # Those that are still here count too, or only short ones would: the likeliest mean of an exponential stay.
        here_s = sum(now_s - each.since_s for each in self._inside.values())
        stay_s = (sum(self._stays_s) + here_s) / max(1, len(self._stays_s))
        estimate_s = stay_s * missing / held if held else 0.0
        return max(policy.least_retry_s, min(estimate_s, policy.longest_retry_s))

    def _next(self, now_s: float) -> SessionId | None:
        """The next session that comes in. Those before it have been passed over once more."""

        def turn(session: SessionId) -> tuple[int, int]:
            each = self._line[session]
            aged = int((now_s - each.since_s) / self._policy.ageing_s)
            return max(0, each.priority - aged), self._held[each.client]

        passed: list[_Session] = []
        for session in sorted(self._line, key=turn):
            each = self._line[session]
            if each.positions <= self.free:
                for other in passed:
                    other.passed_over += 1
                return session
            if each.passed_over >= self._policy.passed_over:
                return None
            passed.append(each)
        return None
