"""A swarm in memory: whole serving nodes but for libp2p and torch, clients, and what may happen to them."""

from __future__ import annotations

import os
import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import trio

from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.policy import ClientPolicy, LinkPolicy, ServePolicy, SwarmPolicy
from llmnode.core.speed import SHARED_SESSIONS, ComputeSpeed
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.links import accept_links, answer_as_relay
from llmnode.node.serve.placing import look_again
from llmnode.node.serve.rebalance import rebalance
from llmnode.node.serve.role import Role
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import serve_links
from llmnode.session.pace import try_pace
from llmnode.session.router import Router
from llmnode.swarm.membership import Swarm
from llmnode.swarm.pool import open_pool
from llmnode.testing.conditions import Conditions
from llmnode.testing.directory import MemoryDirectory
from llmnode.testing.exact_blocks import EXACT_MODEL
from llmnode.testing.network import open_internet
from llmnode.testing.simulate import inline, simulated_ms
from llmnode.testing.watched_finder import WatchedFinder
from llmnode.testing.worker import ExactSource
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from llmnode.core.adapters import AnnouncedAdapter
    from llmnode.core.announcement import PeerState
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.ports import Worker
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.testing.network import MemoryInternet, MemoryNetwork
    from llmnode.testing.worker import ExactWorker
    from llmnode.wire.adapter import Adapter

FORWARD_S = 0.01
KV_TOKENS = 400
SAID_BLOCK_US = 1000
GENEROUS = ServePolicy(leased_share=1.0)
"""A small world has KV for few sessions: clients that come back find theirs."""


@asynccontextmanager
async def open_world(
    seed: int = 0,
    *,
    conditions: Conditions | None = None,
    model: ModelInfo = EXACT_MODEL,
    trace: Callable[[str], None] | None = None,
    link_policy: LinkPolicy | None = None,
    serve_policy: ServePolicy | None = None,
    swarm_policy: SwarmPolicy | None = None,
) -> AsyncIterator[World]:
    """An internet with nobody on it yet. Everything in it ends with the context.

    `trace` is called with a line for whatever happens, `print` if LLMNODE_TRACE is set.
    """
    async with open_internet(conditions, policy=link_policy, seed=seed) as internet, trio.open_nursery() as nursery:
        internet.trace = trace or (print if os.environ.get("LLMNODE_TRACE") else None)
        yield World(internet, nursery, model, seed, serve_policy or GENEROUS, swarm_policy or SwarmPolicy())
        nursery.cancel_scope.cancel()


@dataclass(slots=True)
class SimulatedNode:
    """A node that keeps a view, and its life: a relay."""

    name: str
    network: MemoryNetwork
    pool: ConnectionPool
    swarm: Swarm
    scope: trio.CancelScope

    @property
    def peer(self) -> PeerId:
        return self.network.peer

    @property
    def knows(self) -> set[PeerId]:
        """The peers in its view that announce something."""
        self.swarm.view.drop_expired(simulated_ms())
        return {each.peer for each in self.swarm.view.announcements()}


@dataclass(slots=True)
class ServingNode(SimulatedNode):
    """A node that serves a span of its model, and announces it."""

    source: ExactSource
    server: Server
    role: Role

    @property
    def worker(self) -> ExactWorker:
        """The one that serves, or did before it was lost."""
        assert self.source.worker is not None, "it has loaded its blocks"
        return self.source.worker

    @property
    def state(self) -> PeerState:
        return self.role.offer().state


class SimulatedClient(NamedTuple):
    """A user of the swarm. `router` opens sessions, and its finder remembers what `checks` ask."""

    router: Router
    peer: PeerId


class World:
    """Starts nodes and clients, and ends nodes in several ways. Made by `open_world`.

    `nodes` are those that live, by name. Names make peer ids (`peer_named`): a node that is started again is the same
    peer. `internet` has what may happen to links.
    """

    def __init__(
        self,
        internet: MemoryInternet,
        nursery: trio.Nursery,
        model: ModelInfo,
        seed: int,
        serve_policy: ServePolicy,
        swarm_policy: SwarmPolicy,
    ) -> None:
        self.internet = internet
        self.model = model
        self.directory = MemoryDirectory()
        self.nodes: dict[str, ServingNode] = {}
        self.relays: dict[str, SimulatedNode] = {}
        self.clients: dict[str, Swarm] = {}
        self._nursery = nursery
        self._seed = seed
        self._serve_policy = serve_policy
        self._swarm_policy = swarm_policy
        self._said_us: dict[str, int] = {}
        self.said_share = 1.0
        """Servers that start announce that each further decode of a forward adds this share of the first one."""
        self.first_load_s = 0.0
        """Servers that start load their blocks for this long, and may choose others meanwhile: see `look_again`."""
        self.said_prefill_share = 1.0
        """They announce that each position of a prompt takes this share of a decode."""
        self._adapters: dict[str, Mapping[AnnouncedAdapter, Adapter]] = {}
        self._lives = 0

    async def start(
        self,
        name: str,
        span: Span,
        model: ModelInfo | None = None,
        *,
        contacts: Sequence[str] | None = None,
        now_ms: Callable[[], int] = simulated_ms,
        report_move: Callable[[str], None] | None = None,
        said_us: int = SAID_BLOCK_US,
        adapters: Mapping[AnnouncedAdapter, Adapter] = MappingProxyType({}),
    ) -> ServingNode:
        """A server of `span`, and of the world's model: it announces that even if it serves another `model`.

        Unless it is told its `contacts`, it is told all nodes that live. With `report_move` it rebalances.
        It announces that a block takes it `said_us`, and `adapters`, which it holds.
        """
        contacts = self._contacts() if contacts is None else contacts
        self._said_us[name] = said_us
        self._adapters[name] = adapters
        node: ServingNode = await self._nursery.start(
            self._serve, name, span, model or self.model, contacts, now_ms, report_move
        )
        return node

    async def start_relay(self, name: str, *, contacts: Sequence[str] | None = None) -> SimulatedNode:
        contacts = self._contacts() if contacts is None else contacts
        node: SimulatedNode = await self._nursery.start(self._relay, name, contacts)
        return node

    def node(self, peer: PeerId) -> ServingNode:
        return self.nodes[str(peer).removeprefix("peer-")]

    def kill(self, name: str) -> None:
        """The effect of SIGKILL: it is not cancelled first, and says no farewell."""
        self._end(self._take(name))

    async def drain(self, name: str, patience_s: float) -> None:
        """The effect of SIGTERM: it takes no new sessions, waits up to `patience_s` for those that it has, and
        leaves.
        """
        await self.nodes[name].role.drain(patience_s)
        self._end(self._take(name))

    async def stop(self, name: str) -> None:
        """The effect of SIGTERM without sessions: it tells its neighbours."""
        node = self._take(name)
        if isinstance(node, ServingNode):
            await node.role.leave()
        self._end(node)

    def freeze(self, name: str) -> None:
        """The effect of SIGSTOP, for its forwards too."""
        node = self.nodes[name]
        node.worker.gate = node.worker.gate or trio.Event()
        self.internet.freeze(node.peer)

    def thaw(self, name: str) -> None:
        node = self.nodes[name]
        node.worker.open_gate()
        self.internet.thaw(node.peer)

    def mend_all(self) -> None:
        """All that live hear each other, and nobody is frozen. The dead stay dead."""
        for node in self.nodes.values():
            node.worker.open_gate()
        self.internet.mend_all()

    @asynccontextmanager
    async def client(
        self,
        policy: ClientPolicy | None = None,
        *,
        name: str = "client",
        finder: type[WatchedFinder] = WatchedFinder,
        now_ms: Callable[[], int] = simulated_ms,
    ) -> AsyncIterator[SimulatedClient]:
        """A user that knows all nodes that live. For routes of your own, give a `finder` of that class."""
        network = self.internet.network(name)
        rng = self._rng(name)
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(network))
            contacts = self._contacts()
            swarm = Swarm(
                network,
                pool,
                self._swarm_policy,
                contacts=contacts,
                directory=self.directory,
                now_ms=now_ms,
                rng=rng,
                roams=False,
            )
            await swarm.meet_all(contacts)
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(swarm.run)
            self.clients[name] = swarm
            try:
                own = finder(self.model, pool, swarm, policy or ClientPolicy(chunk_tokens=8), rng, inline)
                yield SimulatedClient(Router(own), network.peer)
            finally:
                if self.clients.get(name) is swarm:  # its next life may have begun
                    del self.clients[name]
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def session(
        self, policy: ClientPolicy | None = None, *, max_length: int = 64
    ) -> AsyncIterator[tuple[InferenceSession, PeerId]]:
        """A session of a client of its own, and that client's id."""
        async with self.client(policy) as (router, peer), router.open_session(max_length, Codec.RAW) as session:
            yield session, peer

    def _contacts(self) -> list[str]:
        return [address for node in [*self.relays.values(), *self.nodes.values()] for address in node.network.addresses]

    def _rng(self, name: str) -> random.Random:
        self._lives += 1
        return random.Random(f"{self._seed} {name} {self._lives}")

    def _take(self, name: str) -> SimulatedNode:
        return self.nodes.pop(name) if name in self.nodes else self.relays.pop(name)

    def _end(self, node: SimulatedNode) -> None:
        self.internet.kill(node.peer)
        node.scope.cancel()
        if isinstance(node, ServingNode):
            node.worker.open_gate()

    async def _serve(
        self,
        name: str,
        span: Span,
        model: ModelInfo,
        contacts: Sequence[str],
        now_ms: Callable[[], int],
        report_move: Callable[[str], None] | None,
        task_status: trio.TaskStatus[ServingNode],
    ) -> None:
        async with self._living(name, contacts, now_ms) as (life, nursery), open_pool(life.network) as pushes:

            async def measure(worker: Worker, _model: ModelInfo) -> ComputeSpeed:
                rate = 1e6 / (max(1, self._said_us[name]) * len(worker.span))
                shared = rate * SHARED_SESSIONS / (1 + self.said_share * (SHARED_SESSIONS - 1))
                return ComputeSpeed(rate, shared, rate / self.said_prefill_share, SHARED_SESSIONS)

            source = ExactSource(model, KV_TOKENS, FORWARD_S)
            own = self._adapters[name]
            server = Server(life.network, model, self._serve_policy, life.swarm, pushes, own, on_bug=raise_bug)
            role = Role(source, self.model, span, server, life.swarm, measure=measure)
            role.stays = report_move is None
            role.learns = False
            node = ServingNode(name, life.network, life.pool, life.swarm, life.scope, source, server, role)
            source.load_s = self.first_load_s
            if self.first_load_s:
                nursery.start_soon(look_again, role, life.swarm, self.internet.note, RebalancePolicy())
            await nursery.start(role.run)
            source.load_s = 0.0
            self.nodes[name] = node
            nursery.start_soon(serve_links, server)
            if report_move is not None:
                move = partial(rebalance, node.peer, role, life.swarm, report_move, None, self._rng(name))
                nursery.start_soon(partial(move, try_pace=try_pace))
            task_status.started(node)
            await trio.sleep_forever()

    async def _relay(self, name: str, contacts: Sequence[str], task_status: trio.TaskStatus[SimulatedNode]) -> None:
        async with self._living(name, contacts, simulated_ms) as (node, nursery):
            self.relays[name] = node
            links = self._serve_policy.links
            answer = partial(answer_as_relay, node.swarm, Conduct(self._serve_policy))
            nursery.start_soon(accept_links, node.network, links, answer, raise_bug)
            task_status.started(node)
            await trio.sleep_forever()

    @asynccontextmanager
    async def _living(
        self, name: str, contacts: Sequence[str], now_ms: Callable[[], int]
    ) -> AsyncIterator[tuple[SimulatedNode, trio.Nursery]]:
        """The parts of every node, until its scope is cancelled."""
        network = self.internet.network(name)
        with trio.CancelScope() as scope:
            async with open_pool(network) as pool, trio.open_nursery() as nursery:
                swarm = Swarm(
                    network,
                    pool,
                    self._swarm_policy,
                    contacts=contacts,
                    directory=self.directory,
                    now_ms=now_ms,
                    rng=self._rng(name),
                )
                nursery.start_soon(swarm.run)
                yield SimulatedNode(name, network, pool, swarm, scope), nursery


def raise_bug(_peer: PeerId, error: Exception) -> None:
    """A simulation fails by what would cost a real server one session, or one link."""
    raise error
