"""Frames that nobody waits for: a burst, more for what we send ourselves, and a rate."""

from __future__ import annotations

from llmnode.core.links.unasked import BURST, EACH, PER_S, UnaskedFrames


def too_many(frames: UnaskedFrames, now_s: float, most: int = 4 * BURST) -> int:
    """The number of frames that are taken at this time."""
    return next(number for number in range(most) if frames.count(now_s))


def test_a_burst_is_taken_and_what_we_send_never_allows_for_more_than_one() -> None:
    frames = UnaskedFrames(0.0)
    frames.allow()
    assert too_many(frames, 0.0) == BURST


def test_each_frame_that_we_send_allows_for_some_more() -> None:
    frames = UnaskedFrames(0.0)
    for _ in range(BURST):
        assert not frames.count(0.0)
    frames.allow()
    assert too_many(frames, 0.0) == EACH


def test_they_may_come_at_a_rate_for_ever() -> None:
    frames = UnaskedFrames(0.0)
    for number in range(4 * BURST):
        assert not frames.count(number / PER_S)
    assert too_many(frames, 4 * BURST / PER_S) <= BURST + 1
