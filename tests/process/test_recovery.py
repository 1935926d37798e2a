"""A session of real processes outlives its servers, token for token: the thin form of `llmnode bench failures`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.client.connect import load_parts
from llmnode.node.bench.cells import THIN
from llmnode.node.bench.failures import Undisturbed, open_matrix
from llmnode.node.bench.replicas import replicas, start_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.node.bench.cells import Cell
    from llmnode.node.bench.exact import Reference
    from llmnode.node.bench.failures import Outcome
    from llmnode.node.bench.replicas import Replica

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def servers(folder: Any) -> Iterator[list[Replica]]:
    """Two for each third of the model. Whoever is killed is alive again when its test ends."""
    with replicas(folder.info.blocks, 1) as servers:
        trio.run(start_all, servers, servers)
        yield servers


@pytest.fixture(scope="module")
def undisturbed(servers: list[Replica], reference: Reference) -> Undisturbed:
    async def measure() -> Undisturbed:
        async with open_matrix(servers, load_parts(), reference) as matrix:
            return matrix.undisturbed

    return trio.run(measure)


@pytest.mark.parametrize("cell", THIN, ids=str)
def test_a_session_outlives(
    cell: Cell,
    servers: list[Replica],
    reference: Reference,
    undisturbed: Undisturbed,
    record_property: Callable[[str, object], None],
) -> None:
    async def play() -> Outcome:
        async with open_matrix(servers, load_parts(), reference, undisturbed) as matrix:
            return await matrix.play(cell)

    outcome = trio.run(play)
    assert not outcome.error
    assert outcome.recoveries
    record_property("near_ties", outcome.near_ties)  # counted over all in `llmnode bench failures`
    record_property("beyond_one_prefill_s", round(outcome.pause.beyond_s, 2))
