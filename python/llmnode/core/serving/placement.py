"""The blocks that a server should hold: those where the swarm is slowest (Petals, section 3.2)."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.span import Span
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.announcement import Offer


def counted(offers: Iterable[tuple[Offer, float]], joins_within_s: float) -> list[tuple[Span, float]]:
    """The spans that count for placement, and their speeds. With each offer comes the age of its state in seconds.

    Words of those that do not serve yet must not keep others away from blocks: a peer that joins counts for
    `joins_within_s`, at the median speed of those that serve.
    """
    offers = [(offer, age_s) for offer, age_s in offers if offer.state in (PeerState.JOINING, PeerState.ONLINE)]
    serving = [offer.speed_tokens_per_s for offer, _ in offers if offer.state is PeerState.ONLINE]
    usual = statistics.median(serving) if serving else 1.0
    return [
        (offer.span, usual if offer.state is PeerState.JOINING else offer.speed_tokens_per_s)
        for offer, age_s in offers
        if offer.state is PeerState.ONLINE or age_s < joins_within_s
    ]


def block_speeds(blocks: int, held: Iterable[tuple[Span, float]]) -> list[float]:
    """Tokens a second that the swarm can put through each block; `held` are spans and the speeds of their peers."""
    speeds = [0.0] * blocks
    for span, speed in held:
        for block in range(span.start, min(span.end, blocks)):
            speeds[block] += speed
    return speeds


def choose_span(blocks: int, length: int, held: Iterable[tuple[Span, float]]) -> Span:
    """The `length` blocks that need another server most, the first of equals.

    The paper's rule: of all windows, the one whose speeds, slowest first, come first in order.
    """
    if not 1 <= length <= blocks:
        raise ConfigError(f"cannot serve {length} blocks: the model has {blocks}")
    speeds = block_speeds(blocks, held)
    start = min(range(blocks - length + 1), key=lambda start: sorted(speeds[start : start + length]))
    return Span(start, start + length)
