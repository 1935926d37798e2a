"""The rows of a wide batch come to one slow server together, which has memory for two: it computes one meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from llmnode.core.policy import BudgetPolicy, ClientPolicy, LinkPolicy, ServePolicy
from llmnode.testing import Conditions, open_world, simulated
from simulation.beams import opened, step_all
from simulation.world import DELAY_S, MODEL, SPANS, kv_is_free

ROWS, POSITIONS, TOGETHER = 24, 8, 2
WIDE = replace(MODEL, hidden_size=16384)
MEMORY_BYTES = 64 << 20
BUDGET = BudgetPolicy(
    memory_bytes=MEMORY_BYTES, work_share=TOGETHER * POSITIONS * WIDE.row_bytes / MEMORY_BYTES, connection_bytes=8 << 10
)
SLOW_S = 1.5
LEAST_S = ROWS * SLOW_S


@pytest.mark.parametrize("longest_wait_s", [40.0, 7.0], ids=["servers let them wait", "servers refuse some"])
@simulated
async def test_rows_that_come_to_one_server_together_cost_nothing_but_their_turns(longest_wait_s: float) -> None:
    policy = ServePolicy(longest_work_wait_s=longest_wait_s)
    links = LinkPolicy(budget=BUDGET)
    async with open_world(
        model=WIDE, conditions=Conditions(delay_s=DELAY_S), link_policy=links, serve_policy=policy
    ) as swarm:
        for name, span in zip("abc", SPANS, strict=True):
            await swarm.start(name, span)
        swarm.nodes["b"].worker.slower_by_s = SLOW_S
        async with swarm.client(ClientPolicy(chunk_tokens=POSITIONS)) as (router, _):
            async with opened(router, ROWS, max_length=POSITIONS) as rows:
                for each in rows:
                    each._model = WIDE
                began_s = trio.current_time()
                await step_all(rows, POSITIONS)
                assert trio.current_time() - began_s < 1.25 * LEAST_S
                assert not any(each.session.recoveries for each in rows)
                refused = sum(each.session.memory_refusals for each in rows)
                assert (refused > 0) == (longest_wait_s < LEAST_S)
            assert not router.finder.failures
        await kv_is_free(swarm)
