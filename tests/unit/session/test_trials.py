"""Trials of servers end, whatever the servers do."""

from __future__ import annotations

import pytest
import trio

from llmnode.core.policy import LinkPolicy, TrialPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, open_world, simulated
from llmnode.testing.hostile import HostilePlan, Silent
from llmnode.wire.frame import FrameType

BLOCKS = Span(0, 6)


@pytest.mark.parametrize("honest", [False, True])
@simulated
async def test_they_are_waited_for_until_a_route_has_computed_or_time_is_out(honest: bool) -> None:
    async with open_world(0, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        if honest:
            await world.start("0a", BLOCKS)
        plan = HostilePlan((Silent(8, 8, BLOCKS, 1, FrameType.OPENED),))
        async with plan.upon(world), world.client() as client:
            finder = client.router.finder
            while len(finder._candidates()) < 8 + honest:
                await finder.wait_changed()
            began_s = trio.current_time()
            with trio.move_on_after(60):
                await finder.note_slow(BLOCKS)
            policy = TrialPolicy()
            most_s = policy.moment_s * policy.most / policy.at_once
            waited_s = trio.current_time() - began_s
            assert waited_s < (1 if honest else most_s + 0.1)


@simulated
async def test_a_wait_ends_though_failures_begin_trials_again_and_again() -> None:
    async with open_world(0) as world, world.client() as client:
        trials, policy = client.router.finder._trials, TrialPolicy()
        trials.is_running = True  # as if new ones had begun whenever some ended
        with trio.fail_after(60):
            await trials.wait(BLOCKS, [], ())
        assert trio.current_time() <= policy.moment_s * policy.most / policy.at_once + 0.1


@simulated
async def test_the_connection_of_a_trial_ends_when_it_was_not_used() -> None:
    async with open_world(0) as world:
        await world.start("0a", Span(0, 1))
        async with world.client() as client:
            finder = client.router.finder
            node = await world.start("0b", BLOCKS)  # which the client is not connected to
            with trio.fail_after(100):
                while len(finder._candidates()) < 2:
                    await finder.wait_changed()
            assert node.peer not in {each.peer for each in finder.pool.living()}
            await finder.note_slow(BLOCKS)
            assert node.peer in {each.peer for each in finder.pool.living()}
            await trio.sleep(TrialPolicy().keeps_s + 5)
            assert node.peer not in {each.peer for each in finder.pool.living()}
