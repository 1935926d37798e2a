"""Tasks that wait for turns have them at the rate, whichever of them gives the turns, and whichever gives up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

from llmnode.core.policy import TurnPolicy
from llmnode.net.turns import Turns
from llmnode.testing import simulated

POLICY = TurnPolicy(burst=2, per_s=0.001, shared_per_s=10)


@simulated
async def test_a_burst_goes_on_at_once_and_the_rest_at_the_rate() -> None:
    turns, ended_s = Turns(POLICY), list[float]()

    async def work() -> None:
        await turns.wait(["group"])
        ended_s.append(trio.current_time())

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(work)
    waited_s = [each - began_s for each in ended_s]
    assert waited_s[:2] == [0, 0]
    assert waited_s[-1] == pytest.approx(0.9, abs=0.2)
    assert all(later - earlier < 0.2 for earlier, later in pairwise(waited_s))


@simulated
async def test_a_group_that_asks_little_is_not_behind_one_that_asks_much() -> None:
    turns = Turns(POLICY)
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(turns.wait, ["many", str(number)])
        await trio.sleep(2)
        began_s = trio.current_time()
        for _ in range(4):
            await turns.wait(["few"])
        assert trio.current_time() - began_s < 0.6
        nursery.cancel_scope.cancel()
    with trio.fail_after(0.5):
        await turns.wait(["many", "0"])


@pytest.mark.parametrize("given_up", [0, 1, 4, 9])
@simulated
async def test_others_have_their_turns_after_one_has_given_up(given_up: int) -> None:
    """The first of them gives the turns."""
    turns, scopes, served = Turns(POLICY), [trio.CancelScope() for _ in range(10)], list[int]()
    assert [turns.take(["group"]) for _ in range(3)] == [True, True, False]

    async def work(number: int) -> None:
        with scopes[number]:
            await turns.wait(["group"])
            served.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(work, number)
            await trio.lowlevel.checkpoint()
        scopes[given_up].cancel()
        nursery.cancel_scope.deadline = trio.current_time() + 5
    assert {*range(10)} - {*served} <= {given_up}
