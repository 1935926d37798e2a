"""Whole serving nodes on an internet in memory and a mock clock: all but their libp2p and their torch. And a client."""

from __future__ import annotations

import functools
import random
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock

from llmnode.client.pool import open_pool
from llmnode.client.routing import Router
from llmnode.client.swarm import Swarm
from llmnode.core.announcement import Offer, PeerState
from llmnode.core.ids import SessionId
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, ServePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute
from llmnode.node.serve.server import Server
from llmnode.testing import ExactWorker, MemoryInternet, MemoryNetwork, exact_output, open_internet
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from llmnode.client.session import InferenceSession
    from llmnode.core.ids import PeerId
    from llmnode.ports import Computed, Piece
    from llmnode.wire.frame import Buffer

MODEL = ModelInfo("exact", b"d" * 32, blocks=6, hidden_size=2, context_tokens=200, dtype="float32")
ALL_BLOCKS = Span(0, MODEL.blocks)
ROW = MODEL.row_bytes
SPANS = [Span(0, 2), Span(2, 4), Span(4, 6)]
KV_TOKENS = 400
SETTLE_S = 20.0
DELAY_S = 0.02
FORWARD_S = 0.01


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:  # the order in which tasks run is part of the seed
            patch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)
            patch.setattr("trio._core._run._r", random.Random(fixtures.get("seed", 0)))
            trio.run(functools.partial(test, **fixtures), clock=MockClock(autojump_threshold=0))

    return run


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """In place of a thread, which would know nothing of the mock clock."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


def clock_ms() -> int:
    return int(1_700_000_000_000 + trio.current_time() * 1000)


class FallibleWorker(ExactWorker):
    """Computes exactly, in time, unless it is told to fail."""

    fails = 0
    forward_s = FORWARD_S

    async def forward(self, piece: Piece) -> Computed:
        with trio.CancelScope(shield=True):
            await trio.sleep(self.forward_s)
        if self.fails > 0:
            self.fails -= 1
            raise RuntimeError("out of memory, as told")
        return await super().forward(piece)

    def take_room(self, kv_tokens: int) -> None:
        """As another client's session would."""
        self._reserved[SessionId(b"s" * 16)] = kv_tokens


@dataclass
class ServingNode:
    """A whole serving node but its libp2p and its torch."""

    name: str
    network: MemoryNetwork
    worker: FallibleWorker
    swarm: Swarm
    server: Server
    scope: trio.CancelScope

    @property
    def offer(self) -> Offer:
        return Offer("exact", MODEL.digest, MODEL.blocks, MODEL.dtype, self.worker.span, PeerState.ONLINE, 1000, 64)


class World:
    """Starts nodes, and ends them in several ways."""

    def __init__(self, internet: MemoryInternet, nursery: trio.Nursery) -> None:
        self.internet = internet
        self.nodes: dict[str, ServingNode] = {}
        self._nursery = nursery

    async def start(self, name: str, span: Span, model: ModelInfo = MODEL) -> ServingNode:
        """It announces MODEL, whatever it serves."""
        node: ServingNode = await self._nursery.start(self._live, name, span, model)
        return node

    def node(self, peer: PeerId) -> ServingNode:
        return self.nodes[str(peer).removeprefix("peer-")]

    def kill(self, name: str) -> None:
        """As SIGKILL: not cancelled first, the dead say no farewell."""
        node = self.nodes.pop(name)
        self.internet.kill(node.network.peer)
        node.scope.cancel()

    async def stop(self, name: str) -> None:
        """As SIGTERM: it tells its neighbours."""
        node = self.nodes.pop(name)
        await node.swarm.leave(node.offer)
        self.internet.kill(node.network.peer)
        node.scope.cancel()

    @asynccontextmanager
    async def client(self, policy: ClientPolicy | None = None) -> AsyncIterator[tuple[Router, PeerId]]:
        network = self.internet.network("client")
        async with open_pool(network) as pool, trio.open_nursery() as nursery:
            contacts = [address for node in self.nodes.values() for address in node.network.addresses]
            swarm = Swarm(
                network, pool, SwarmPolicy(), contacts=contacts, now_ms=clock_ms, rng=random.Random(1), roams=False
            )
            await swarm.meet_all(contacts)
            nursery.start_soon(swarm.run)
            policy = policy or ClientPolicy(chunk_tokens=8)
            yield Router(MODEL, pool, swarm, policy, random.Random(1), inline), network.peer
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def session(self, policy: ClientPolicy | None = None) -> AsyncIterator[tuple[InferenceSession, PeerId]]:
        async with self.client(policy) as (router, peer), router.open_session(64, Codec.RAW) as session:
            yield session, peer

    async def _live(self, name: str, span: Span, model: ModelInfo, task_status: trio.TaskStatus[ServingNode]) -> None:
        contacts = [address for node in self.nodes.values() for address in node.network.addresses]
        network = self.internet.network(name)
        worker = FallibleWorker(span, ROW, KV_TOKENS)
        with trio.CancelScope() as scope:
            async with open_pool(network) as pool, open_pool(network) as pushes, trio.open_nursery() as nursery:
                rng = random.Random(name)
                swarm = Swarm(network, pool, SwarmPolicy(), contacts=contacts, now_ms=clock_ms, rng=rng)
                server = Server(worker, model, ServePolicy(), swarm, pushes)
                node = self.nodes[name] = ServingNode(name, network, worker, swarm, server, scope)
                nursery.start_soon(server.run, network)
                nursery.start_soon(swarm.run)
                nursery.start_soon(swarm.announce, lambda: node.offer)
                task_status.started(node)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with open_internet(delay_s=DELAY_S) as internet, trio.open_nursery() as nursery:
        yield World(internet, nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def pairs_of_servers() -> AsyncIterator[World]:
    """Two servers for each of three spans."""
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            for twin in "ab":
                await swarm.start(f"{index}{twin}", span)
        await trio.sleep(10)
        yield swarm


class Dialogue:
    """A session and what it should answer."""

    def __init__(self, session: InferenceSession, rng: random.Random) -> None:
        self.session = session
        self._rng = rng
        self._said = b""

    async def step(self, positions: int) -> None:
        hidden = self._rng.randbytes(positions * ROW)
        answer = bytes(await self._step(hidden))
        self._said += hidden
        expected = exact_output(self._said, ALL_BLOCKS)[-len(hidden) :]
        assert answer == expected, f"wrong at position {self.session.position}, after {self.session.recoveries}"

    async def _step(self, hidden: bytes) -> Buffer:
        """Tried again where nobody held some blocks for so long that the session said so."""
        while True:
            try:
                return await self.session.step(hidden)
            except NoRoute:
                await trio.sleep(1)

    async def go_back(self, positions: int) -> None:
        keep = self.session.position - positions
        with suppress(NoRoute):  # it is done with the next step
            await self.session.truncate(keep)
        self._said = self._said[: keep * ROW]


async def kv_is_free(swarm: World) -> None:
    with trio.fail_after(SETTLE_S):
        for node in list(swarm.nodes.values()):
            await node.worker.until_empty()
