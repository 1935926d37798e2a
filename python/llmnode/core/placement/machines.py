"""The machines of one owner, from a file: what each was measured to do with some numbers of blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.ids import PeerId
from llmnode.core.placement.host_rows import BLOCKS, HOST, SPEED, host_rows
from llmnode.core.placement.servers import PlacedServer
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOST_MACHINES = 4096
"""A view holds that many servers."""


def read_machines(file: Path, blocks: int) -> list[PlacedServer]:
    """The machines of a CSV file, which serve nothing yet, for a model of that many blocks.

    Its columns are `host`, `blocks` and `tokens_per_s`. A row says how fast the machine is with this number of blocks.
    The largest number that it has a row of is the most that it can hold. Raises ConfigError.
    """
    measured: dict[str, dict[int, float]] = {}
    for row in host_rows(file, (HOST, BLOCKS, SPEED)):
        own = measured.setdefault(row.host, {})
        if row.blocks in own:
            raise ConfigError(
                f"{row.place}: the host {row.host!r} with {row.blocks} blocks is in an earlier line: write it once"
            )
        own[row.blocks] = row.speed
        if len(measured) > MOST_MACHINES:
            raise ConfigError(
                f"{row.place}: more than {MOST_MACHINES} hosts: write a file for each part of the cluster"
            )
    return [PlacedServer(PeerId(name), Span(0, 1), speeds_of(own)[:blocks]) for name, own in measured.items()]


def speeds_of(measured: Mapping[int, float]) -> tuple[float, ...]:
    """Tokens a second with 1, 2, 3 ... blocks, from some numbers of blocks that were `measured`.

    Between two of these, the time of a token grows by the same amount for each block. Below the smallest one, it is in
    proportion to the blocks.
    """
    known = sorted(measured.items())
    times = [blocks / known[0][0] / known[0][1] for blocks in range(1, known[0][0] + 1)]
    for (few, fast), (many, slow) in pairwise(known):
        more = (1 / slow - 1 / fast) / (many - few)
        times += [1 / fast + more * (blocks - few) for blocks in range(few + 1, many + 1)]
    return tuple(1 / time for time in times)
