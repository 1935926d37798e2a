"""The ends of a model, for all that one client has under way: those who want scores at the same time share a product.

The head reads all of its weights, whether for one text or for several. So while it computes for one the others wait,
and are then scored together. Who comes alone waits for nobody.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import trio

from llmnode.models.text.vocabulary import check_tokens
from llmnode.models.weights.packed_ends import MOST_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llmnode.models.load import Ends

_THREADS = 64
"""Of tasks that wait for scores; others wait for one of them."""


@dataclass(slots=True, eq=False)
class _Asked:
    hidden: torch.Tensor
    scores: torch.Tensor | None = None


class SharedEnds:
    """`Ends` for several threads, and for tasks of trio."""

    def __init__(self, ends: Ends, written: Callable[[int], str | None] = lambda _token: None) -> None:
        """`written` is how the tokenizer writes a token, for messages."""
        self._ends = ends
        self._written = written
        self._threads = trio.CapacityLimiter(_THREADS)
        self._change = threading.Condition()
        self._asked: dict[_Asked, None] = {}
        """Of all who want scores, in the order in which they came."""
        self._turn: _Asked | None = None
        """Whose thread computes now, for others too."""

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a token that the model does not have, as `embed` does: but before any work."""
        check_tokens(token_ids, self._ends.vocabulary, self._written)

    def embed(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """As `Ends.embed`."""
        return self._ends.embed(list(token_ids), start)

    def embed_at(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `Ends.embed_at`."""
        return self._ends.embed_at(tokens, positions)

    def enter(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `Ends.enter`."""
        return self._ends.enter(embeddings, positions)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Ends.normed`."""
        return self._ends.normed(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Ends.logits`. Blocks while others are scored. An error is that of the thread in which it was raised."""
        asked = _Asked(hidden)
        try:
            while together := self._take_turn(asked):
                scores = self._ends.logits(torch.cat([each.hidden for each in together]))
                for each, own in zip(together, scores.split([len(each.hidden) for each in together]), strict=True):
                    each.scores = own
                with self._change:
                    self._change.notify_all()
        finally:  # an interrupt may come at any point
            with self._change:
                self._asked.pop(asked, None)
                if self._turn is asked:
                    self._turn = None
                self._change.notify_all()
        assert asked.scores is not None, "else it would be our turn"
        return asked.scores

    async def embed_beside(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """As `embed`, of more than one token in another thread."""
        if len(token_ids) == 1:  # it is one row to look up: less than the way to a thread and back
            return self.embed(token_ids, start)
        return await trio.to_thread.run_sync(self.embed, token_ids, start, limiter=self._threads)

    async def likeliest(self, hidden: torch.Tensor) -> int:
        """The token that most likely comes after `hidden` (1, hidden_size). Computed in another thread."""
        return await trio.to_thread.run_sync(lambda: int(self.logits(hidden).argmax()), limiter=self._threads)

    def _take_turn(self, asked: _Asked) -> list[_Asked]:
        """Wait until nobody else computes. For whom `asked` is to do so now: for nobody if it has its scores."""
        with self._change:
            self._asked.setdefault(asked)
            self._change.wait_for(lambda: asked.scores is not None or self._turn in (None, asked))
            if asked.scores is not None:
                return []
            self._turn = asked
            return _first(self._asked, MOST_ROWS)


def _first(asked: Iterable[_Asked], most: int) -> list[_Asked]:
    """The first one that has no scores, and those after it as far as all have `most` rows."""
    together: list[_Asked] = []
    rows = 0
    for each in asked:
        if each.scores is None:
            rows += len(each.hidden)
            if together and rows > most:
                break
            together.append(each)
    return together
