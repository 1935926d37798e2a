"""`llmnode serve` for `tests/bench/run pipeline`: a block does not compute, it costs the time that it would take.

So more servers than there are cores can be tried on one machine: all else, from links to scheduling, is the real thing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from llmnode.compute.executor import SpanExecutor
from llmnode.node.cli import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer, Slice
    from llmnode.core.span import Span

BLOCK_S = 52e-3 / 30
"""Of one text's step through a block of SmolLM2-135M, on one core (`notes/compute.md`): a token, or a short prompt."""
COMPANION = 0.14
"""What each other text adds that is computed with it, of the first: as decodes of 2 to 8 by torch (tests/bench)."""


def main() -> NoReturn:
    def charge(_executor: SpanExecutor, span: Span, slices: Sequence[Slice]) -> Sequence[Buffer]:
        time.sleep(BLOCK_S * len(span) * (1 + COMPANION * (len(slices) - 1)))
        return [each.hidden for each in slices]

    setattr(SpanExecutor, "_run", charge)  # noqa: B010 - mypy takes it for a bound method
    run()


if __name__ == "__main__":
    main()
