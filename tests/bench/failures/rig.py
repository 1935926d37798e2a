"""The parts that all cells of the benchmark `failures` share: six servers, their client, and its dialogue."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import trio

from bench.failures.cells import PROMPT_TOKENS
from bench.failures.replicas import start_all
from llmnode.compute.loading import USUAL_KV_TOKENS
from llmnode.core.view import online

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.failures.replicas import Replica
    from llmnode.client.connect import Client, ClientParts
    from llmnode.core.ids import PeerId
    from llmnode.swarm.pool import ConnectionPool

SETTLE_S = 60.0
"""The time for news to reach the client, and for KV to be freed. It is longer than any deadline on the way."""
POLL_S = 0.005
EDIT = "\n\nIn other words,"
BRANCH = " On the other hand,"


class Rig:
    """`pool` belongs to an onlooker, not to the client."""

    def __init__(self, servers: Sequence[Replica], parts: ClientParts, client: Client, pool: ConnectionPool) -> None:
        self.servers = servers
        self.client = client
        self.prompt = parts.tokenizer.encode(topics["types"])[:PROMPT_TOKENS]
        self.edit = parts.tokenizer.encode(EDIT)
        self.branch = parts.tokenizer.encode(BRANCH)
        self._pool = pool

    async def settle(self) -> None:
        """Wait until all six live, the client knows it, and no KV is reserved. Raises TooSlowError."""
        for server in self.servers:
            server.heal()
        await start_all([server for server in self.servers if not server.answers], self.servers)
        with trio.fail_after(SETTLE_S):
            for server in self.servers:
                await self.client.swarm.meet(server.address)
            await self.until_known(self.servers)
            for server in self.servers:
                await self.until_kv(server, taken=False)

    async def until_known(self, servers: Sequence[Replica]) -> None:
        swarm = self.client.swarm
        while True:
            said_ms = {each.peer: each.sequence for each in online(swarm.view.announcements())}
            if all(said_ms.get(server.peer, 0) >= server.since_ms for server in servers):
                return
            with trio.move_on_after(POLL_S):  # a peer that is back with its former offer is no news
                await swarm.wait_changed()

    async def until_kv(self, server: Replica, *, taken: bool) -> None:
        self._pool.network.vouch([server.address])
        connection = await self._pool.connect([server.address])
        while True:
            description = await connection.describe(SETTLE_S)
            if (description.kv_tokens_free < USUAL_KV_TOKENS) == taken:
                return
            await trio.sleep(POLL_S)

    def server(self, peer: PeerId) -> Replica:
        return next(server for server in self.servers if server.peer == peer)

    def twin(self, of: Replica) -> Replica:
        return next(server for server in self.servers if server.span == of.span and server is not of)
