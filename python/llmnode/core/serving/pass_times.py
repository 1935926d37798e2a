"""How a pass is cut into parts, by the times that parts of earlier passes took. Knows no clock: it is told times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.operations import Evaluate
from llmnode.core.serving.forward_cost import mixed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Pass

_LEAST_POSITIONS = 32
"""Fewer positions take nearly the time of this number: reading the weights takes most of it."""
_LEAST_TOGETHER = 64
"""A backward of fewer positions together is slow. With more blocks than there is time for, it goes through some."""
_STRETCH = 1.5
"""A part may take this many times its time if it then goes through all blocks that are left."""


class PassTimes:
    """Those of one worker, for all its clients."""

    def __init__(self) -> None:
        self._position_s: dict[type[Pass], float] = {}
        """In one block."""

    def note(self, passes: Sequence[Pass], took_s: float) -> None:
        """Passes of one kind went through the same blocks together in this time. Few positions say little."""
        if (positions := sum(each.positions for each in passes)) >= _LEAST_POSITIONS:
            kind, blocks = type(passes[0]), len(passes[0].span)
            self._position_s[kind] = mixed(self._position_s.get(kind, 0.0), took_s / (positions * blocks))

    def blocks(self, kind: type[Pass], positions: int, blocks: int, time_s: float | None) -> int:
        """The blocks, out of `blocks`, that `positions` go through in `time_s`. One if that time is not known yet."""
        if time_s is None or not (position_s := self._position_s.get(kind)):
            return 1
        block_s = position_s * max(positions, _LEAST_POSITIONS)
        if blocks * block_s <= _STRETCH * time_s:
            return blocks
        return max(1, int(time_s / block_s))

    def positions(self, kind: type[Pass], most: int, blocks: int, time_s: float | None) -> int:
        """The positions, out of `most`, that go together through `blocks` blocks.

        In a forward it is all of them. In a backward it is those that go through all blocks in `time_s`, since these
        are then computed once. If that time is not known yet, or is too short for enough positions, it is all.
        """
        if kind is Evaluate or time_s is None or not (position_s := self._position_s.get(kind)):
            return most
        fitting = int(time_s / (position_s * blocks))
        return most if fitting < _LEAST_TOGETHER else min(most, fitting)
