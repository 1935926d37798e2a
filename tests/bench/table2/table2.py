"""`tests/bench/run table2`: Table 2 of the Petals paper (ICLR version, section 4.2), as shares of the physical limit.

A swarm of 3 or 12 real servers is behind links that are long and narrow, as the paper's are. Two forms of it are
measured: SmolLM2-135M, and servers as wide and as slow as the paper's, whose blocks compute nothing (`charged.py`). The
limit is that of `limit.py`: the least time that computing, delays and bytes can take. Cells take turns in each round.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from bench.kit.options import add_repeats, add_thin, add_threads, add_tokens
from bench.kit.report import Report, Row, Series, at_least, at_most
from bench.table2.charged import BLOCKS
from bench.table2.forms import BLOOM, NETWORKS, SMOL, opened_forms
from bench.table2.rig import OF_LIMIT, PER_S, open_rig
from llmnode.errors import single_error

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from bench.table2.forms import Form, Network
    from bench.table2.rig import Rig

STEPS, FORWARD, PASS = "steps at", "forward of rows:", "training forward of rows:"
LEAST = {(SMOL, 3): 0.9, (SMOL, 12): 0.75, (BLOOM, 3): 0.95, (BLOOM, 12): 0.95}
LEAST_THIN = 0.0
BEYOND_LIMIT = 1.0
"""No cell may be faster than the limit: then a link has a way round its proxy, or the limit is wrong."""
CHARGED_ROUNDS = 1
"""The times of charged servers hardly vary."""

PAPER = {
    (3, 1, STEPS, 128): (1.22, 1.19, 0.89),
    (3, 1, STEPS, 2048): (1.11, 1.08, 0.8),
    (3, 1, PASS, 1): (70.0, 56.4, 19.7),
    (3, 1, PASS, 64): (253.6, 182.0, 112.2),
    (12, 1, STEPS, 128): (0.97, 0.97, 0.44),
    (12, 1, STEPS, 2048): (0.86, 0.86, 0.41),
    (12, 1, PASS, 1): (37.9, 25.6, 5.8),
    (12, 1, PASS, 64): (180.0, 66.6, 44.3),
    (12, 8, STEPS, 128): (0.75, 0.74, 0.36),
    (12, 8, STEPS, 2048): (0.72, 0.7, 0.35),
}
"""Steps a second of each client, and positions a second, on the networks in their order. Its forwards are those of
training: they go through the client."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of the measurement: servers with their numbers of clients, lengths of texts, and rows of batches."""

    swarms: Sequence[tuple[int, Sequence[int]]]
    networks: Sequence[Network]
    lengths: Sequence[int]
    batches: Sequence[int]
    blooms_blocks: int = BLOCKS


FULL = Extent(((3, (1,)), (12, (1, 8))), NETWORKS, (128, 2048), (1, 64))
THIN = Extent(((2, (1, 2)),), NETWORKS[2:], (128,), (2,), blooms_blocks=10)


@dataclass(slots=True)
class Cell:
    """One figure: `what` of `size`, which is a length or a number of rows."""

    form: str
    servers: int
    clients: int
    network: Network
    what: str
    size: int
    series: Series = field(default_factory=Series)

    @property
    def name(self) -> str:
        return f"{self.what} {self.size}"

    @property
    def paper(self) -> float | None:
        found = PAPER.get((self.servers, self.clients, self.what, self.size))
        return None if found is None or self.form != BLOOM else found[NETWORKS.index(self.network)]

    async def measure(self, rig: Rig, tokens: int) -> Mapping[str, float]:
        if self.what == STEPS:
            return await rig.steps(self.size, tokens, self.clients)
        return await rig.forward(self.size, passes=self.what == PASS)

    def row(self) -> Row:
        row: Row = {"form": self.form, "servers": self.servers, "clients": self.clients, "network": self.network.name}
        row |= {"what": self.name, **self.series.row()}
        return row if self.paper is None else {**row, "the paper": self.paper}


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 2)
    add_tokens(parser, 12, "steps of each session, half of it for charged servers")
    add_thin(parser)
    add_threads(parser)
    parser.add_argument("--form", choices=(SMOL, BLOOM), help="one of the two forms alone")
    parser.add_argument("--servers", type=int, choices=(3, 12), help="one of the two swarms alone")


async def run(options: Options) -> Report:
    extent = THIN if options.thin else FULL
    names = [options.form] if options.form else [SMOL, BLOOM]
    cells: list[Cell] = []
    with single_error(), opened_forms(names, extent.blooms_blocks) as forms:
        for form in forms:
            for servers, clients in extent.swarms:
                if options.servers not in (None, servers):
                    continue
                cells += await _measure(options, extent, form, servers, clients)
    conditions = {"steps": options.tokens, "rounds": options.repeats, "cores": "all processes share those of `cores`"}
    return Report([cell.row() for cell in cells], [*_aims(cells)], conditions)


async def _measure(options: Options, extent: Extent, form: Form, servers: int, clients: Sequence[int]) -> list[Cell]:
    cells = [*_cells(extent, form, servers, clients)]
    tokens = options.tokens if form.is_real else max(2, options.tokens // 2)
    print(f"{form.name}: starting {servers} servers", file=sys.stderr)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig(form, servers, max(clients), options.threads))
        for length in extent.lengths:
            await rig.open(stack, length, tokens, max(clients))
        for number in range(options.repeats if form.is_real else CHARGED_ROUNDS):
            for network, of_network in groupby(cells, lambda cell: cell.network):
                rig.shape(network)
                for cell in of_network:
                    figures = await cell.measure(rig, tokens)
                    cell.series.note(figures)
                    where = f"{form.name}, {servers} servers, {cell.clients} clients, {network.name}, {cell.name}"
                    print(
                        f"round {number + 1}: {where}: {figures[PER_S]:.3g}, {figures[OF_LIMIT]:.3f} of the limit",
                        file=sys.stderr,
                    )
    return cells


def _cells(extent: Extent, form: Form, servers: int, clients: Sequence[int]) -> Iterator[Cell]:
    for network in extent.networks:
        for count in clients:
            for length in extent.lengths:
                yield Cell(form.name, servers, count, network, STEPS, length)
        for what in (FORWARD, PASS):
            for rows in extent.batches:
                yield Cell(form.name, servers, 1, network, what, rows)


def _aims(cells: Sequence[Cell]) -> Iterator[Aim]:
    """They are about the lowest share of each figure over all networks."""
    kinds: dict[tuple[str, int, int, str], list[float]] = {}
    for cell in cells:
        kind = cell.form, cell.servers, cell.clients, cell.name
        kinds.setdefault(kind, []).append(cell.series.median(OF_LIMIT))
    for (form, servers, clients, name), shares in kinds.items():
        at = f"{form}, {servers} servers, {clients} client{'s' * (clients > 1)}, {name}"
        yield at_least(f"{at}: of the limit, at least", min(shares), LEAST.get((form, servers), LEAST_THIN))
    yield at_most("of the limit, at most", max(max(shares) for shares in kinds.values()), BEYOND_LIMIT)
