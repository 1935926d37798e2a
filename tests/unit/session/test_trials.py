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
