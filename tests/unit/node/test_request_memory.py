"""Requests wait at a server with their frames, and one after the other has memory to be worked on. None is stuck."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.budget import Budget, Kind, Resource
from llmnode.core.ids import PeerId
from llmnode.core.policy import BudgetPolicy, ServePolicy
from llmnode.errors import PeerRefused
from llmnode.node.serve.request_memory import RequestMemory
from llmnode.testing import simulated
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.budget import Scope

MIB = 1 << 20
MOST = 8 * MIB
"""The memory for all requests."""
POLICY = BudgetPolicy(memory_bytes=int(MOST / BudgetPolicy().pass_share))


def link_of(budget: Budget, peer: str = "somebody", address: str = "8.8.8.8") -> Scope:
    return budget.connection(address, PeerId(peer)).open(Kind.LINK, "a link")


@simulated
async def test_the_next_request_is_here_when_the_one_before_it_ends() -> None:
    """There is memory for the work of one of them."""
    budget, memory = Budget(POLICY), RequestMemory(ServePolicy())
    link, ended_s = link_of(budget), []

    async def work() -> None:
        held = memory.hold(link, MIB // 4, 5 * MIB, "pass")
        await held.begin_work()
        await trio.sleep(1)
        held.end()
        ended_s.append(trio.current_time())

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(work)
    assert [each - began_s for each in ended_s] == pytest.approx([1, 2, 3])
    assert not any(budget.process.held.values())


@pytest.mark.parametrize(
    ("frame_bytes", "work_bytes", "code"),
    [(MIB, 8 * MIB, RefusalCode.NO_ROOM), (9 * MIB, 0, RefusalCode.NO_ROOM), (3 * MIB, 2 * MIB, RefusalCode.BUSY)],
)
def test_a_request_for_which_there_is_no_memory_is_refused_and_leaves_nothing(
    frame_bytes: int, work_bytes: int, code: RefusalCode
) -> None:
    budget, memory = Budget(POLICY), RequestMemory(ServePolicy())
    link = link_of(budget)
    memory.hold(link, MIB, 5 * MIB, "pass")
    with pytest.raises(PeerRefused, match="pass") as caught:
        memory.hold(link, frame_bytes, work_bytes, "pass")
    assert caught.value.code is code
    assert budget.process.held[Resource.PASSES] == MIB


@pytest.mark.parametrize(("first", "second"), [(0, 0), (MIB, 0), (MIB, MIB // 2), (2 * MIB, 0)])
def test_the_frames_of_one_address_group_leave_as_much_to_others(first: int, second: int) -> None:
    """One request of each group counts for nothing: half of a little may be less than a frame."""
    budget, memory, work_bytes = Budget(POLICY), RequestMemory(ServePolicy()), 5 * MIB
    link, other = link_of(budget), link_of(budget, "another", "9.9.9.9")
    for frame_bytes in filter(None, (first, second)):
        memory.hold(link, frame_bytes, work_bytes, "pass")
    if first:
        with pytest.raises(PeerRefused, match="no memory is left"):
            memory.hold(link, MIB * 3 // 2 - second, work_bytes, "pass")
    memory.hold(other, MIB, work_bytes, "pass")


def test_parts_of_adapters_may_take_all_that_the_work_of_a_pass_leaves() -> None:
    memory, link = RequestMemory(ServePolicy()), link_of(Budget(POLICY))
    memory.hold(link, MIB // 2, 5 * MIB, "pass")
    for _ in range(2):
        memory.hold(link, MIB, 0, "part of an adapter")
    with pytest.raises(PeerRefused, match="no memory is left"):
        memory.hold(link, MIB, 0, "part of an adapter")


@simulated
async def test_what_takes_no_memory_to_be_done_waits_for_nobody() -> None:
    budget, memory = Budget(POLICY), RequestMemory(ServePolicy())
    holds, waits = (memory.hold(link_of(budget, peer), 0, 6 * MIB, "pass") for peer in ("one", "another"))
    await holds.begin_work()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits.begin_work)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(0.1):
            await memory.hold(link_of(budget, "third"), MIB, 0, "part of an adapter").begin_work()
        holds.end()


@simulated
async def test_a_request_is_sent_elsewhere_if_no_other_ends_for_too_long() -> None:
    policy, budget = ServePolicy(), Budget(POLICY)
    memory = RequestMemory(policy)
    holds, waits = (memory.hold(link_of(budget, peer), 0, 6 * MIB, "pass") for peer in ("one", "another"))
    await holds.begin_work()
    began_s = trio.current_time()
    with pytest.raises(PeerRefused, match="no memory is left") as caught:
        await waits.begin_work()
    assert caught.value.code is RefusalCode.BUSY and caught.value.retry_after_s
    assert trio.current_time() - began_s == pytest.approx(policy.memory_patience_s)


@simulated
async def test_a_request_whose_link_has_ended_takes_no_turn_of_others() -> None:
    budget, memory = Budget(POLICY), RequestMemory(ServePolicy())
    first, link = memory.hold(link_of(budget), 0, MOST, "pass"), link_of(budget, "another")
    await first.begin_work()
    second = memory.hold(link, 0, MIB, "pass")
    link.close()

    async def wait_in_vain() -> None:
        with pytest.raises(PeerRefused, match="no memory is left"):
            await second.begin_work()

    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_in_vain)
            await trio.testing.wait_all_tasks_blocked()
            first.end()
    second.end()
    assert not any(budget.process.held.values())


@pytest.mark.parametrize("seed", range(20))
@simulated
async def test_whatever_waits_there_is_always_memory_for_one_of_them(seed: int) -> None:
    rng, budget, memory = random.Random(seed), Budget(POLICY), RequestMemory(ServePolicy())
    done = refused = working = 0

    async def work(link: Scope, frame_bytes: int, work_bytes: int) -> None:
        nonlocal done, refused, working
        await trio.sleep(20 * rng.random())
        try:
            held = memory.hold(link, frame_bytes, work_bytes, "pass")
        except PeerRefused:
            refused += 1
            return
        with trio.move_on_after(rng.choice([0.05, 1000])), suppress(PeerRefused):
            await held.begin_work()
            working += 1
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            working -= 1
            done += 1
        held.end()

    links = [link_of(budget, str(number), f"8.8.{number % 3}.8") for number in range(6)]
    with trio.fail_after(200):
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(work, rng.choice(links), rng.randrange(3 * MIB), rng.randrange(6 * MIB))
            for _ in range(200):
                await trio.sleep(0.1)
                assert working or not memory._here, "they wait, and nobody works"
    assert done > 50 and refused
    assert not any(budget.process.held.values())
