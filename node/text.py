"""Generated text on a screen, as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.client.generate import Finish, Token
    from llmnode.node.terminal import Pieces


@dataclass
class ScreenText:
    """Writes an answer's text as it comes, and remembers it, and when its tokens came."""

    screen: Pieces
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    _started_s: float = field(default_factory=time.perf_counter)
    _times_s: list[float] = field(default_factory=list)

    def show(self, token: Token) -> None:
        self._times_s.append(time.perf_counter() - self._started_s)
        self.token_ids.append(token.id)
        self.text += token.text
        self.finish = token.finish
        self.screen.write(token.text)

    @property
    def first_s(self) -> float:
        """When its first token came; 0 while none has."""
        return self._times_s[0] if self._times_s else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The speed after the first token; None if there was no other."""
        decoding_s = self._times_s[-1] - self.first_s if self._times_s else 0.0
        return (len(self._times_s) - 1) / decoding_s if decoding_s else None

    def speed_line(self) -> str:
        if not self._times_s:
            return "no token"
        return speed_line(len(self._times_s), self.first_s, self.tokens_per_s)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def speed_line(tokens: int, first_s: float, tokens_per_s: float | None) -> str:
    speed = f", then {tokens_per_s:.1f} tokens/s" if tokens_per_s else ""
    return f"{counted(tokens, 'token')}: the first after {first_s:.2f} s{speed}"
