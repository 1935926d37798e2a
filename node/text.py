"""Generated text on a screen, as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from transformers.generation.streamers import BaseStreamer

from llmnode.models.text.streaming import TextStream

if TYPE_CHECKING:
    import torch

    from llmnode.models.text.tokenizer import Tokenizer


@dataclass
class ScreenStreamer(BaseStreamer):
    """Writes an answer's text as it comes, and remembers when. transformers hands it the prompt first.

    `text` is all of it when the answer has ended, as `models/text/streaming.py` says.
    """

    tokenizer: Tokenizer
    screen: TextIO
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    _stream: TextStream | None = None

    def put(self, value: torch.Tensor) -> None:
        token_ids = value.flatten().tolist()
        if self._stream is None:
            self._stream = TextStream(self.tokenizer, token_ids)
            return
        self.times_s += [time.perf_counter() - self.started_s] * len(token_ids)
        self.token_ids += token_ids
        self._show("".join(map(self._stream.add, token_ids)))

    def end(self) -> None:
        if self._stream is not None:
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
