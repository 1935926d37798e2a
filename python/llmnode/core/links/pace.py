"""Whether frames that have begun go on fast enough to be waited for. The time is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Pace:
    """One thing at a time is watched. It may be a grace behind `bytes_per_s` at first, and never more than two graces.

    So a burst buys one more grace: other connections of a slow uplink may hold up the thing for a while. It is too slow
    if it stands still for longer than that.
    """

    def __init__(self, grace_s: float, bytes_per_s: float, most_gap_s: float) -> None:
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s
        self._most_gap_s = most_gap_s
        self._number: int | None = None
        self._moved_bytes = 0
        self._noted_s = 0.0
        self._paused_s = 0.0
        self._left_s = 0.0
        """The time for which the thing may stand still from now on."""
        self._excused_s = 0.0
        """The further time for which it may stand still because of us."""

    def note(self, number: int | None, moved_bytes: int, now_s: float, paused_s: float = 0.0) -> None:
        """Thing `number` is under way, and has moved `moved_bytes` in all. None: nothing is.

        We have kept it waiting for `paused_s` in all, since the beginning of time. It is excused a grace of that, or
        it could have itself kept waiting for ever. Time in which we did not look counts as `most_gap_s` at most: the
        machine was suspended, or busy, and what has come meanwhile is yet to be read.
        """
        if number is None or number != self._number:
            self._left_s = self._excused_s = self._grace_s
        else:
            passed_s = min(now_s - self._noted_s, self._most_gap_s)
            excused_s = min(paused_s - self._paused_s, passed_s, self._excused_s)
            self._excused_s -= excused_s
            gained_s = (moved_bytes - self._moved_bytes) / self._bytes_per_s + excused_s
            self._left_s = min(2 * self._grace_s, self._left_s + gained_s - passed_s)
        self._number, self._moved_bytes, self._noted_s, self._paused_s = number, moved_bytes, now_s, paused_s

    def is_too_slow(self) -> bool:
        """At the time that was noted last."""
        return self._number is not None and self._left_s < 0


class LinkPaces:
    """The paces of a link: of the frames that arrive, and of what the other side is to read."""

    def __init__(self, grace_s: float, bytes_per_s: float, most_gap_s: float) -> None:
        self._arriving = [Pace(grace_s, bytes_per_s, most_gap_s) for _ in range(2)]
        self._leaving = Pace(grace_s, bytes_per_s, most_gap_s)
        self._paused_s = 0.0
        self._paused_since_s: float | None = None

    def pause(self, now_s: float) -> None:
        """We read nothing from now on, for want of memory or because others do not take what came."""
        self._paused_since_s = now_s

    def resume(self, now_s: float) -> None:
        if self._paused_since_s is not None:
            self._paused_s += now_s - self._paused_since_s
            self._paused_since_s = None

    def are_too_slow(
        self, arriving: Iterable[tuple[int | None, int]], leaving: tuple[int | None, int], now_s: float
    ) -> bool:
        """Whether one of them is, with the number and the moved bytes of each thing that is under way now."""
        paused_s = self._paused_s + (0.0 if self._paused_since_s is None else now_s - self._paused_since_s)
        for pace, (number, moved_bytes) in zip(self._arriving, arriving, strict=True):
            pace.note(number, moved_bytes, now_s, paused_s)
        self._leaving.note(*leaving, now_s)
        return any(pace.is_too_slow() for pace in (*self._arriving, self._leaving))
