"""A pass is cut by the time that there is, and one that is computed alone is cut alike at all servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.operations import Backward, Computed, Dropout, Evaluate
from llmnode.core.policy import ServePolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.client_counters import Client
from llmnode.core.span import Span
from llmnode.node.serve.pass_parts import PassParts, PassTerms
from llmnode.testing import simulated

ROW_BYTES = 16 << 10
LENGTHS = (20, 5, 9, 14, 30, 1, 1, 40)


class Recorder:
    """A worker that has time for this number of positions and blocks, and puts out what comes in."""

    def __init__(self, positions: int, blocks: int) -> None:
        self._positions = positions
        self._blocks = blocks
        self.done: list[Evaluate | Backward] = []

    def pass_positions(self, _kind: type, _blocks: int) -> int:
        return self._positions

    def pass_blocks(self, _kind: type, _positions: int, blocks: int) -> int:
        return min(self._blocks, blocks)

    async def do(self, operation: Evaluate | Backward) -> Computed:
        self.done.append(operation)
        return Computed(operation.hidden, 1, 1)


async def cuts(positions: int, blocks: int, span: Span, *, alone: bool) -> set[tuple[int, ...]]:
    """The lengths of the sequences that go together, in both directions."""
    worker: Any = Recorder(positions, blocks)  # Any: as far as it is used
    served: Any = SimpleNamespace(worker=worker, policy=ServePolicy(), model=SimpleNamespace(row_bytes=ROW_BYTES))
    dropout = Dropout(0.1, tuple(range(len(LENGTHS))))
    terms = PassTerms(Priority.TRAINING, 0, alone=alone, dropout=dropout)
    parts = PassParts(served, span, LENGTHS, Client("group", PeerId("client")), None, terms)
    hidden = bytes(sum(LENGTHS) * ROW_BYTES)
    assert await parts.outputs(hidden) == hidden == await parts.gradients(hidden, hidden)
    assert all(each.alone == alone for each in worker.done)
    assert all(each.lengths == tuple(LENGTHS[seed] for seed in each.dropout.seeds) for each in worker.done)
    assert {seed for each in worker.done for seed in each.dropout.seeds} == {*dropout.seeds}
    return {each.lengths for each in worker.done}


SERVERS = [(1000, 1, Span(0, 4)), (16, 4, Span(0, 4)), (1000, 3, Span(1, 60)), (1, 1, Span(3, 4))]


@simulated
async def test_alone_it_is_cut_alike_whatever_the_servers_speed_and_its_blocks() -> None:
    found = [await cuts(*server, alone=True) for server in SERVERS]
    assert found == len(SERVERS) * [{(20, 5), (9, 14), (30, 1, 1), (40,)}]


@pytest.mark.parametrize(("server", "groups"), [(SERVERS[0], {LENGTHS}), (SERVERS[3], {(each,) for each in LENGTHS})])
@simulated
async def test_otherwise_by_the_time_that_there_is(server: tuple[int, int, Span], groups: set[tuple[int, ...]]) -> None:
    assert await cuts(*server, alone=False) == groups
