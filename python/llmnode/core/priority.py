"""How urgent the work of a session is."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
    """The purpose of a session. Forwards of higher priority go first, until one of a lower has waited for long."""

    INTERACTIVE = 0
    BATCH = 1
    TRAINING = 2

    @property
    def word(self) -> str:
        """Its name for users and on the wire."""
        return self.name.lower()


PRIORITIES = {each.word: each for each in Priority}
