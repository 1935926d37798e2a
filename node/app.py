"""The composition root: puts network, swarm, workers and server together, as a node that runs until it is left."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.compute.process_loader import ProcessLoader
from llmnode.compute.thread_worker import ThreadLoader
from llmnode.compute.worker_process import can_start
from llmnode.core.model import AUTO, DTYPES, KV_DTYPES, QUANTS, SAME, PrecisionWish
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.policy import LinkPolicy, RelayPolicy, ServePolicy, SwarmPolicy
from llmnode.core.serving.kv_memory import parse_memory
from llmnode.core.span import parse_span
from llmnode.errors import ConfigError, EmbeddedModelMissing, PeerError, single_error
from llmnode.machine.hardware import hardware
from llmnode.machine.resident import resident_bytes
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.directory import open_directory
from llmnode.net.host import open_network
from llmnode.net.invite import Invite, is_invite
from llmnode.net.swarm_key import entry
from llmnode.node.listening import check_places
from llmnode.node.nearby import living_nearby
from llmnode.node.own_adapters import check_number, own_adapters
from llmnode.node.running_node import RunningNode
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.links import accept_links, answer_as_relay
from llmnode.node.serve.network_speed import keep_measuring
from llmnode.node.serve.own_figures import OwnFigures
from llmnode.node.serve.placing import choose_blocks, choose_precision, look_again
from llmnode.node.serve.rebalance import rebalance
from llmnode.node.serve.role import Role
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import serve_links
from llmnode.node.serve.speed import measure_compute
from llmnode.node.serve.speed_cache import SpeedCache
from llmnode.node.watching import Notice, log_notice, watch
from llmnode.session.pace import try_pace
from llmnode.swarm.former_peers import FormerPeers
from llmnode.swarm.found_nearby import describe
from llmnode.swarm.membership import Swarm
from llmnode.swarm.pool import open_pool
from llmnode.swarm.remembering import recall, remember

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llmnode.compute.child import MakeLoader
    from llmnode.core.model import ModelInfo
    from llmnode.net.host import Libp2pNetwork
    from llmnode.node.serve.speed_cache import Measure
    from llmnode.ports import WorkerSource

MOST_PERCENT = 1000
THREAD, PROCESS = "thread", "process"
WORKERS = (THREAD, PROCESS)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of a serving node.

    - `model`: see `open_model`; or an invite, which is enough to join a swarm.
    - `blocks`: START:END, a number of blocks, or "auto" for all that fit into memory; the node then chooses the blocks
      that the swarm needs most.
    - `rebalance`: the node moves to other blocks when the swarm needs it there more, unless START:END names its blocks.
    - `paper_rule`: it moves by the rule of the Petals paper, for this many percent more throughput, and not by the plan
      that all servers share.
    - `peers`: addresses of servers or relays.
    - `swarm_key`: an invite to a private swarm, which names peers too, as text or read; or the file of its key.
    - `announce`: the addresses at which others reach the node, if it does not listen there itself, for example behind
      a port forward.
    - `mdns`: nodes of the local network find this one where it listens, once it serves. Without `peers` it finds them,
      too. A private swarm is told to nobody.
    - `relays`: others reach the node through these, if nowhere else. Its own addresses are then announced only by
      `announce`.
    - `kv_tokens`: KV for this number of positions; None for 32,768, or fewer if memory is short.
    - `kv_memory`: KV for this amount ("2GiB"), or this share of the free memory ("20%"), instead.
    - `kv_dtype`, `kv_device`: the rounding of KV, and "cpu", or None for the device of the blocks.
    - `threads`: those of torch; None for its own choice, or fewer if a container has fewer cores.
    - `device`: that of torch; "auto" for a GPU if there is one.
    - `dtype`, `quant`: what blocks are computed in, and the rounding of weights. "auto", as for `kv_dtype`, is one
      that the swarm has for the model, and lacks blocks or speed in (`choose_own`); else what suits the device.
    - `worker`: the blocks run in a "thread" of this program, or in a "process" of their own. If that crashes, its
      sessions go elsewhere, and it is started again. "auto" is a process where one can be started; the program needs
      no guard for it.
    - `adapters`: LoRA adapters that the node holds and announces, as FOLDER or NAME=FOLDER; PEFT has saved them.
    - `identity`: the file of the node's identity, which is fresh without one.
    """

    model: str | None = None
    blocks: str = "auto"
    rebalance: bool = True
    paper_rule: float | None = None
    peers: Sequence[str] = ()
    listen: Sequence[str] = (LISTEN_ANY_LOOPBACK,)
    announce: Sequence[str] = ()
    mdns: bool = False
    relays: Sequence[str] = ()
    swarm_key: str | Path | Invite | None = None
    kv_tokens: int | None = None
    kv_memory: str | None = None
    kv_dtype: str = SAME
    kv_device: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    quant: str = "none"
    threads: int | None = None
    worker: str = AUTO
    adapters: Sequence[str] = ()
    identity: Path | None = None
    make_loader: MakeLoader = SpanLoader
    """Makes the loader of a worker in a thread: benchmarks serve with executors of their own."""

    @property
    def speed_cache(self) -> SpeedCache | None:
        """The speeds of this machine in former runs; None with another loader, whose speeds are not the machine's.

        They go by the hardware and the settings that decide how fast a span is, beside the span and its precision.
        """
        if self.make_loader is not SpanLoader:
            return None
        return SpeedCache(f"{hardware()}, {self.device}, KV on {self.kv_device}, {self.threads} threads, {self.worker}")

    def way_in(self) -> Invite:
        """Raises ConfigError."""
        return entry(self.peers, self.swarm_key, self.model if is_invite(self.model) else None)


@asynccontextmanager
async def open_node(
    config: NodeConfig,
    report: Callable[[str], None] = lambda _line: None,
    report_addresses: Callable[[Sequence[str]], None] = lambda _addresses: None,
    report_worker: Callable[[str, bool], None] = lambda _line, _serves: None,
    report_notice: Callable[[Notice], None] = log_notice,
) -> AsyncIterator[RunningNode]:
    """Serve for as long as the context lasts; leaving it tells the swarm. `report` is told in a line what takes long.

    `report_addresses` is told what we announce when that has changed, `report_worker` in a line that a worker process
    was lost, or serves again, `report_notice` of a fault that only the operator of this node can mend.

    Raises ConfigError (blocks, address, missing model), AdapterError, ModelError, PeerError if none of `peers`, or of
    `relays`, can be reached, or WorkerLost if a worker process does not start time after time.
    """
    check(config)
    with single_error():
        way_in = config.way_in()
        named = None if is_invite(config.model) else config.model
        config = replace(config, model=named or way_in.hub_model)
        serves = trio.Event()
        async with (
            _joined(config.listen, config.announce, way_in, config.identity, report_notice, relays=config.relays) as (
                network,
                swarm,
            ),
            _found_by_mdns(config, way_in, network, swarm, report, serves),
            source_for(swarm, config, report, report_worker) as (source, model),
            open_pool(network) as pushes,
        ):
            adapters = await own_adapters(config.adapters, model, report)
            span = await choose_blocks(config.blocks, model, source, swarm)
            base_bytes = await trio.to_thread.run_sync(resident_bytes)
            server = Server(network, model, ServePolicy(), swarm, pushes, adapters)
            role = Role(
                source,
                model,
                span,
                server,
                swarm,
                report_worker=report_worker,
                measure=measure_for(config),
                measure_beside=measure_for(config, keeps=False),
            )
            role.stays = not config.rebalance or ":" in config.blocks
            figures = OwnFigures(role, server, source, base_bytes)
            server.figures = figures.now
            node = RunningNode(network, model, swarm, server, role, source, figures, way_in.key is not None)
            async with trio.open_nursery() as nursery:
                report(f"reading blocks {span} of {model.name}")
                if ":" not in config.blocks:
                    nursery.start_soon(look_again, role, swarm, report, RebalancePolicy())
                await nursery.start(role.run)
                await figures.look()
                nursery.start_soon(figures.keep_looking)
                nursery.start_soon(serve_links, server)
                serves.set()
                nursery.start_soon(node.follow_addresses, report_addresses)
                nursery.start_soon(keep_measuring, role, swarm, network)
                if speeds := config.speed_cache:
                    nursery.start_soon(speeds.note_observed, lambda: role.speed, model)
                if not role.stays:
                    gain = None if config.paper_rule is None else config.paper_rule / 100
                    move = partial(rebalance, network.peer, role, swarm, report, paper_gain=gain, try_pace=try_pace)
                    nursery.start_soon(move)
                yield node
                await role.leave()
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_relay(
    listen: Sequence[str],
    announce: Sequence[str],
    way_in: Invite,
    identity: Path | None,
    report_notice: Callable[[Notice], None] = log_notice,
) -> AsyncIterator[Libp2pNetwork]:
    """A node without blocks that knows the servers. Others join the swarm through it, and reach nodes through it that
    cannot be dialled. Loads no torch. `report_notice` as for `open_node`.
    """
    with single_error():
        async with (
            _joined(listen, announce, way_in, identity, report_notice, relay_policy=RelayPolicy()) as (network, swarm),
            trio.open_nursery() as nursery,
        ):
            policy = ServePolicy()
            answer = partial(answer_as_relay, swarm, Conduct(policy))
            nursery.start_soon(accept_links, network, policy.links, answer)
            yield network
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _joined(
    listen: Sequence[str],
    announce: Sequence[str],
    way_in: Invite,
    identity: Path | None,
    report_notice: Callable[[Notice], None],
    *,
    relays: Sequence[str] = (),
    relay_policy: RelayPolicy | None = None,
) -> AsyncIterator[tuple[Libp2pNetwork, Swarm]]:
    """A network that listens, and a view that is kept current."""
    check_places(listen, announce, way_in, relays)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(
            open_network(
                listen,
                LinkPolicy(),
                identity,
                announce,
                swarm_key=way_in.key,
                relays=relays,
                relay_policy=relay_policy,
            )
        )
        directory = await stack.enter_async_context(open_directory(network, SwarmPolicy()))
        pool = await stack.enter_async_context(open_pool(network))
        contacts = [*way_in.peers, *relays]
        swarm = Swarm(network, pool, SwarmPolicy(), contacts=contacts, directory=directory)
        known = FormerPeers(contacts, way_in.key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, swarm, report_notice)
            with suppress(PeerError) if not way_in.peers else nullcontext():  # a relay need not be one of ours
                await swarm.meet_all(contacts, await recall(known))
            nursery.start_soon(swarm.run)
            nursery.start_soon(remember, swarm, known)
            yield network, swarm
            nursery.cancel_scope.cancel()


def _found_by_mdns(
    config: NodeConfig,
    way_in: Invite,
    network: Libp2pNetwork,
    swarm: Swarm,
    report: Callable[[str], None],
    serves: trio.Event,
) -> AbstractAsyncContextManager[None]:
    if not config.mdns or way_in.key is not None:
        return nullcontext()
    return living_nearby(network, swarm, report, looks=not (way_in.peers or config.relays), serves=serves)


@asynccontextmanager
async def source_for(
    swarm: Swarm, config: NodeConfig, report: Callable[[str], None], report_worker: Callable[[str, bool], None]
) -> AsyncIterator[tuple[WorkerSource, ModelInfo]]:
    """A source in a precision that suits the swarm, and its model: which precisions there are depends on the model."""
    wish = PrecisionWish.of(config.dtype, config.quant, config.kv_dtype)
    report("loading torch")
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_source(config, report, report_worker))
        model = await (source.open_model() if config.model else _open_default(source, swarm, report))
        precision = model.precision
        if wish.is_open:
            measured = speeds.block_rates if (speeds := config.speed_cache) else None
            precision, why = await choose_precision(wish, config.blocks, model, source, swarm, measured)
            report(why)
        if precision != model.precision:
            await stack.aclose()
            named = replace(config, dtype=precision.dtype, quant=precision.quant, kv_dtype=precision.kv_dtype)
            source = await stack.enter_async_context(open_source(named, report, report_worker))
            model = await source.open_model()
        yield source, model


async def _open_default(source: WorkerSource, swarm: Swarm, report: Callable[[str], None]) -> ModelInfo:
    """The model of a server that is told none. `report` is told which, and what else the swarm serves."""
    others = swarm.view.announcements()
    theirs = f"; the swarm has {describe(others)}" if others else ""
    try:
        model = await source.open_model()
    except EmbeddedModelMissing as error:
        raise ConfigError(f"no model is named: name one, as in `llmnode serve org/name`{theirs}; or {error}") from error
    is_alone = others and model.digest not in {each.offer.profile.model_digest for each in others}
    joins = f"{theirs}: name a model of these to join its servers" if is_alone else ""
    report(f"serving {model.name}, the embedded model, since none is named{joins}")
    return model


@asynccontextmanager
async def open_source(
    config: NodeConfig, report: Callable[[str], None], report_worker: Callable[[str, bool], None]
) -> AsyncIterator[WorkerSource]:
    """Makes workers. Its process, if it has one, ends with the context."""
    wanted = Wanted(
        model=config.model,
        kv_tokens=config.kv_tokens,
        kv_memory=config.kv_memory,
        kv_dtype=config.kv_dtype,
        kv_device=config.kv_device,
        device=config.device,
        dtype=config.dtype,
        quant=config.quant,
        threads=config.threads,
    )
    if config.worker == THREAD or (config.worker == AUTO and not can_start()):
        yield ThreadLoader(config.make_loader(wanted, report))
        return
    source = ProcessLoader(wanted, report, lambda line: report_worker(line, False))
    try:
        yield source
    finally:
        await source.end()


def measure_for(config: NodeConfig, *, keeps: bool = True) -> Measure:
    """Measures a worker of this node, unless the speed is known from a former run. `keeps`: the next run knows it."""
    speeds = config.speed_cache
    return speeds.measured_once(keeps=keeps) if speeds else measure_compute


def check(config: NodeConfig) -> None:
    """Checks that are made before the seconds that loading takes. Raises ConfigError."""
    if config.dtype not in (*DTYPES, AUTO):
        raise ConfigError(f"there is no dtype {config.dtype!r}: choose one of {', '.join(DTYPES)}, {AUTO}")
    if config.quant not in (*QUANTS, AUTO):
        raise ConfigError(f"there is no quantization {config.quant!r}: choose one of {', '.join(QUANTS)}, {AUTO}")
    if config.kv_dtype not in (*KV_DTYPES, AUTO):
        raise ConfigError(f"there is no KV in {config.kv_dtype!r}: choose one of {', '.join(KV_DTYPES)}, {AUTO}")
    if config.worker not in (*WORKERS, AUTO):
        raise ConfigError(f"there is no worker {config.worker!r}: choose one of {', '.join(WORKERS)}, {AUTO}")
    if ":" in config.blocks:
        parse_span(config.blocks)
    elif config.blocks != AUTO and not re.fullmatch("[0-9]{1,9}", config.blocks):
        raise ConfigError(f"--blocks {config.blocks!r}: write START:END (as 0:10), a number of blocks, or {AUTO}")
    if config.paper_rule is not None and not 0 <= config.paper_rule <= MOST_PERCENT:
        raise ConfigError(f"--paper-rule {config.paper_rule:g}: give 0 to {MOST_PERCENT} percent")
    if config.kv_memory is not None:
        parse_memory(config.kv_memory, "--kv-memory")
    check_number(config.adapters)
    check_places(config.listen, config.announce, config.way_in(), config.relays)
