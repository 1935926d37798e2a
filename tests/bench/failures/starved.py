"""`llmnode serve` for `tests/bench/run failures`: at a SIGUSR2 its blocks run out of memory, until the next one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

import torch

from llmnode.compute.executor import SpanExecutor
from llmnode.node.cli import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer, Slice

SIGNAL = signal.SIGUSR2
TOO_MANY_BYTES = 1 << 60


class Shortage:
    """Of memory, in everything that blocks compute: torch itself says so, in its own words."""

    def __init__(self) -> None:
        self._is_here = False

    def toggle(self, *_signal: object) -> None:
        self._is_here = not self._is_here

    def check(self) -> None:
        """Raises what torch raises."""
        if self._is_here:
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)


def main() -> NoReturn:
    shortage, compute = Shortage(), SpanExecutor.forward

    def forward(executor: SpanExecutor, slices: Sequence[Slice]) -> Sequence[Buffer]:
        shortage.check()
        return compute(executor, slices)

    signal.signal(SIGNAL, shortage.toggle)
    setattr(SpanExecutor, "forward", forward)  # noqa: B010 - mypy takes it for a bound method
    run()


if __name__ == "__main__":
    main()
