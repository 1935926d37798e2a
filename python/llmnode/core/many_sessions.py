"""The throughput of a number of sessions that decode at once: each waits for its own token before it asks for the next.

It is a closed queueing network. Its stations are servers. One computes in one forward all decodes that have come during
the forward before, and each decode adds a time to the forward (gated batch service). A session is at the servers or
away: on its way, or with its client. Knows no clock: all times are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.speed import SHARED_SESSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.span import Span

HALVINGS = 50
"""The rate is found by halving an interval this often."""


@dataclass(frozen=True, slots=True)
class SharedServer:
    """A server of `span`, and the time of its forwards of decodes."""

    span: Span
    alone_s: float
    """A forward with one decode, through all blocks of the span."""
    further_s: float
    """The time that each further decode adds."""

    @property
    def weight(self) -> float:
        """Its share of the sessions, beside others of the same blocks: its rate with `SHARED_SESSIONS` decodes."""
        return SHARED_SESSIONS / self.forward_s(SHARED_SESSIONS)

    def forward_s(self, decodes: float) -> float:
        """The time of a forward with this number of `decodes`."""
        return self.alone_s + (decodes - 1) * self.further_s

    def decodes(self, tokens_per_s: float) -> float:
        """The decodes of a forward, if this rate of them comes: as many as come during one, and at least one."""
        left = 1 - tokens_per_s * self.further_s
        return inf if left <= 0 else max(1.0, tokens_per_s * (self.alone_s - self.further_s) / left)

    def stay_s(self, tokens_per_s: float, others: float) -> float:
        """The time of one decode here: it waits for the forward that runs when it comes, and is in the next one.

        `others` is the share of the sessions that it may meet: 0 if it is the only one.
        """
        forward_s = self.forward_s(self.decodes(tokens_per_s))
        return forward_s * (1 + others * min(1.0, tokens_per_s * self.alone_s) / 2)


def many_sessions_tokens_per_s(blocks: int, servers: Sequence[SharedServer], sessions: int, away_s: float) -> float:
    """The tokens/s of this number of `sessions` together through blocks 0 to `blocks`; 0 while a block has no server.

    At each block, sessions are with its `servers` in proportion to their rates. `away_s` is the time of a token in
    which a session is at no server.
    """
    weights = [0.0] * blocks
    for each in servers:
        for block in range(each.span.start, min(each.span.end, blocks)):
            weights[block] += each.weight
    if not all(weights):
        return 0.0
    shares = [
        (each, sum(each.weight / weights[block] for block in range(each.span.start, end)) / len(each.span))
        for each in servers
        if (end := min(each.span.end, blocks)) > each.span.start
    ]
    others = 1 - 1 / sessions
    least, most = 0.0, sessions / (away_s + min(each.alone_s for each, _ in shares))
    for _ in range(HALVINGS):
        rate = (least + most) / 2
        token_s = away_s + sum(share * each.stay_s(share * rate, others) for each, share in shares)
        least, most = (rate, most) if rate * token_s < sessions else (least, rate)
    return least
