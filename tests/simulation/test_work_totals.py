"""A server does not tell strangers when others say something."""

from __future__ import annotations

import trio

from llmnode.core.policy import ServePolicy
from llmnode.swarm.peer_connection import PeerConnection, open_connection
from simulation.beams import opened, step_all
from simulation.world import pairs_of_servers, simulated


@simulated
async def test_only_its_own_machine_sees_each_step_of_a_server() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 1) as (dialogue,):
        await step_all([dialogue])
        await trio.sleep(ServePolicy().totals_s)
        node = swarm.node(dialogue.session.route[0].peer)
        links = [
            await swarm.internet.network(name, host).dial(node.network.addresses[0])
            for name, host in (("stranger", "9.9.9.9"), ("neighbour", "8.0.8.200"), ("watcher", "127.0.0.1"))
        ]
        async with open_connection(links[0]) as one, open_connection(links[1]) as two, open_connection(links[2]) as own:
            told = await one.describe(5)
            assert told.steps == 1 and told.positions > 0 and told.busy_us > 0 and told.received_bytes > 0
            node.worker.slower_by_s = 0.5
            loads: dict[PeerConnection, set[float]] = {one: set(), two: set(), own: set()}
            for _ in range(5):
                await step_all([dialogue])
                for connection, told_loads in loads.items():
                    answer = await connection.ask_load(5, opens=False)
                    assert answer is not None
                    told_loads.add(answer.load)
                now = await own.describe(5)
                for connection in (one, two):
                    late = await connection.describe(5)
                    assert (late.steps, late.positions, late.busy_us) == (told.steps, told.positions, told.busy_us)
                    assert (late.received_bytes, late.sent_bytes) == (told.received_bytes, told.sent_bytes)
            assert now.steps == 6 and now.received_bytes > told.received_bytes
            assert len(loads[one]) == len(loads[two]) == 1 < len(loads[own]), "a load shows no step either"
            await trio.sleep(ServePolicy().totals_s)
            assert (await two.describe(5)).steps == 6
