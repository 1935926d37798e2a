"""`llmnode serve` for the benchmark `table2`: blocks that compute nothing, and hold a resource for the time of BLOOM's.

A resource stands for one of the paper's three A100. It serves one forward at a time, whichever of its servers asks. All
else, from links to scheduling, is real.
"""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect
from pathlib import Path
from typing import TYPE_CHECKING

from bench.pipeline.charged import ChargedExecutor
from llmnode.compute.loading import SpanLoader
from llmnode.node.cli import main, run
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer, Pass, Slice
    from llmnode.core.span import Span
    from llmnode.ports import Executor

VARIABLE = "BENCH_TABLE2_RESOURCES"
"""The environment variable with the folder for the locks of the resources."""
BLOCKS = 70
ENDS = (24, 47, BLOCKS)
"""The resources have the blocks up to these."""
SHORT, LONG = 128, 2048
STEP_S = {SHORT: 1 / 1.35, LONG: 1 / 1.23}
"""The step of the whole model in one server with three A100, at these positions: the paper's upper bound."""
POSITIONS_PER_S = 286.6
"""Positions a second of large forwards there, with all three at work: what each does of its own blocks."""


def decode_s(position: int, blocks: int) -> float:
    """The time of a step at `position` through some blocks."""
    rise_s = (STEP_S[LONG] - STEP_S[SHORT]) / (LONG - SHORT)
    return (STEP_S[SHORT] + rise_s * (position - SHORT)) * blocks / BLOCKS


def positions_s(positions: int, blocks: int) -> float:
    """The time of `positions` of prompts or passes through some blocks."""
    return positions / POSITIONS_PER_S * blocks * len(ENDS) / BLOCKS


def resource_of(span: Span) -> int:
    return bisect(ENDS, span.start)


class Resource:
    """Held by one process at a time. One that gives it back and wants it again comes after those that wait."""

    def __init__(self, lock: Path) -> None:
        """All processes name the same `lock`, a file that need not be there yet."""
        self._lock = lock.open("w")
        self._next = lock.with_suffix(".next").open("w")

    def hold(self, seconds: float) -> None:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            time.sleep(seconds)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class ExclusiveExecutor(ChargedExecutor):
    """A forward holds a resource for the times of all its requests: together they are no faster than one by one."""

    def __init__(self, real: Executor, resource: Resource) -> None:
        super().__init__(real)
        self._resource = resource

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        seconds = 0.0
        for each in slices:
            blocks = len(each.blocks(self._spans[each.session]))
            seconds += decode_s(each.start, blocks) if each.length == 1 else positions_s(each.length, blocks)
        self._resource.hold(seconds)
        return [self._passed(each) for each in slices]

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        self._resource.hold(sum(positions_s(each.positions, len(each.span)) for each in passes))
        return [each.hidden for each in passes]


class ExclusiveLoader(SpanLoader):
    """The servers of one resource share a lock."""

    def load(self, span: Span) -> Loaded:
        loaded = super().load(span)
        resource = Resource(Path(os.environ[VARIABLE]) / str(resource_of(span)))
        return Loaded(ExclusiveExecutor(loaded.executor, resource), loaded.tensor_bytes)

    def load_beside(self, _span: Span, _held: Executor, _kv_tokens: int) -> None:
        """Its servers stay with their blocks."""


if __name__ == "__main__":
    run(lambda: main(make_loader=ExclusiveLoader))
