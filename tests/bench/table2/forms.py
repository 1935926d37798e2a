"""The two forms of the benchmark `table2`: a real model, and BLOOM's width and times without its arithmetic."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.kit.child import as_program
from bench.table2.charged import BLOCKS, ENDS, VARIABLE, decode_s, positions_s, resource_of
from bench.table2.limit import Leg
from bench.table2.wide import opened_wide
from llmnode.core.span import Span, split_evenly
from llmnode.models.embedded import open_embedded
from llmnode.node.processes import LLMNODE
from llmnode.wire.payload import Codec, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.models.sources.folder import ModelFolder

SMOL, BLOOM = "SmolLM2-135M", "BLOOM's times"
IN_THREAD = ("--worker", "thread")
"""Charged blocks are in the server's own process."""


@dataclass(frozen=True, slots=True)
class Network:
    """All links of a swarm: one way between any two peers, and the rate of one direction of a connection."""

    name: str
    one_way_s: float
    bytes_per_s: float


NETWORKS = (
    Network("1 Gbit/s, 5 ms", 0.0025, 125e6),
    Network("100 Mbit/s, 5 ms", 0.0025, 12.5e6),
    Network("100 Mbit/s, 100 ms", 0.05, 12.5e6),
)
"""The paper's latencies are round trips: a hop through the client costs its sessions 100 ms more in the last one."""


@dataclass(frozen=True, slots=True)
class Form:
    """A model, its hidden states on the wire, and the program that serves it with its `options`."""

    name: str
    folder: ModelFolder
    codec: Codec
    program: Sequence[str]
    options: Sequence[str] = ()

    @property
    def is_real(self) -> bool:
        return self.name == SMOL

    @property
    def model(self) -> str | None:
        """The model that `llmnode serve` is given, None for its own."""
        return None if self.is_real else str(self.folder.path)

    def spans(self, servers: int) -> list[Span]:
        """BLOOM's blocks are on the resources as the paper has them: on 12 servers, three large ones and a small one on
        each A100.
        """
        blocks = PAPERS.get(servers)
        if self.is_real or blocks is None:
            return split_evenly(self.folder.info.blocks, servers)
        starts = [sum(blocks[:index]) for index in range(servers)]
        return [Span(start, start + own) for start, own in zip(starts, blocks, strict=True)]

    def row_bytes(self, positions: int) -> int:
        """The hidden states of one row on the wire."""
        return payload_bytes(self.codec, positions * self.folder.info.hidden_size)

    def legs(self, network: Network, positions: int, stages: Sequence[Leg], ends_s: float = 0.0) -> list[Leg]:
        """From the client through all `stages` and back, directly from server to server, and its own `ends_s`."""
        sends_s = self.row_bytes(positions) / network.bytes_per_s
        legs = [Leg("to the first", sends_s, network.one_way_s, is_own=True)]
        for index, stage in enumerate(stages):
            link = Leg(f"from stage {index}", sends_s, network.one_way_s, is_own=index == len(stages) - 1)
            legs += [stage, link]
        return [*legs, Leg("ends", ends_s, computes=True, is_own=True)] if ends_s else legs

    def charged_stages(self, spans: Sequence[Span], positions: int, at: int | None = None) -> list[Leg]:
        """The time of BLOOM's servers: for a decode `at` a position, or for this number of `positions`."""
        return [
            Leg(
                f"A100 {resource_of(span)}",
                positions_s(positions, len(span)) if at is None else positions * decode_s(at, len(span)),
            )
            for span in spans
        ]


PAPERS = {3: (24, 23, 23), 12: (7, 7, 7, 3, 7, 7, 7, 2, 7, 7, 7, 2)}
"""The blocks of each of BLOOM's servers. No server is on two resources."""
assert all(set(ENDS) <= set(accumulate(blocks)) for blocks in PAPERS.values())


@contextmanager
def opened_forms(names: Sequence[str], blocks: int = BLOCKS) -> Iterator[list[Form]]:
    """Those of the `names`, BLOOM with its first `blocks`. Their files go with the context."""
    with TemporaryDirectory(prefix="llmnode-") as resources, opened_wide(blocks) as wide:
        forms = (
            Form(SMOL, open_embedded(), Codec.RAW, LLMNODE),
            Form(BLOOM, wide, Codec.INT8, as_program("bench.table2.charged", **{VARIABLE: resources}), IN_THREAD),
        )
        yield [each for each in forms if each.name in names]
