"""A large batch goes through servers in parts, several at a time, and keeps all servers of its way busy."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import trio

from llmnode.core.operations import Backward, DeepPrompts
from llmnode.core.policy import ServePolicy
from llmnode.core.span import Span
from llmnode.session import passes
from llmnode.session.pass_turns import AT_ONCE
from llmnode.session.passes import SwarmPasses
from llmnode.testing import Conditions, open_world
from llmnode.testing.exact_blocks import exact_input
from llmnode.wire.payload import Codec
from simulation.passes import LENGTHS, drawn, nothing_is_left, take_time, there_and_back
from simulation.world import ALL_BLOCKS, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from llmnode.core.operations import Pass


@simulated
async def test_a_large_batch_goes_as_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_POSITIONS", 16)
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        _, crossed = await client.outputs(ALL_BLOCKS, LENGTHS, drawn(1, sum(LENGTHS)))
        assert [each.lengths for each in crossed] == [(5, 1), (30,), (2, 12)]
        await there_and_back(client, 2, [1] * 100)
        for rows in (1, len(LENGTHS)):
            prompts = DeepPrompts(6, rows, 1, exact_input(random.Random(rows), 6 * rows))
            await there_and_back(client, 3, LENGTHS, prompts=prompts)
        nothing_is_left(swarm)


@simulated
async def test_all_servers_of_a_way_have_microbatches_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_POSITIONS", 1)
    batches = 10 * AT_ONCE
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        await there_and_back(client, 1, [1] * batches)  # with connections and speeds known
        began_s, hidden = trio.current_time(), drawn(2, batches)
        await client.outputs(ALL_BLOCKS, [1] * batches, hidden)
        at_hop_s = (trio.current_time() - began_s) * AT_ONCE / batches
        began_s = trio.current_time()
        await client.outputs(ALL_BLOCKS, [1], drawn(3, 1))
        alone_s = trio.current_time() - began_s
        assert at_hop_s < 0.6 * alone_s, "the next ones are at a hop while the former ones are at later hops"


@simulated
async def test_a_server_that_takes_fewer_at_a_time_gets_fewer_and_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass of a wide model takes most of the memory that one peer may have."""
    monkeypatch.setattr(passes, "MOST_POSITIONS", 1)
    async with open_world(serve_policy=ServePolicy(passes_per_link=1)) as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            client, began_s = SwarmPasses(router.finder, Codec.RAW), trio.current_time()
            await there_and_back(client, 1, [1] * 20)
            assert trio.current_time() - began_s < 6.0, "20 forwards and backwards, one after the other"
            nothing_is_left(swarm)


@simulated
async def test_a_batch_keeps_two_servers_busy_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a time for each position and block."""
    lengths, position_s, blocks = [128] * 16, 1e-3, 3
    async with world(conditions=Conditions(delay_s=0.001)) as swarm:
        for name, span in (("a", Span(0, blocks)), ("b", Span(blocks, 2 * blocks))):
            node = await swarm.start(name, span)
            take_time(node.worker, position_s, monkeypatch)
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            await client.outputs(ALL_BLOCKS, [1], drawn(1, 1))

            async def busy_share() -> float:
                """The share of the time of a forward that each server computes."""
                since_s, hidden = trio.current_time(), drawn(2, sum(lengths))
                await client.outputs(ALL_BLOCKS, lengths, hidden)
                return sum(lengths) * position_s * blocks / (trio.current_time() - since_s)

            assert await busy_share() > 0.8
            monkeypatch.setattr(passes, "microbatch_positions", lambda *_sizes: 1024)
            assert await busy_share() < 0.7, "in two parts, each server waits for a third of the time"


@simulated
async def test_a_backward_computes_blocks_once_when_it_is_known_how_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer sequences go together then, so that they are through all blocks in time."""
    async with world() as swarm:
        node = await swarm.start("whole", ALL_BLOCKS)
        take_time(node.worker, 1e-3, monkeypatch)
        batches: list[Sequence[Pass]] = []
        track = node.worker._pass_track
        run = track._run

        async def note(work: Any) -> Any:
            batches.append(work.passes)
            return await run(work)

        monkeypatch.setattr(track, "_run", note)
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            whole_blocks = []
            for number in range(2):
                batches.clear()
                await there_and_back(client, number, [64] * 4)
                done = [each for batch in batches for each in batch]
                backwards = [each for each in done if isinstance(each, Backward)]
                forwards = done[: done.index(backwards[0])]
                whole_blocks.append(sum(each.positions * len(each.span) for each in done))
            assert [(each.lengths, each.span) for each in backwards] == [((64,), ALL_BLOCKS)] * 4
            assert forwards + backwards == done, "no block is computed for a part to begin"
            assert whole_blocks[1] == 2 * 256 * len(ALL_BLOCKS) < whole_blocks[0]
