"""Whether something that the other side has begun goes on fast enough to be waited for. The time is told."""

from __future__ import annotations


class Pace:
    """One thing at a time is watched: after a grace it must have moved `bytes_per_s` on average."""

    def __init__(self, grace_s: float, bytes_per_s: float) -> None:
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s
        self._number: int | None = None
        self._began_s = 0.0
        self._moved_bytes = 0

    def note(self, number: int | None, moved_bytes: int, now_s: float) -> None:
        """Thing `number` is under way, and has moved `moved_bytes` in all. None: nothing is."""
        if number is None or number != self._number:
            self._number, self._began_s = number, now_s
        self._moved_bytes = moved_bytes

    def is_too_slow(self, now_s: float) -> bool:
        if self._number is None:
            return False
        return now_s - self._began_s > self._grace_s + self._moved_bytes / self._bytes_per_s
