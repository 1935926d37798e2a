"""Nodes that move by themselves, with real sessions: gaps are closed, and results stay right to the bit."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.adapters import AnnouncedAdapter
from llmnode.core.announcement import PeerState
from llmnode.core.serving.node_life import TAKES_SESSIONS, Moving, Online
from llmnode.node.serve.rebalance import rebalance
from llmnode.testing import seeds
from llmnode.wire.adapter import make_adapter
from simulation.world import MODEL, SPANS, Dialogue, World, kv_is_free, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.core.speed import ComputeSpeed
    from llmnode.ports import Worker

PAIRS = sorted(2 * SPANS)


class Lines(list[str]):
    """That nodes report."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = trio.Event()

    def append(self, line: str) -> None:
        super().append(line)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, number: int) -> None:
        while len(self) < number:
            await self._changed.wait()


@asynccontextmanager
async def rebalancing(
    served: Sequence[Span], seed: int = 0, *, load_s: float | None = None
) -> AsyncIterator[tuple[World, Lines]]:
    """Nodes s0, s1 ... that serve these spans, and rebalance. There is a line for each move.

    With `load_s` a load takes this long, and a node has memory for two workers.
    """
    lines = Lines()
    async with world(seed) as swarm:
        for number, span in enumerate(served):
            source = (await swarm.start(f"s{number}", span, report_move=lines.append)).source
            source.holds_two, source.load_s = load_s is not None, load_s or 0.0
        await trio.sleep(5)
        yield swarm, lines
        await kv_is_free(swarm)


def spans(swarm: World) -> Sequence[Span]:
    return sorted(node.role.span for node in swarm.nodes.values() if node.state is PeerState.ONLINE)


async def use(swarm: World, seed: int, steps: int = 10) -> None:
    """Steps of a session. They fail if an answer is not that of an undisturbed session."""
    async with swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(seed))
        for _step in range(steps):
            await dialogue.step(2)


@simulated
async def test_a_swarm_in_balance_stays_as_it_is() -> None:
    async with rebalancing(PAIRS) as (swarm, lines):
        await trio.sleep(600)
        assert spans(swarm) == PAIRS
        assert not lines


@pytest.mark.parametrize(("gain", "moved"), [(0.5, 1), (1.5, 0)])
@simulated
async def test_by_the_papers_rule_a_node_moves_for_the_share_more_throughput_that_its_user_names(
    gain: float, moved: int
) -> None:
    """The slowest blocks have one server of six, and would have two."""
    lines = Lines()
    async with world() as swarm, trio.open_nursery() as nursery:
        for number, span in enumerate([*3 * SPANS[:1], SPANS[1], *2 * SPANS[2:3]]):
            node = await swarm.start(f"s{number}", span)
            node.role.stays = False
            by_rule = partial(rebalance, node.peer, node.role, node.swarm, lines.append, rng=random.Random(number))
            nursery.start_soon(partial(by_rule, paper_gain=gain))
        await trio.sleep(600)
        assert len(lines) == moved
        assert len([each for each in spans(swarm) if each == SPANS[1]]) == 1 + moved
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("holds_two", [False, True], ids=["alone", "beside"])
@simulated
async def test_a_node_whose_adapter_does_not_fit_the_blocks_that_are_missing_goes_on_where_it_is(
    holds_two: bool,
) -> None:
    wrong = make_adapter(MODEL.digest, {block: (bytes(8), 2 if block < 4 else 3) for block in range(MODEL.blocks)})
    own = {AnnouncedAdapter("own", wrong.digest, 4): wrong}
    async with world() as swarm:
        lines = Lines()
        await swarm.start("still", SPANS[0])
        for name in "ab":
            node = await swarm.start(name, SPANS[1], report_move=lines.append, adapters=own)
            node.source.holds_two = holds_two
        await lines.until(1)
        await trio.sleep(60)
        assert lines[0].startswith(f"moving from blocks {SPANS[1]} to {SPANS[2]}")
        assert spans(swarm) == [SPANS[0], SPANS[1], SPANS[1]]


@simulated
async def test_a_worker_that_is_loaded_beside_another_is_measured_as_such() -> None:
    """Sessions slow it: its speed is not that of the next run."""
    measured: list[tuple[str, Span]] = []
    async with world() as swarm:
        node = await swarm.start("node", SPANS[1])
        measure = node.role._measure

        async def measure_as(what: str, worker: Worker, model: ModelInfo) -> ComputeSpeed:
            measured.append((what, worker.span))
            return await measure(worker, model)

        node.role._measure, node.role._measure_beside = partial(measure_as, "alone"), partial(measure_as, "beside")
        await node.role.change_span(SPANS[0], 0.0)
        node.source.holds_two = True
        await node.role.change_span(SPANS[2], 0.0)
        assert measured == [("alone", SPANS[0]), ("beside", SPANS[2])]


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_node_moves_to_blocks_that_nobody_serves_any_more(seed: int) -> None:
    async with rebalancing(PAIRS, seed) as (swarm, lines):
        swarm.kill("s2")
        swarm.kill("s3")
        await trio.sleep(90)
        assert set(spans(swarm)) == set(SPANS)
        assert len(lines) == 1, lines
        await use(swarm, seed)
        await trio.sleep(300)
        assert len(lines) == 1, "nobody moves back"


@pytest.mark.parametrize("load_s", [None, 20.0])
@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_sessions_are_right_to_the_bit_while_nodes_move_to_slow_blocks(seed: int, load_s: float | None) -> None:
    async with rebalancing([SPANS[0]] * 4 + SPANS[1:], seed, load_s=load_s) as (swarm, lines):
        for number in range(12):
            await use(swarm, 100 * seed + number)
            await trio.sleep(30)
        assert spans(swarm) == PAIRS
        assert len(lines) == 2, lines


@simulated
async def test_the_last_server_of_a_block_stays_where_it_is() -> None:
    async with rebalancing(PAIRS) as (swarm, lines):
        for name in ("s1", "s2", "s3"):
            swarm.kill(name)
        await trio.sleep(300)
        assert set(spans(swarm)) == set(SPANS)
        assert len(lines) == 1
        swarm.kill("s0")  # three nodes are left, and then two: one block is lost whatever they do
        lines.clear()
        await trio.sleep(300)
        assert len(lines) <= 1, lines


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_node_stays_if_the_blocks_are_served_again_before_it_has_loaded_them(seed: int) -> None:
    async with rebalancing(PAIRS, seed, load_s=60.0) as (swarm, lines):
        swarm.kill("s2")
        swarm.kill("s3")
        await lines.until(1)
        await swarm.start("s2", SPANS[1])
        await trio.sleep(20)
        assert len(lines) == 2
        assert lines[1].startswith("staying with blocks")
        await use(swarm, seed)
        await trio.sleep(60)
        assert spans(swarm) == [SPANS[0], SPANS[0], SPANS[1], SPANS[2], SPANS[2]]


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_node_does_not_leave_if_the_other_server_of_its_blocks_is_gone_by_the_time_it_has_loaded(
    seed: int,
) -> None:
    async with rebalancing([SPANS[0]] * 2 + SPANS[1:], seed, load_s=60.0) as (swarm, lines):
        swarm.kill("s2")
        await lines.until(1)
        await trio.sleep(55)
        mover = next(name for name, node in swarm.nodes.items() if isinstance(node.role.state, Moving))
        swarm.kill("s0" if mover == "s1" else "s1")
        await trio.sleep(20)
        assert swarm.nodes[mover].role.span == SPANS[0], "it is the last one there"
        assert lines[-1].startswith("staying with blocks")


@pytest.mark.parametrize("load_s", [None, 60.0])
@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_a_node_that_is_told_to_leave_while_it_moves_does_not_call_that_a_failed_move(
    load_s: float | None, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with rebalancing([SPANS[0]] * 2 + SPANS[1:], seed, load_s=load_s) as (swarm, lines), swarm.session():
        swarm.kill("s2")
        await lines.until(1)
        moving = [node for node in swarm.nodes.values() if not isinstance(node.role.state, Online)]
        for node in moving:
            await node.role.drain(0.0)
        await trio.testing.wait_all_tasks_blocked()
        assert len(moving) == 1
        assert not [each for each in caplog.messages if each.startswith("no move")]
        assert len(lines) == 1


@pytest.mark.parametrize("load_s", [None, 0.0, 3.0, 30.0])
@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_no_move_leaves_a_block_to_nobody(seed: int, load_s: float | None) -> None:
    rng = random.Random(seed)
    served = [*SPANS, *(rng.choice(SPANS[:2]) for _ in range(6))]
    async with rebalancing(served, seed, load_s=load_s) as (swarm, _):
        for _ in range(200):
            await trio.sleep(1)
            states = [node.role.state for node in swarm.nodes.values()]
            assert {each.span for each in states if isinstance(each, TAKES_SESSIONS)} >= set(SPANS)
