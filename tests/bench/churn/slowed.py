"""`llmnode serve` for the benchmark `churn`: real blocks that take longer, by a time that the environment gives.

All waits of placement and of the swarm are a few times shorter than users have them, so that a run takes minutes.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from llmnode.compute.loading import SpanLoader
from llmnode.core.operations import Close, Open
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.policy import SwarmPolicy
from llmnode.node.cli import main, run
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Buffer, Control, Pass, Slice
    from llmnode.core.span import Span
    from llmnode.ports import Executor

VARIABLE = "LLMNODE_BENCH_SLOWER_US"
LIFETIME_S, ANNOUNCE_S = 15.0, 5.0
"""A killed server is out of all views after the first of these."""
SOONER: dict[type, dict[str, float]] = {
    SwarmPolicy: {"lifetime_s": LIFETIME_S, "announce_every_s": ANNOUNCE_S},
    RebalancePolicy: {
        "check_every_s": 12.0,
        "gap_check_every_s": 2.0,
        "turn_s": 4.0,
        "rest_s": 24.0,
        "absent_s": 60.0,
        "failed_s": 60.0,
    },
}


class SlowedExecutor:
    """The `Executor` port over a real one. Each block of a forward takes `slower_s` more."""

    def __init__(self, real: Executor, slower_s: float) -> None:
        self.span, self.kv_page, self.passes_beside = real.span, real.kv_page, real.passes_beside
        self.real = real
        self._slower_s = slower_s
        self._spans: dict[SessionId, Span] = {}

    def kv_tokens_free(self) -> int:
        return self.real.kv_tokens_free()

    def apply(self, operation: Control) -> bool:
        match operation:
            case Open(session, span):
                self._spans[session] = span
            case Close(session):
                self._spans.pop(session, None)
        return self.real.apply(operation)

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        time.sleep(self._slower_s * max(len(each.blocks(self._spans[each.session])) for each in slices))
        return self.real.forward(slices)

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        return self.real.run(passes)


class SlowedLoader(SpanLoader):
    """Makes executors that are slower by what the environment says."""

    def load(self, span: Span) -> Loaded:
        return _slowed(super().load(span))

    def load_beside(self, span: Span, held: Executor, kv_tokens: int) -> Loaded | None:
        assert isinstance(held, SlowedExecutor)
        loaded = super().load_beside(span, held.real, kv_tokens)
        return loaded and _slowed(loaded)


def _slowed(loaded: Loaded) -> Loaded:
    return Loaded(SlowedExecutor(loaded.executor, int(os.environ[VARIABLE]) / 1e6), loaded.tensor_bytes)


def hurry() -> None:
    """Have policies of this process the values of `SOONER`."""
    for policy, values in SOONER.items():
        made = policy.__init__  # type: ignore[misc]  # that of a dataclass
        names, defaults = [*policy.__dataclass_fields__], list(made.__defaults__ or ())  # type: ignore[attr-defined]
        for name, value in values.items():
            defaults[names.index(name)] = value
        made.__defaults__ = tuple(defaults)


if __name__ == "__main__":
    hurry()
    run(lambda: main(make_loader=SlowedLoader))
