"""A client's ends, which count the time for which they compute."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from llmnode.client.connect import ClientParts
    from llmnode.models.load import Ends


class TimedEnds:
    """`Ends` that count the seconds, by `clock`, for which they have computed."""

    def __init__(self, ends: Ends, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ends = ends
        self._clock = clock
        self.busy_s = 0.0

    @property
    def vocabulary(self) -> int:
        return self._ends.vocabulary

    def embed(self, token_ids: list[int], start: int) -> torch.Tensor:
        began_s = self._clock()
        hidden = self._ends.embed(token_ids, start)
        self.busy_s += self._clock() - began_s
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        began_s = self._clock()
        scores = self._ends.logits(hidden)
        self.busy_s += self._clock() - began_s
        return scores

    def within(self, parts: ClientParts) -> ClientParts:
        """`parts` with these ends."""
        return replace(parts, ends=cast("Ends", self))
