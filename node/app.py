"""The composition root: puts network, swarm, executor and server together, as a node that runs until it is left."""

from __future__ import annotations

import secrets
import statistics
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from llmnode.client.pool import open_pool
from llmnode.client.swarm import Swarm
from llmnode.core.announcement import Offer, PeerState
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.model import DTYPES
from llmnode.core.placement import choose_span
from llmnode.core.policy import LinkPolicy, ServePolicy, SwarmPolicy
from llmnode.core.span import Span, parse_span
from llmnode.errors import ConfigError, single_error
from llmnode.net.directory import open_directory
from llmnode.net.host import LISTEN_ANY_LOOPBACK, open_network, parse_peer
from llmnode.node.serve.links import serve_links, serve_view
from llmnode.node.serve.server import Server
from llmnode.node.startup import collection_paused
from llmnode.ports import Piece

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.compute.worker import ThreadWorker
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.models.folder import ModelFolder
    from llmnode.net.host import Libp2pNetwork

AUTO = "auto"
MEASURED_STEPS = 9


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What a serving node is asked for.

    `blocks` is START:END, a number of blocks, or "auto" for as many as memory allows; the node then chooses those that
    the swarm needs most. `peers` are addresses of servers or relays. `announce` is where others reach it, if that is
    not where it listens: behind a port forward, for example. `threads` is torch's, None for its own choice;
    `device` is torch's too, "auto" for a GPU if there is one. The node's identity is kept in the file `identity`, and
    is a fresh one without.
    """

    model: str | None = None
    blocks: str = "auto"
    peers: Sequence[str] = ()
    listen: Sequence[str] = (LISTEN_ANY_LOOPBACK,)
    announce: Sequence[str] = ()
    kv_tokens: int = 32_768
    device: str = "auto"
    dtype: str = "float32"
    threads: int | None = None
    identity: Path | None = None


@dataclass(slots=True)
class RunningNode:
    """A node that takes sessions. Made by `open_node`. `addresses` are what it announces."""

    network: Libp2pNetwork
    peer: PeerId
    addresses: Sequence[str]
    listening: Sequence[str]
    model: ModelInfo
    span: Span
    tensor_bytes: int
    swarm: Swarm
    server: Server
    share: Share

    async def drain(self, patience_s: float, report: Callable[[int], None] = lambda _sessions: None) -> None:
        """Take no new sessions, say so, and wait at most so long until those that there are have ended.

        `report` is told how many are left, at first and whenever one has ended; never 0.
        """
        self.share.state = PeerState.DRAINING
        self.swarm.say(self.share.offer())
        await self.server.drain(patience_s, report)


@asynccontextmanager
async def open_node(
    config: NodeConfig, report: Callable[[str], None] = lambda _line: None
) -> AsyncIterator[RunningNode]:
    """Serve for as long as the context lasts; leaving it tells the swarm. `report` is told in a line what takes long.

    Raises ConfigError (blocks, address, missing model), ModelError, or PeerError if none of `peers` can be reached.
    """
    _check(config)
    with single_error():
        async with _joined(config.listen, config.announce, config.peers, config.identity) as (network, swarm):
            report("loading torch")
            folder = await trio.to_thread.run_sync(_open_model, config, report, abandon_on_cancel=True)
            # The compute thread must not keep the event loop from its heartbeats for longer than this.
            sys.setswitchinterval(0.0005)
            model = replace(folder.info, dtype=config.dtype)
            share = Share(model, await _choose_span(config, folder, swarm))
            async with open_pool(network) as pushes, trio.open_nursery() as nursery:
                nursery.start_soon(swarm.announce, share.offer)  # as joining: others choose other blocks
                report(f"reading blocks {share.span} of {model.name}")
                executor = await trio.to_thread.run_sync(_load, config, folder, share.span, abandon_on_cancel=True)
                await share.take_sessions(executor)
                server = Server(share.worker, model, ServePolicy(kv_tokens=config.kv_tokens), swarm, pushes)
                nursery.start_soon(server.run, network)
                swarm.say(share.offer())
                yield RunningNode(
                    network=network,
                    peer=network.peer,
                    addresses=network.addresses,
                    listening=network.listening,
                    model=model,
                    span=share.span,
                    tensor_bytes=executor.tensor_bytes,
                    swarm=swarm,
                    server=server,
                    share=share,
                )
                await swarm.leave(share.offer())
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_relay(
    listen: Sequence[str], announce: Sequence[str], peers: Sequence[str], identity: Path | None
) -> AsyncIterator[Libp2pNetwork]:
    """A node that holds no blocks and knows who does: where others join the swarm. Loads no torch."""
    with single_error():
        async with _joined(listen, announce, peers, identity) as (network, swarm), trio.open_nursery() as nursery:
            nursery.start_soon(serve_links, network, ServePolicy().links, lambda link: serve_view(swarm, link))
            yield network
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _joined(
    listen: Sequence[str], announce: Sequence[str], peers: Sequence[str], identity: Path | None
) -> AsyncIterator[tuple[Libp2pNetwork, Swarm]]:
    """A network that listens, and a view that is kept current."""
    if len(announce) > SwarmPolicy().addresses:
        raise ConfigError(
            f"--announce is given {len(announce)} times: {SwarmPolicy().addresses} addresses are the most"
        )
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_network(listen, LinkPolicy(), identity, announce))
        directory = await stack.enter_async_context(open_directory(network, SwarmPolicy()))
        pool = await stack.enter_async_context(open_pool(network))
        swarm = Swarm(network, pool, SwarmPolicy(), contacts=peers, directory=directory)
        await swarm.meet_all(peers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.run)
            yield network, swarm
            nursery.cancel_scope.cancel()


class Share:
    """What this node serves of the swarm's model, as it is announced."""

    def __init__(self, model: ModelInfo, span: Span) -> None:
        self.span = span
        self.state = PeerState.JOINING
        self._model = model
        self._worker: ThreadWorker | None = None
        self._block_us = 0

    @property
    def worker(self) -> ThreadWorker:
        assert self._worker is not None, "the blocks are not loaded yet"
        return self._worker

    async def take_sessions(self, executor: SpanExecutor) -> None:
        """From now on we are online, as fast as we measure now."""
        from llmnode.compute.worker import ThreadWorker

        worker = ThreadWorker(executor)
        self._block_us = max(1, await _step_us(worker, self._model.row_bytes) // len(self.span))
        self._worker = worker
        self.state = PeerState.ONLINE

    def offer(self) -> Offer:
        return Offer(
            model=self._model.name,
            model_digest=self._model.digest,
            blocks=self._model.blocks,
            dtype=self._model.dtype,
            span=self.span,
            state=self.state,
            block_us=self._block_us,
            kv_tokens_free=0 if self._worker is None else self._worker.kv_tokens_free,
        )


async def _step_us(worker: ThreadWorker, row_bytes: int) -> int:
    """The time of one token through the span: a median, after a first step that warms caches up."""
    session = SessionId(secrets.token_bytes(SESSION_ID_BYTES))
    steps = MEASURED_STEPS + 1
    if not await worker.open(session, worker.span, steps):
        return 0
    times = [(await worker.forward(Piece(session, step, 1, bytes(row_bytes)))).compute_us for step in range(steps)]
    await worker.close(session)
    return int(statistics.median(times[1:]))


async def _choose_span(config: NodeConfig, folder: ModelFolder, swarm: Swarm) -> Span:
    """The blocks that were asked for; of a number of them, those that the swarm needs most."""
    blocks = folder.info.blocks
    if ":" in config.blocks:
        return parse_span(config.blocks, blocks)
    length = int(config.blocks) if config.blocks != AUTO else await trio.to_thread.run_sync(_fitting, config, folder)
    if not swarm.view.of_model(folder.digest):
        await swarm.look_up(folder.digest)
    others = [
        each.offer
        for each in swarm.view.of_model(folder.digest)
        if each.offer.dtype == config.dtype and each.offer.state is not PeerState.DRAINING
    ]
    return choose_span(blocks, length, [(offer.span, offer.speed_tokens_per_s) for offer in others])


def _fitting(config: NodeConfig, folder: ModelFolder) -> int:
    import torch

    from llmnode.models.memory import free_bytes
    from llmnode.models.size import MEMORY_SHARE, measure_size

    size = measure_size(folder, getattr(torch, config.dtype))
    free = free_bytes(_device(config))
    fitting = size.fitting_blocks(free, config.kv_tokens)
    if not fitting:
        raise ConfigError(
            f"no block of {folder.name} fits: {free >> 20} MiB are free, of which a server takes {MEMORY_SHARE:.0%}; "
            f"a block takes {size.block_bytes >> 20} and its KV {config.kv_tokens * size.kv_token_bytes >> 20}: "
            "end other programs, raise the container's limit, or lower --kv-tokens"
        )
    return fitting


def _check(config: NodeConfig) -> None:
    """What can be said before the seconds that loading takes. Raises ConfigError."""
    if config.dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {config.dtype!r}: choose one of {', '.join(DTYPES)}")
    if ":" in config.blocks:
        parse_span(config.blocks)
    elif config.blocks != AUTO and not (config.blocks.isascii() and config.blocks.isdigit()):
        raise ConfigError(f"--blocks {config.blocks!r}: write START:END (as 0:10), a number of blocks, or {AUTO}")
    for address in config.peers:
        parse_peer(address)


def _open_model(config: NodeConfig, report: Callable[[str], None]) -> ModelFolder:
    with collection_paused():
        import torch

        from llmnode.models.source import open_model

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        return open_model(config.model, report)


def _load(config: NodeConfig, folder: ModelFolder, span: Span) -> SpanExecutor:
    with collection_paused():
        import torch

        from llmnode.compute.executor import load_executor

        return load_executor(folder, span, config.kv_tokens, getattr(torch, config.dtype), _device(config))


def _device(config: NodeConfig) -> str:
    """Raises ConfigError for a device that torch does not have here."""
    import torch

    if config.device == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"--device {config.device!r}: write cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"--device {config.device}: torch has no such device here; leave it out, or write cpu")
    return config.device
