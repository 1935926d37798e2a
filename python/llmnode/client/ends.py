"""The ends of a model, for all texts that one client generates at a time: those that wait are scored together.

The head reads all of its weights, whether for one text or for several. So while it computes for one, the others wait,
and are then scored in one product. A text alone waits for nobody. Tasks of trio ask with `choose`; threads, as those
that call transformers' `generate`, with `logits`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import trio

from llmnode.models.packed_ends import MOST_ROWS
from llmnode.models.text.vocabulary import check_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llmnode.models.load import Ends

T = TypeVar("T")
A = TypeVar("A", "_ThreadRequest", "_TaskRequest")


@dataclass(slots=True, eq=False)
class _ThreadRequest:
    """Scores that a thread waits for."""

    hidden: torch.Tensor
    scores: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _TaskRequest:
    """A token that a task waits for."""

    hidden: torch.Tensor
    choose: Callable[[torch.Tensor], Any]  # Any: whatever the task makes of scores
    woken: trio.Event = field(default_factory=trio.Event)
    scores: None = None
    _chosen: Any = None
    _error: Exception | None = None

    def fulfil(self, scores: torch.Tensor) -> None:
        try:
            self._chosen = self.choose(scores)
        except Exception as error:  # noqa: BLE001 - it is raised in its own task, and not in the leader
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._chosen


class SharedEnds:
    """`Ends` for several threads, and for tasks of trio."""

    def __init__(self, ends: Ends, written: Callable[[int], str | None] = lambda _token: None) -> None:
        """`written` says how the tokenizer writes a token, for messages."""
        self._ends = ends
        self._written = written
        self._change = threading.Condition()
        self._thread_requests: dict[_ThreadRequest, None] = {}
        """All threads that want scores, in the order in which they came."""
        self._turn: _ThreadRequest | None = None
        """The thread that computes now, for others too."""
        self._thread = trio.CapacityLimiter(1)
        self._task_requests: list[_TaskRequest] = []
        """All tasks that want a token, in the order in which they came."""
        self._leader: _TaskRequest | None = None
        """The task that has the tokens of others chosen too."""

    def __deepcopy__(self, _memo: object) -> SharedEnds:
        """Itself: a copy of a model has other parameters, and makes others of those."""
        return self

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has."""
        return self._ends.vocabulary

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a token that the model does not have, before any work."""
        check_tokens(token_ids, self._ends.vocabulary, self._written)

    def embed(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """See `Ends.embed`."""
        return self._ends.embed(list(token_ids), start)

    def embed_at(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Ends.embed_at`."""
        return self._ends.embed_at(tokens, positions)

    def enter(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Ends.enter`."""
        return self._ends.enter(embeddings, positions)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Ends.normed`."""
        return self._ends.normed(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Ends.logits`. Blocks while others are scored. An error is raised in one thread, and others try again."""
        asked = _ThreadRequest(hidden)
        try:
            while together := self._take_turn(asked):
                scores = self._ends.logits(torch.cat([each.hidden for each in together]))
                for each, own in zip(together, scores.split([len(each.hidden) for each in together]), strict=True):
                    each.scores = own
                with self._change:
                    self._change.notify_all()
        finally:  # an interrupt may come at any point
            with self._change:
                self._thread_requests.pop(asked, None)
                if self._turn is asked:
                    self._turn = None
                self._change.notify_all()
        assert asked.scores is not None, "else it would be our turn"
        return asked.scores

    async def embed_beside(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """See `embed`. More than one token is embedded in another thread."""
        if len(token_ids) == 1:  # one row to look up costs less than the way to a thread and back
            return self.embed(token_ids, start)
        return await trio.to_thread.run_sync(self.embed, token_ids, start)

    async def choose(self, hidden: torch.Tensor, choose: Callable[[torch.Tensor], T]) -> T:
        """Score `hidden` (1, hidden_size), and return the result of `choose` for the scores (vocabulary).

        Both are done in another thread, for all tasks that wait for it together. One of them, the leader, starts it
        while the others wait. Raises the errors of `choose`.
        """
        own = _TaskRequest(hidden, choose)
        self._task_requests.append(own)
        try:
            while own in self._task_requests:
                if self._leader in (None, own):
                    self._leader = own
                    await self._fulfil(_first(self._task_requests, MOST_ROWS))
                else:
                    await own.woken.wait()
                    own.woken = trio.Event()
        finally:
            if own in self._task_requests:  # it was cancelled, or the scores failed
                self._task_requests.remove(own)
            if self._leader is own:
                self._leader = None
                if self._task_requests:
                    self._task_requests[0].woken.set()
        return cast("T", own.result())

    async def _fulfil(self, together: Sequence[_TaskRequest]) -> None:
        """It is not abandoned when the leader is cancelled: the others have their tokens all the same."""
        await trio.to_thread.run_sync(self._choose_all, together, limiter=self._thread)
        for each in together:
            if each in self._task_requests:
                self._task_requests.remove(each)
                each.woken.set()

    def _choose_all(self, together: Sequence[_TaskRequest]) -> None:
        scores = self.logits(torch.cat([each.hidden for each in together]) if len(together) > 1 else together[0].hidden)
        for each, own in zip(together, scores, strict=True):
            each.fulfil(own)

    def _take_turn(self, asked: _ThreadRequest) -> list[_ThreadRequest]:
        """Wait until nobody else computes. Returns those to score now, with `asked`; none if it has its scores."""
        with self._change:
            self._thread_requests.setdefault(asked)
            self._change.wait_for(lambda: asked.scores is not None or self._turn in (None, asked))
            if asked.scores is not None:
                return []
            self._turn = asked
            return _first(self._thread_requests, MOST_ROWS)


def _first(asked: Iterable[A], most: int) -> list[A]:
    """The first one that has no scores, and those after it as far as all have `most` rows."""
    together: list[A] = []
    rows = 0
    for each in asked:
        if each.scores is None:
            rows += len(each.hidden)
            if together and rows > most:
                break
            together.append(each)
    return together
