"""How long forwards take on this machine. Knows no clock: what they took is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.policy import BatchPolicy

_KEEPS = 0.7
_FIT_KEEPS = 0.95
_LEAST_SPREAD = 0.05
"""Of how many decode at once, relative to its square: the variance from which on it is seen what each adds."""
_FIRST_ADDS = 4
"""What the first decode takes beside what each takes, as long as that is not seen."""


class ForwardCost:
    """How long forwards take here, and so how many positions of prefills one may have."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self.decode_s = 0.0
        """A forward of decodes alone; 0 until there was one."""
        self._position_s = 0.0  # what each position of a prefill adds, a block
        self._decodes = _Line()

    @property
    def forward_s(self) -> float:
        """What a forward of decodes takes beside what each of them adds; 0 until there was one."""
        return self._decodes.start

    def note(self, decodes: int, prefill: int, through: float, took_s: float) -> None:
        """`decodes` are positions; `prefill` positions by blocks, which went through this share of them all."""
        if not prefill:
            self.decode_s = _mixed(self.decode_s, took_s)
            self._decodes.note(decodes, took_s)
        else:
            added_s = max(took_s - through * self.decode_s, took_s / (100 if decodes else 2))
            self._position_s = _mixed(self._position_s, added_s / prefill)

    def blocks(self, positions: int, of: int, room: int) -> int:
        """Through how many of so many blocks there is time for positions: each block's weights are read, too."""
        weights = int(self.decode_s / of / self._position_s) if self._position_s else 0
        return room // (positions + weights)

    def room(self, *, beside_decodes: bool) -> int | None:
        """Positions that there is time for, each through one block. None if that is not known yet."""
        policy = self._policy
        if not self._position_s or (beside_decodes and not self.decode_s):
            return None
        may_add_s = (policy.stretch - 1) * self.decode_s if beside_decodes else policy.prefill_s
        return int(may_add_s / self._position_s)


class _Line:
    """The one that is nearest to what was noted lately, by least squares."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # means, variance and covariance
        self._rise: float | None = None

    @property
    def start(self) -> float:
        """Its height at 0."""
        rise = self._y / (_FIRST_ADDS + self._x) if self._rise is None else self._rise
        return max(0.0, self._y - rise * self._x)

    def note(self, x: float, y: float) -> None:
        self._weight = _FIT_KEEPS * self._weight + 1
        share = 1 / self._weight
        off_x, off_y = x - self._x, y - self._y
        self._x, self._y = self._x + share * off_x, self._y + share * off_y
        self._xx = (1 - share) * (self._xx + share * off_x * off_x)
        self._xy = (1 - share) * (self._xy + share * off_x * off_y)
        if self._xx > _LEAST_SPREAD * self._x**2:
            self._rise = max(0.0, self._xy / self._xx)


def _mixed(before_s: float, took_s: float) -> float:
    return _KEEPS * before_s + (1 - _KEEPS) * took_s if before_s else took_s
