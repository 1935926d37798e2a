"""Several texts at once: the recurrent pipeline (MDI-LLM, section 3.3.2).

A text's next token needs its last one, so with one text only one stage computes at a time. With one text for each
stage, each stage computes for another text. With more texts, no stage waits, and a server computes together all that
reach it at the same time.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import trio
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llmnode.errors import single_error
from llmnode.node.terminal import note, open_console
from llmnode.node.text import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from rich.console import Console
    from rich.progress import TaskID

T = TypeVar("T")
MOST_AT_ONCE = 48
"""By default: less than a server takes over one link (`ServePolicy.sessions_per_link`), as beginnings take some too."""
AT_ONCE_PER_STAGE = 4
"""Half of them are computed together, while the others are elsewhere or wait. Two, of which one waits for the other,
give four fifths of the tokens. Eight give a tenth more, for twice the KV (`tests/bench/FIGURES.md`)."""


@dataclass(slots=True)
class Meter:
    """How far everything is: on a terminal a bar for each text that is under way, else a line for each that is done."""

    texts: int
    _progress: Progress
    tokens: int = 0
    _all: TaskID = field(init=False)
    _under_way: dict[int, TaskID] = field(default_factory=dict)
    _done: int = 0
    _began_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._all = self._progress.add_task("texts", total=self.texts)

    def begin(self, number: int, name: str, max_new_tokens: int) -> None:
        self._under_way[number] = self._progress.add_task(name, total=max_new_tokens)

    def count(self, number: int) -> None:
        """One token more of a text that is under way."""
        self._progress.advance(self._under_way[number])

    def end(self, number: int, name: str, tokens: int) -> None:
        self._progress.remove_task(self._under_way.pop(number))
        self._progress.advance(self._all)
        self._done += 1
        self.tokens += tokens
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{name}: {counted(tokens, 'token')}; {self._done} of {self.texts} texts")

    @property
    def tokens_per_s(self) -> float:
        """That of all texts together until now."""
        return self.tokens / (time.perf_counter() - self._began_s)

    def summary(self) -> str:
        took_s = time.perf_counter() - self._began_s
        done = f"{counted(self.texts, 'text')}, {counted(self.tokens, 'token')}"
        return f"{done} in {took_s:.1f} s: {self.tokens_per_s:.1f} tokens/s"


@contextmanager
def metered(texts: int, console: Console | None = None) -> Iterator[Meter]:
    """Shows the progress of `texts` on stderr, or on another `console`."""
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
    note(meter.summary())


def default_at_once(stages: int) -> int:
    """How many texts keep all `stages` of a route busy."""
    return min(MOST_AT_ONCE, AT_ONCE_PER_STAGE * stages)


async def run_at_once(work: Sequence[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """All of `work`, in tasks, `at_once` of them at a time, begun in order.

    An error ends those that were begun later, and no more are begun. Those before it go on: they may yet be done. Then
    the error of the first that failed, in order, is raised.
    """
    places = trio.Semaphore(at_once)
    scopes = [trio.CancelScope() for _ in work]
    failed: dict[int, Exception] = {}

    async def run(number: int) -> None:
        try:
            with scopes[number], single_error():
                await work[number]()
        except Exception as error:  # noqa: BLE001 - it is raised when those before it have ended
            failed[number] = error
            for scope in scopes[number + 1 :]:
                scope.cancel()
        places.release()

    async with trio.open_nursery() as nursery:
        for number in range(len(work)):
            await places.acquire()
            if failed:
                break
            nursery.start_soon(run, number)
    if failed:
        raise failed[min(failed)]


def in_order(made: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
    """Numbered results, which come in any order, by their numbers from 0 on.

    If there will be no more, because of an error or an interrupt, those that are there come before it.
    """
    waiting: dict[int, T] = {}
    next_number = 0
    try:
        for number, each in made:
            waiting[number] = each
            while next_number in waiting:
                yield next_number, waiting.pop(next_number)
                next_number += 1
    except GeneratorExit:
        raise
    except BaseException:
        yield from sorted(waiting.items(), key=lambda item: item[0])
        raise
