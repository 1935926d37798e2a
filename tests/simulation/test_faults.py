"""Plans of faults are data, and what they do to a world is put right again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

import llmnode.testing.faults
from llmnode.core.span import Span
from llmnode.testing import Cast, Conditions, FaultPlan, Odds, check_coverage, peer_named, seeds, shrunk
from llmnode.testing.faults import (
    ALL_KINDS,
    BlockDials,
    Cut,
    CutOneWay,
    FailForwards,
    Fault,
    FillKv,
    Freeze,
    Kill,
    Partition,
    Restart,
    SlowForwards,
    SlowLink,
    Stop,
)
from simulation.world import SPANS, Dialogue, kv_is_free, pairs_of_servers, simulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.testing import World

CAST = Cast(nodes=["0a", "0b", "1a", "1b"], clients=["client"], spans=SPANS, movable=["0b"])


@pytest.mark.parametrize("seed", seeds(20))
def test_a_plan_is_drawn_by_its_seed_and_printed_as_what_makes_it(seed: int) -> None:
    plan = FaultPlan.draw(seed, CAST)
    assert plan == FaultPlan.draw(seed, CAST) != FaultPlan.draw(seed + 1, CAST)
    names = {**vars(llmnode.testing.faults), "Span": Span, "Conditions": Conditions}
    assert eval(str(plan), names) == plan
    times = [fault.at_s for fault in plan.faults]
    assert times == sorted(times)
    assert times[-1] < Odds().until_s


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {type(fault) for seed in range(20) for fault in FaultPlan.draw(seed, CAST).faults}
    assert drawn == set(ALL_KINDS)


def test_a_plan_can_be_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan.draw(1, CAST)
    count = len(plan.faults)
    assert plan.without(0, 2).faults == (plan.faults[1], *plan.faults[3:])
    assert plan.only(0, 2).faults == (plan.faults[0], plan.faults[2])
    monkeypatch.setenv("LLMNODE_FAULTS", "0,2")
    assert FaultPlan.draw(1, CAST) == plan.only(0, 2)
    culprits = {plan.faults[3], plan.faults[count - 2]}
    assert set(shrunk(plan, lambda smaller: culprits <= set(smaller.faults)).faults) == culprits


def _is_cut(one: str, other: str) -> Callable[[World], bool]:
    return lambda world: (peer_named(one), peer_named(other)) in world.internet.cuts


STRIKES: list[tuple[Fault, Callable[[World], bool]]] = [
    (Kill(1, 5, "0a"), lambda world: "0a" not in world.nodes),
    (Stop(1, 5, "0a"), lambda world: "0a" not in world.nodes),
    (Freeze(1, 5, "0a"), lambda world: world.nodes["0a"].network.frozen),
    (FailForwards(1, 5, "0a", 3), lambda world: world.nodes["0a"].worker.executor.fails == 3),
    (SlowForwards(1, 5, "0a", 2.0), lambda world: world.nodes["0a"].worker.slower_by_s == 2.0),
    (FillKv(1, 5, "0a"), lambda world: world.nodes["0a"].worker.kv_tokens_free == 0),
    (Cut(1, 5, "0a", "1a"), lambda world: _is_cut("0a", "1a")(world) and _is_cut("1a", "0a")(world)),
    (CutOneWay(1, 5, "0a", "1a"), lambda world: _is_cut("0a", "1a")(world) and not _is_cut("1a", "0a")(world)),
    (BlockDials(1, 5, "0a", "1a"), lambda world: (peer_named("0a"), peer_named("1a")) in world.internet._no_dial),
    (Partition(1, 5, ("0a",)), _is_cut("0a", "2b")),
    (SlowLink(1, 5, "0a", "1a"), lambda world: bool(world.internet.special)),
]


@pytest.mark.parametrize("early", [True, False], ids=["left-early", "in-its-time"])
@pytest.mark.parametrize(("fault", "struck"), STRIKES, ids=lambda value: type(value).__name__)
@simulated
async def test_a_fault_strikes_and_is_put_right(fault: Fault, struck: Callable[[World], bool], early: bool) -> None:
    async with pairs_of_servers() as world, world.client() as (_, _):
        async with FaultPlan((fault,)).upon(world):
            await trio.sleep(0.9)
            assert not struck(world)
            await trio.sleep(1.1)  # a node that stops takes a second to say so
            assert struck(world)
            if not early:
                await trio.sleep(4.5)
                assert not struck(world)
        assert not struck(world)
        assert sorted(world.nodes) == ["0a", "0b", "1a", "1b", "2a", "2b"]
        assert not any(node.network.frozen or node.worker.gate for node in world.nodes.values())
        await check_coverage(world)


@simulated
async def test_a_restarted_server_is_another_process_of_the_same_peer() -> None:
    async with pairs_of_servers() as world, world.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        used = str(session.route[0].peer).removeprefix("peer-")
        before = world.nodes[used]
        async with FaultPlan((Restart(1, 0, used),)).upon(world):
            await trio.sleep(2)
            assert world.nodes[used] is not before
            assert world.nodes[used].peer == before.peer
            await dialogue.step(1)
        assert session.recoveries


@simulated
async def test_a_server_may_come_back_with_another_span() -> None:
    async with pairs_of_servers() as world:
        async with FaultPlan((Stop(1, 1, "0b", Span(0, 6)),)).upon(world):
            await trio.sleep(5)
        assert world.nodes["0b"].worker.span == Span(0, 6)


@simulated
async def test_the_dead_are_struck_no_more() -> None:
    faults = [kind(2, 1, "0a") for kind in (Kill, Stop, Freeze, FailForwards, SlowForwards, FillKv)]
    async with pairs_of_servers() as world:
        lines: list[str] = []
        world.internet.trace = lines.append
        async with FaultPlan((Kill(1, 5, "0a"), *faults)).upon(world):
            await trio.sleep(4)
        assert len([line for line in lines if "struck nobody" in line]) == len(faults)


@simulated
async def test_the_kv_of_sessions_that_a_plan_has_broken_is_freed() -> None:
    plan = FaultPlan((Freeze(0.1, 30, "0a"), Cut(0.1, 30, "client", "1a"), Kill(0.1, 1, "2a")))
    async with pairs_of_servers() as world:
        async with plan.upon(world), world.session() as (session, _):
            dialogue = Dialogue(session, random.Random(1))
            for _ in range(5):
                await dialogue.step(1)
                await trio.sleep(1)
        await kv_is_free(world)
