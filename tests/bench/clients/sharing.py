"""Decodes beside a prefill or training, each compared with itself alone, for `tests/bench/run clients`.

`BatchPolicy.stretch` says how both share a forward. Its effect is measured on a worker, without a network.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import trio

from bench.kit.drawing import axes_in
from bench.kit.report import Row, percentile, ratios, spread
from llmnode.compute.load_executor import load_executor
from llmnode.compute.thread_worker import ThreadWorker
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Close, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.wire.frame import Buffer

    Act = Callable[[], Awaitable[object]]

BEFORE = 5
"""The number of decodes before the other work begins."""
PREFILL = "a prefill"
CHUNK = 512
MOST_POSITIONS = 2000
STRETCHES = (1.25, 1.5, BatchPolicy().stretch, 2.25, 3.0)
WHOLE = BatchPolicy(stretch=1e6, prefill_s=1e6, unmeasured_prefill=CHUNK)
"""A policy that computes each chunk whole when it comes."""


@dataclass(slots=True)
class Sharing:
    """One way to share, with a value for each round."""

    name: str
    policy: BatchPolicy = field(default_factory=BatchPolicy)
    work: str = PREFILL
    """The kind of work beside the decodes."""
    decode_ms: list[float] = field(default_factory=list)
    """95th percentiles: alone (`decode_ms`), and beside the work (`beside_ms`)."""
    beside_ms: list[float] = field(default_factory=list)
    slowest_ms: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    slower_s: list[float] = field(default_factory=list)
    """The time of the work beside the decodes."""

    @property
    def kind(self) -> str:
        """The thing that is measured: a worker or a server."""
        return self.name.partition(",")[0]

    @property
    def decode_times(self) -> list[float]:
        return ratios(self.beside_ms, self.decode_ms)

    @property
    def work_times(self) -> list[float]:
        return ratios(self.slower_s, self.work_s)

    def row(self) -> Row:
        return {
            "level": f"decodes beside {self.work}",
            "variant": self.name,
            "p95, ms": spread(self.beside_ms),
            "slowest, ms": spread(self.slowest_ms),
            "p95, of alone": spread(self.decode_times),
            "work, s": spread(self.slower_s),
            "work, of alone": spread(self.work_times),
        }


async def measure_sharing(
    sharing: Sharing, open_decoder: Callable[[], AbstractAsyncContextManager[Act]], work: Act, decodes: int
) -> None:
    """Measure the work alone, then the given number of decodes alone, then both at once."""
    work_s = await _seconds(work)
    async with open_decoder() as decode:
        alone = [await _seconds(decode) for _ in range(decodes)]
        beside: list[float] = []
        async with trio.open_nursery() as nursery:
            working = trio.Event()

            async def decode_on() -> None:
                for number in count():
                    began_s = time.perf_counter()
                    await decode()
                    if number >= BEFORE:
                        beside.append(time.perf_counter() - began_s)
                    if number == BEFORE - 1:
                        working.set()

            nursery.start_soon(decode_on)
            await working.wait()
            slower_s = await _seconds(work)
            nursery.cancel_scope.cancel()
    sharing.work_s.append(work_s)
    sharing.slower_s.append(slower_s)
    sharing.decode_ms.append(1e3 * percentile(alone, 0.95))
    sharing.beside_ms.append(1e3 * percentile(beside, 0.95))
    sharing.slowest_ms.append(1e3 * max(beside))


def plot(ways: Sequence[Sharing], path: Path) -> None:
    """The trade-off of each way to share: the time of decodes beside a prefill, against that of the prefill."""
    with axes_in(path, "bench clients", "time of the prefill, of alone", "p95 of decodes, of alone") as axes:
        axes.loglog()
        for axis, ticks in ((axes.xaxis, (1, 1.5, 2, 3, 4, 5)), (axes.yaxis, (1, 2, 3, 5, 10, 30, 100, 300))):
            axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks], minor=False)
            axis.set_ticks([], minor=True)
        beside_prefill = [each for each in ways if each.work == PREFILL]
        sides = {"worker": ("bottom", 30), "server": ("top", -30)}  # these two points are near each other
        for kind, (side, turn) in sides.items():
            of_kind = [each for each in beside_prefill if each.kind == kind]
            points = sorted((median(each.work_times), median(each.decode_times), each.name) for each in of_kind)
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", label=kind)
            for x, y, name in points:
                name = name.removeprefix(f"{kind}, ")
                axes.annotate(f"  {name}", (x, y), va=side, rotation=turn, rotation_mode="anchor")
        axes.margins(0.12, 0.15)
        axes.legend()


def workers(*, thin: bool) -> list[Sharing]:
    """A `Sharing` for each policy."""
    stretches = STRETCHES[2:3] if thin else STRETCHES
    stretched = [Sharing(f"worker, stretch {stretch:g}", BatchPolicy(stretch=stretch)) for stretch in stretches]
    return [*stretched, Sharing("worker, chunks whole", WHOLE)]


class Workers:
    """One executor of the whole model, used by the workers in turn. Made by `load_workers`."""

    def __init__(self, executor: SpanExecutor, hidden: Buffer, row_bytes: int, decodes: int) -> None:
        """`hidden` is the input of the prefill, `row_bytes` the size of a position."""
        self._executor = executor
        self._hidden = memoryview(hidden)
        self._row_bytes = row_bytes
        self._decodes = decodes

    async def measure(self, sharing: Sharing) -> None:
        worker = ThreadWorker(self._executor, sharing.policy)
        await measure_sharing(sharing, lambda: self._open_decoder(worker), lambda: self._prefill(worker), self._decodes)

    @asynccontextmanager
    async def _open_decoder(self, worker: ThreadWorker) -> AsyncIterator[Act]:
        session, positions = SessionId(b"decoder".ljust(16)), count()
        assert await worker.do(Open(session, worker.span, MOST_POSITIONS, PeerId("decoder")))
        row = self._hidden[: self._row_bytes]

        async def decode() -> None:
            position = next(positions) % MOST_POSITIONS
            if position == 0:  # decodes beside a long prefill are many on a fast machine
                await worker.do(Truncate(session, 0))
            await worker.do(Forward(session, position, 1, row))

        yield decode
        await worker.do(Close(session))

    async def _prefill(self, worker: ThreadWorker) -> None:
        session = SessionId(b"prefill".ljust(16))
        length = len(self._hidden) // self._row_bytes
        assert await worker.do(Open(session, worker.span, length, PeerId("prefill")))
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            hidden = self._hidden[start * self._row_bytes : end * self._row_bytes]
            await worker.do(Forward(session, start, end - start, hidden))
        await worker.do(Close(session))


def load_workers(folder: ModelFolder, hidden: Buffer, decodes: int) -> Workers:
    """Load the model. It takes seconds."""
    executor = load_executor(folder, Span(0, folder.info.blocks), kv_tokens=3 * MOST_POSITIONS)
    return Workers(executor, hidden, folder.info.row_bytes, decodes)


async def _seconds(act: Act) -> float:
    began_s = time.perf_counter()
    await act()
    return time.perf_counter() - began_s
