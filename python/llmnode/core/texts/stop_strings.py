"""Stop strings in a text that comes in pieces: what may begin one is held back, and what follows one is never given.

Whether a token completes a stop string is not decided here: `client/stopping.py` asks transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopText:
    """The text of an answer, without the stop string that ends it."""

    def __init__(self, strings: Sequence[str], prompt: str = "") -> None:
        """A stop string may begin in the text of the `prompt`."""
        self._strings = [string for string in strings if string]
        self._reach = max(map(len, self._strings), default=1) - 1
        """The most characters that may be a part of a stop string, and not all of it."""
        self._before = self._end_of(prompt)
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that can be given now. The rest may begin a stop string."""
        self._held += piece
        return self._give(len(self._held) - min(len(self._held), self._beginning()))

    def finish(self, rest: str, *, stopped: bool) -> str:
        """The last piece. If a stop string was completed (`stopped`), it ends before the first one that is there."""
        self._held += rest
        return self._give(self._cut() if stopped else len(self._held))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        self._before = self._end_of(self._before + given)
        return given

    def _beginning(self) -> int:
        """Characters at the end that a stop string may begin with."""
        text = self._before + self._held
        ends = (text[-length:] for length in range(min(self._reach, len(text)), 0, -1))
        return next((len(end) for end in ends if any(string.startswith(end) for string in self._strings)), 0)

    def _cut(self) -> int:
        """Where in what is held the first stop string begins that ends there; all of it if none does.

        transformers looks at tokens: it may see a stop string in one that says nothing.
        """
        before, text = len(self._before), self._before + self._held
        found = [text.find(string, max(0, before - len(string) + 1)) for string in self._strings]
        begins = [at for at in found if at >= 0]
        return max(0, min(begins) - before) if begins else len(self._held)

    def _end_of(self, text: str) -> str:
        return text[-self._reach :] if self._reach else ""
