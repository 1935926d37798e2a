"""A worker process that does exact arithmetic, and its loader, as a node has them."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from llmnode.compute.loading import Wanted
from llmnode.compute.process_loader import ProcessLoader
from llmnode.core.policy import WorkerPolicy
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.compute.batching import BatchingWorker

CHILD = (sys.executable, str(Path(__file__).with_name("exact_child.py")))
SPAN = Span(1, 4)
LENGTH = 2000
DEADLINE_S = 60.0


@dataclass
class Told:
    lines: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event, compare=False)

    def hear(self, line: str) -> None:
        self.lines.append(line)
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, line: str, times: int) -> None:
        """Until the line has come this many times."""
        while self.lines.count(line) < times:
            await self.changed.wait()


@asynccontextmanager
async def open_loader(
    told: Told | None = None, model: str | None = None, kv_memory: str | None = None, **policy: float | int
) -> AsyncIterator[ProcessLoader]:
    told = told or Told()
    loader = ProcessLoader(
        Wanted(model, kv_tokens=10 * LENGTH, kv_memory=kv_memory),
        told.hear,
        told.lost.append,
        CHILD,
        WorkerPolicy(pause_s=0.0, **policy),  # type: ignore[arg-type]
    )
    with trio.fail_after(DEADLINE_S):
        try:
            yield loader
        finally:
            await loader.end()


@asynccontextmanager
async def open_worker(**policy: float | int) -> AsyncIterator[tuple[ProcessLoader, BatchingWorker]]:
    async with open_loader(**policy) as loader:  # type: ignore[arg-type]
        await loader.open_model()
        yield loader, await loader.load(SPAN)
