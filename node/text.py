"""Generated text on a screen, as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from transformers.generation.streamers import BaseStreamer

from llmnode.models.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    import torch


@dataclass
class ScreenStreamer(BaseStreamer):
    """Writes each token's text as it comes, and remembers when. transformers hands it the prompt first."""

    tokenizer: Tokenizer
    screen: TextIO
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    _stream: TextStream = field(init=False)
    _prompt_seen: bool = False

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer)

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times_s.append(time.perf_counter() - self.started_s)
        self.token_ids += value.flatten().tolist()
        self._show(self._stream.add(self.token_ids[-1]))

    def end(self) -> None:
        self._show(self._stream.finish())

    def speed_line(self) -> str:
        if not self.times_s:
            return "no token"
        decoding_s = self.times_s[-1] - self.times_s[0]
        speed = (len(self.times_s) - 1) / decoding_s if decoding_s else None
        return speed_line(len(self.times_s), self.times_s[0], speed)

    def _show(self, text: str) -> None:
        self.text += text
        self.screen.write(text)
        self.screen.flush()


def speed_line(tokens: int, first_s: float, tokens_per_s: float | None) -> str:
    speed = f", then {tokens_per_s:.1f} tokens/s" if tokens_per_s else ""
    return f"{tokens} tokens: the first after {first_s:.2f} s{speed}"
