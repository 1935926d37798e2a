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

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.generation.streamers import BaseStreamer

from llmnode.core.texts.shared_prefix import shared_beginnings
from llmnode.errors import PeerRefused
from llmnode.node.terminal import open_console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from rich.console import Console
    from rich.progress import TaskID

    from llmnode.client.cache import SessionCache
    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.core.route import Route

T = TypeVar("T")
MOST_AT_ONCE = 48
"""By default: less than a server takes over one link (`ServePolicy.sessions_per_link`), as beginnings take some too."""
AT_ONCE_PER_STAGE = 4
"""Half of them are computed, together, while the others are elsewhere or wait. Two, of which one waits for the other,
come to four fifths of the tokens, and eight to a tenth more for twice the KV (`tests/bench/README.md`, pipeline)."""


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
        try:
            yield counter
        finally:
            self._progress.remove_task(task)
        self._progress.advance(self._all)
        self._done += 1
        self.tokens += counter.tokens
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{name}: {counter.tokens} tokens; {self._done} of {self.texts} texts")

    def summary(self) -> str:
        took_s = time.perf_counter() - self._began_s
        return f"{self.texts} texts, {self.tokens} tokens in {took_s:.1f} s: {self.tokens / took_s:.1f} tokens/s"


class Beginning:
    """Tokens that several texts begin with. They are run once for all texts of a route, whose servers copy their KV.

    What holds that KV meanwhile takes room beside the texts. If there is none, each text runs all of it.
    """

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        token_ids: Sequence[int],
        takers: int,
        within: Beginning | None = None,
    ) -> None:
        """Of so many `takers`; `within` is what it begins with itself, of which it is one taker."""
        self._model = model
        self._token_ids = token_ids
        self._takers = takers
        self._within = within
        self._is_shared = takers > 1 and len(token_ids) > 0
        self._sources: dict[tuple[Route, ...], SessionCache] = {}
        self._lock = threading.Lock()

    def cache(self, max_length: int) -> SessionCache:
        """For one of the takers, and to be closed by it. Who comes while the tokens are run waits for that."""
        with ExitStack() as stack:
            try:
                cache = self._model.open_cache(max_length, priority="batch", waits=not self._takes_room())
            except PeerRefused:
                self._give_up()
                cache = self._model.open_cache(max_length, priority="batch")
            stack.enter_context(cache)
            self._fill(cache)
            stack.pop_all()
        self._count_taker()
        return cache

    def _fill(self, cache: SessionCache) -> None:
        """Have an empty cache stand after these tokens; or after those that are not left to it."""
        with self._lock:
            source = self._source_for(cache) if self._is_shared else None
            if source is not None:
                cache.become(source)
            elif self._within is not None:
                self._within._fill(cache)

    def _source_for(self, cache: SessionCache) -> SessionCache | None:
        """What stands after them at the peers of `cache`, run now if it is the first there; None without room."""
        if cache.routes in self._sources:
            return self._sources[cache.routes]
        try:
            source = cache.open_beside(len(self._token_ids))
        except PeerRefused:
            self._is_shared = False
            self._close_sources()
            return None
        with ExitStack() as stack:
            stack.enter_context(source)
            if self._within is not None:
                self._within._fill(source)
            rest = torch.tensor([self._token_ids[source.columns :]])
            if rest.numel():
                self._model(rest, cache=source, logits_to_keep=1)
            stack.pop_all()
        self._sources[cache.routes] = source
        return source

    def _takes_room(self) -> bool:
        return bool(self._sources) or (self._within is not None and self._within._takes_room())

    def _give_up(self) -> None:
        with self._lock:
            self._is_shared = False
            self._close_sources()
        if self._within is not None:
            self._within._give_up()

    def _count_taker(self) -> None:
        with self._lock:
            self._takers -= 1
            if self._takers:
                return
            self._close_sources()
        if self._within is not None:
            self._within._count_taker()

    def _close_sources(self) -> None:
        while self._sources:
            self._sources.popitem()[1].close()


def beginnings(model: DistributedModelForCausalLM, prompts: Sequence[Sequence[int]], samples: int) -> list[Beginning]:
    """For each prompt, what its texts go on from: all but its last token, after which each is on its own."""
    found: list[Beginning] = []
    for run in shared_beginnings(prompts):
        together = Beginning(model, prompts[run.texts.start][: run.tokens], len(run.texts))
        found += [Beginning(model, prompts[text][:-1], samples, together) for text in run.texts]
    return found


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
def metered(texts: int, console: Console | None = None) -> Iterator[Meter]:
    """On stderr, unless on another `console`."""
    console = console or open_console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # else what is printed into a file or pipe would go to the console too
    ) as progress:
        meter = Meter(texts, progress)
        yield meter
    print(meter.summary(), file=sys.stderr)


def all_at_once(
    model: DistributedModelForCausalLM, work: Sequence[Callable[[], T]], at_once: int | None
) -> Iterator[T]:
    """What each of `work` returns, in order; so many of them at a time, by default what keeps every stage busy.

    If one fails, or the caller is interrupted while it waits, those that are done come before the error. The model is
    closed, which ends the others.
    """
    at_once = at_once or min(MOST_AT_ONCE, AT_ONCE_PER_STAGE * len(model.route))
    with ThreadPoolExecutor(min(at_once, len(work)), thread_name_prefix="text") as pool:
        futures = [pool.submit(each) for each in work]
        try:
            for number, future in enumerate(futures):
                try:
                    made = future.result()
                except BaseException:
                    yield from _done(futures[number:])
                    raise
                yield made
        except BaseException:
            for future in futures:
                future.cancel()
            model.close()
            raise


def _done(futures: Sequence[Future[T]]) -> Iterator[T]:
    """What has been made; those that have not begun never will."""
    for future in futures:
        future.cancel()
    for future in futures:
        if future.done() and not future.cancelled() and future.exception() is None:
            yield future.result()
