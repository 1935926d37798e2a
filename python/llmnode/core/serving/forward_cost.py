"""Learns how long forwards take on this machine. Knows no clock: it is told their times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.speed import ForwardsSeen

if TYPE_CHECKING:
    from llmnode.core.policy import BatchPolicy

_OLD_SHARE = 0.7
_FIT_OLD_SHARE = 0.95
_LEAST_SPREAD = 0.05
"""Below this relative variance of the number of decodes in a batch, the cost of one decode is not fitted."""
_LEAST_ALONE, _MOST_SINCE_ALONE = 16, 1000
"""The time of a forward with one decode is the average of those that had one, after this number of them, and until
there were this number of others since. Else it is taken from the line through the times of all."""
_FIXED_COST_DECODES = 4
"""Until it is measured, the fixed cost of a forward is taken to be that of this many decodes."""


class ForwardCost:
    """The times of forwards, and so the number of prefill positions that one may have."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self.decode_s = 0.0
        """The time of a forward of decodes alone; 0 until there was one."""
        self._position_s = 0.0  # for each position of a prefill and each block, beside decodes as there are now
        self._prompt_position_s = 0.0  # the same beside none
        self._decodes = _Fit()
        self._in_block = _Fit()
        self._alone_s = 0.0  # of a forward with one decode, for each block
        self._alone = 0  # the number of these forwards
        self._since_alone = 0
        self._forwards = 0

    @property
    def seen(self) -> ForwardsSeen:
        """The times of the forwards until now, for each block."""
        in_block = self._in_block
        has_alone = self._alone >= _LEAST_ALONE and self._since_alone < _MOST_SINCE_ALONE
        decode_s = self._alone_s if has_alone else in_block.at(1)
        return ForwardsSeen(self._forwards, decode_s, self._prompt_position_s, in_block.x, in_block.y)

    @property
    def forward_s(self) -> float:
        """The time of a forward of decodes without the part that each decode adds; 0 until there was one."""
        return self._decodes.start

    def note(self, decodes: int, prefill: int, through: float, took_s: float) -> None:
        """A forward took `took_s`.

        `decodes` counts positions; `prefill` counts positions times blocks. The prefills went through the share
        `through` of all blocks.
        """
        if not prefill:
            self.decode_s = mixed(self.decode_s, took_s)
            self._decodes.note(decodes, took_s)
        else:
            least_s = took_s / (100 if decodes else 2)
            added_s = max(took_s - through * self.decode_s, least_s)
            self._position_s = mixed(self._position_s, added_s / prefill)
            added_s = max(took_s - through * self._decodes.at(decodes), least_s)
            self._prompt_position_s = mixed(self._prompt_position_s, added_s / prefill)

    def note_decodes(self, in_blocks: int, blocks: int, took_s: float) -> None:
        """That forward had decodes alone. It ran this number of `blocks`: one that decodes ran apart counts each time.

        `in_blocks` is the sum of the decodes in each of them.
        """
        self._forwards += 1
        self._in_block.note(in_blocks / blocks, took_s / blocks)
        self._since_alone += 1
        if in_blocks == blocks:
            self._alone, self._since_alone = self._alone + 1, 0
            share = max(1 - _FIT_OLD_SHARE, 1 / self._alone)
            self._alone_s += share * (took_s / blocks - self._alone_s)

    def blocks(self, positions: int, of: int, budget: int) -> int:
        """The number of blocks, out of `of`, that there is time for. `budget` is in positions times blocks.

        Reading the weights of each block takes time, too.
        """
        weights = int(self.decode_s / of / self._position_s) if self._position_s else 0
        return budget // (positions + weights)

    def budget(self, *, beside_decodes: bool) -> int | None:
        """The positions times blocks that there is time for. None if that is not known yet."""
        policy = self._policy
        if not self._position_s or (beside_decodes and not self.decode_s):
            return None
        may_add_s = (policy.stretch - 1) * self.decode_s if beside_decodes else policy.prefill_s
        return int(may_add_s / self._position_s)


class _Fit:
    """The line that fits the latest points best, by least squares."""

    def __init__(self) -> None:
        self.x = self.y = 0.0
        """The means of the latest points."""
        self._weight = self._xx = self._xy = 0.0  # the latter are the variance and the covariance
        self._rise: float | None = None

    @property
    def start(self) -> float:
        """Its height at 0."""
        return self.at(0)

    def at(self, x: float) -> float:
        """Its height at `x`."""
        rise = self.y / (_FIXED_COST_DECODES + self.x) if self._rise is None else self._rise
        return max(0.0, self.y + rise * (x - self.x))

    def note(self, x: float, y: float) -> None:
        self._weight = _FIT_OLD_SHARE * self._weight + 1
        share = 1 / self._weight
        off_x, off_y = x - self.x, y - self.y
        self.x, self.y = self.x + share * off_x, self.y + share * off_y
        self._xx = (1 - share) * (self._xx + share * off_x * off_x)
        self._xy = (1 - share) * (self._xy + share * off_x * off_y)
        if self._xx > _LEAST_SPREAD * self.x**2:
            self._rise = max(0.0, self._xy / self._xx)


def mixed(before_s: float, took_s: float) -> float:
    """A moving average of times. `before_s` is 0 if this is the first."""
    return _OLD_SHARE * before_s + (1 - _OLD_SHARE) * took_s if before_s else took_s
