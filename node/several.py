"""Several texts at once: the recurrent pipeline (MDI-LLM, section 3.3.2).

A text's next token needs its last one, so that of one text alone a single stage computes at a time. With as many under
way as there are stages each computes for another text; with more, none of them waits, and a server computes those
together that reach it at the same time.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from rich.progress import TaskID

    from llmnode.client.cache import SessionCache
    from llmnode.client.model import DistributedModelForCausalLM

T = TypeVar("T")
AT_ONCE_PER_STAGE = 2
"""One that is computed, and one that waits for it."""


@dataclass(slots=True)
class Meter:
    """How far everything is: on a terminal a bar for each text that is under way, else a line for each that is done."""

    texts: int
    _progress: Progress
    _all: TaskID = field(init=False)
    _done: int = 0
    tokens: int = 0
    _began_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._all = self._progress.add_task("texts", total=self.texts)

    @contextmanager
    def text(self, name: str, max_new_tokens: int) -> Iterator[TokenCounter]:
        """One of them, for as long as it is under way."""
        task = self._progress.add_task(name, total=max_new_tokens)
        counter = TokenCounter(lambda: self._progress.advance(task))
        yield counter
        self._progress.remove_task(task)
        self._progress.advance(self._all)
        self._done += 1
        self.tokens += counter.tokens
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{name}: {counter.tokens} tokens; {self._done} of {self.texts} texts")

    def summary(self) -> str:
        took_s = time.perf_counter() - self._began_s
        return f"{self.texts} texts, {self.tokens} tokens in {took_s:.1f} s: {self.tokens / took_s:.1f} tokens/s"


class Prompt:
    """What several texts begin with. It is run once, and the servers copy its KV for each; of one text it is not."""

    def __init__(self, model: DistributedModelForCausalLM, token_ids: Sequence[int], texts: int) -> None:
        self._model = model
        self._token_ids = token_ids
        self._left = texts
        self._source: SessionCache | None = None
        self._lock = threading.Lock()
        if texts == 1 or len(token_ids) == 1:  # the last token is run by each: what follows it is theirs
            self._left = 0

    def cache(self, max_length: int) -> SessionCache:
        """For one of the texts. Who comes while the prompt is run waits for that."""
        with self._lock:
            if not self._left:
                return self._model.open_cache(max_length, priority="batch")
            if self._source is None:
                self._source = self._run()
            cache = self._source.copy(max_length)
            self._left -= 1
            if not self._left:
                self._source.close()
            return cache

    def _run(self) -> SessionCache:
        import torch

        given = torch.tensor([self._token_ids[:-1]])
        with ExitStack() as stack:
            source = stack.enter_context(self._model.open_cache(given.shape[1], priority="batch"))
            self._model(given, past_key_values=source, logits_to_keep=1)
            stack.pop_all()
        return source


class TokenCounter(BaseStreamer):
    """Tells of each token; transformers hands it the prompt first."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tokens = -1
        self._tell = tell

    def put(self, _value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens:
            self._tell()

    def end(self) -> None:
        """All of them have been told of."""


@contextmanager
def metered(texts: int) -> Iterator[Meter]:
    """On stderr."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        meter = Meter(texts, progress)
        yield meter
    print(meter.summary(), file=sys.stderr)


def all_at_once(
    model: DistributedModelForCausalLM, work: Sequence[Callable[[], T]], at_once: int | None
) -> Iterator[T]:
    """What each of `work` returns, in order; so many of them at a time, by default what keeps every stage busy.

    If one fails, or the caller is interrupted, the model is closed, which ends the others.
    """
    at_once = at_once or AT_ONCE_PER_STAGE * len(model.route)
    with ThreadPoolExecutor(min(at_once, len(work)), thread_name_prefix="text") as pool:
        futures = [pool.submit(each) for each in work]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            model.close()
            raise
