"""The servers of one model as placement sees them: spans and speeds, without addresses, times or tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.core.ids import PeerId

ROUNDS = 30
CLOSE = 1e-3
"""The bound on the throughput is lowered in at most this many rounds, while it falls by more than this share."""


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """A node that serves a span, or loads it, and its speed with each number of blocks that it could hold."""

    peer: PeerId
    span: Span
    speeds: tuple[float, ...]
    """Tokens a second while it holds 1, 2, 3 ... blocks. The last one is that with all blocks that fit."""
    online: bool = True
    """False while it loads its blocks."""
    movable: bool = True
    """False if its owner has chosen its blocks."""

    @property
    def speed(self) -> float:
        """Tokens a second that it puts through each of its blocks now."""
        return self.speeds[len(self.span) - 1]

    def at(self, span: Span) -> PlacedServer:
        """The same server, once it serves `span`."""
        return replace(self, span=span)


@dataclass(frozen=True, slots=True)
class Move:
    """A server is to serve `span` instead of its span of now."""

    peer: PeerId
    span: Span


def one_speed(tokens_per_s: float, most_blocks: int) -> tuple[float, ...]:
    """The speeds of a server that its network limits: they do not depend on how many blocks it holds."""
    return (tokens_per_s,) * most_blocks


def shared_speed(block_tokens_per_s: float, most_blocks: int) -> tuple[float, ...]:
    """The speeds of a server that its device limits: with twice the blocks it is half as fast."""
    return tuple(block_tokens_per_s / length for length in range(1, most_blocks + 1))


def worthwhile_lengths(speeds: Sequence[float]) -> list[int]:
    """The lengths at which a longer span would be slower. No other length is ever better."""
    if speeds and speeds[0] > 0.0 and speeds.count(speeds[0]) == len(speeds):
        return [len(speeds)]  # the usual case, sooner
    later = [*speeds[1:], 0.0]
    return [length for length, (speed, longer) in enumerate(zip(speeds, later, strict=True), 1) if speed > longer]


def block_speeds(blocks: int, servers: Iterable[PlacedServer]) -> list[float]:
    """Tokens a second that all servers together put through each block."""
    speeds = [0.0] * blocks
    for server in servers:
        span = server.span
        speed = server.speeds[span.end - span.start - 1]  # its `speed`, sooner
        for block in range(span.start, span.end if span.end < blocks else blocks):
            speeds[block] += speed
    return speeds


def throughput(blocks: int, servers: Iterable[PlacedServer]) -> float:
    """Tokens a second of many sessions through the whole model: those of its slowest block.

    Sessions may use a part of a span, so the smallest cut of the flow through the swarm is always one block.
    """
    return min(block_speeds(blocks, servers))


def most_throughput(blocks: int, servers: Iterable[PlacedServer]) -> float:
    """No placement has more throughput. Each server is at its best length, and all work is spread evenly.

    A server adds at most the whole throughput to a block. So the bound of a bound is a bound too, and a lower one.
    """
    servers = list(servers)
    return most_at_lengths(blocks, servers, [worthwhile_lengths(server.speeds) for server in servers])


def most_at_lengths(blocks: int, servers: Iterable[PlacedServer], lengths: Iterable[Sequence[int]]) -> float:
    """`most_throughput`, where the worthwhile lengths of each server are known."""
    fleet = [
        [(length, server.speeds[length - 1]) for length in own] for server, own in zip(servers, lengths, strict=True)
    ]
    most = sum(max((length * speed for length, speed in own), default=0.0) for own in fleet) / blocks
    fastest = max((speed for own in fleet for _, speed in own), default=0.0)
    for _round in range(ROUNDS):
        if most >= fastest:
            break
        lower = sum(max((length * min(speed, most) for length, speed in own), default=0.0) for own in fleet) / blocks
        if lower > most * (1 - CLOSE):
            break
        most = lower
    return most
