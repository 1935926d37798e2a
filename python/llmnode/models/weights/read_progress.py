"""How far the blocks of a span have been read, said in a line now and then. Does not know its reader or its
listener.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.core.span import Span

TOLD_EVERY_S = 2.0
"""At most: of a span that is read sooner nothing is said."""


class Reading:
    """The progress over the blocks of `span`, one after the other; `clock` is in seconds."""

    def __init__(
        self, span: Span, quant: str, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._span = span
        self._quant = quant
        self._report = report
        self._clock = clock
        self._rounding_s = 0.0

    def blocks(self) -> Iterator[int]:
        """Each is read when the next is asked for."""
        began_s = told_s = self._clock()
        for read, block in enumerate(range(self._span.start, self._span.end), 1):
            yield block
            now_s = self._clock()
            if now_s - told_s >= TOLD_EVERY_S:
                told_s = now_s
                rounding = f", {self._rounding_s:.0f} s of it rounding to {self._quant}" if self._rounding_s else ""
                self._report(f"read {read} of {len(self._span)} blocks in {now_s - began_s:.0f} s{rounding}")

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """The context of code that quantizes a block."""
        began_s = self._clock()
        yield
        self._rounding_s += self._clock() - began_s


def say_nothing(_line: str) -> None:
    """A `report` that nobody hears."""
