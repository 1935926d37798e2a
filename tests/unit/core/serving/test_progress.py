"""Whether a process that takes long still gets on."""

from __future__ import annotations

from llmnode.core.serving.progress import Effort, Progress

PATIENCE_S = 10.0
BEGAN = Progress(Effort(1.0, 100), 5.0)


def test_who_shows_nothing_for_long_enough_is_stuck() -> None:
    assert not BEGAN.is_stuck(14.9, PATIENCE_S)
    assert BEGAN.is_stuck(15.0, PATIENCE_S)
    assert BEGAN.seen(Effort(1.0, 100), 14.0).is_stuck(15.0, PATIENCE_S)


def test_either_computing_or_reading_is_getting_on() -> None:
    for effort in (Effort(1.01, 100), Effort(1.0, 101), Effort(1.0, 99)):
        progress = BEGAN.seen(effort, 14.0)
        assert not progress.is_stuck(23.9, PATIENCE_S)
        assert progress.is_stuck(24.0, PATIENCE_S)
