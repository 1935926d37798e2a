"""The conditions for frames on their way from one peer to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

RETRANSMIT_S = 0.2
"""TCP waits at least this long before it sends a lost packet again; each further wait lasts twice the one before."""


@dataclass(frozen=True, slots=True, repr=False)
class Conditions:
    """How frames fare from one peer to another. By default they take a while, and that is all.

    Frames of one link arrive in order whatever happens, as over any stream; those of two links need not. So one that is
    lost is late, and holds up those behind it; a link that brings nothing for as long as `LinkPolicy.silence_s` dies.
    """

    delay_s: float = 0.01
    """One way."""
    jitter_s: float = 0.0
    """Each frame takes up to this much longer, at random."""
    bytes_per_s: float = math.inf
    """The rate of one link in one direction: frames wait for those before them."""
    loss: float = 0.0
    """The share of sendings that get lost, and are repeated."""
    duplication: float = 0.0
    """The share of frames that are delivered twice, of the kinds that may be: all but `link.ASKED_ONCE`."""

    def __repr__(self) -> str:
        """The values that differ from the default, as Python."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return f"Conditions({', '.join(f'{each.name}={value}' for each, value in values if value != each.default)})"

    def travel_s(self, rng: random.Random, patience_s: float) -> float:
        """How long a frame is under way once it has been sent; more than `patience_s` means that it never arrives."""
        took_s = self.delay_s
        if self.jitter_s:
            took_s += rng.uniform(0, self.jitter_s)
        retry_s = max(RETRANSMIT_S, 2 * self.delay_s)
        while self.loss and took_s <= patience_s and rng.random() < self.loss:
            took_s += retry_s
            retry_s *= 2
        return took_s
