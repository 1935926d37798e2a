"""`tests/bench/run workers`: the cost of a hop with the blocks in a thread of the node, and in a process of their own.

The crossing alone is measured with a worker whose executor returns its input, so that a call takes only the way there
and back. A hop is measured with two real servers of one block, which differ in their worker and answer one client by
turns. Its cost is the time of a step beyond the forward. The node is idle, or serves decodes and a prefill besides.
"""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio

from bench.kit.child import as_program
from bench.kit.options import add_repeats, add_thin, add_threads, add_tokens
from bench.kit.report import Report, Row, Series, at_most, differences, percentile, rounds, spread
from bench.workers.echoing import ECHO, EchoExecutor
from llmnode.compute.batching import BatchingWorker
from llmnode.compute.loading import Wanted
from llmnode.compute.thread_worker import ThreadWorker
from llmnode.compute.worker_messages import LOAD, OPEN_MODEL
from llmnode.compute.worker_process import HeldSpan, start_process
from llmnode.core import operations
from llmnode.core.ids import SESSION_ID_BYTES, PeerId, SessionId, Step
from llmnode.core.policy import BatchPolicy, LinkPolicy, WorkerPolicy
from llmnode.core.span import Span
from llmnode.errors import single_error
from llmnode.net.host import open_network
from llmnode.node.app import PROCESS, THREAD, WORKERS
from llmnode.node.processes import all_ready, private_swarm
from llmnode.swarm.pool import open_pool
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import OpenRequest, Result, pack, unpack
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.messages import Description

POSITIONS = {"1 position": 1, "512 positions": 512}
"""A decode, and the longest part of a prefill that is computed in one piece."""
CROSSINGS = 400
DECODERS = 4
PREFILL = 128
LENGTH = 1024
"""A session of this length is replaced by a fresh one."""
TIMEOUT_S = 60.0

MOST_CROSSING_MS = 0.3
MOST_DEARER_MS = 0.3


MEDIAN, SLOW = "p50, ms", "p99, ms"


class _Variant:
    """One kind of work, with one kind of worker."""

    def __init__(self, what: str, worker: str) -> None:
        self.what = what
        self.worker = worker
        self.series = Series()

    def note(self, times_ms: Sequence[float]) -> None:
        self.series.note({MEDIAN: percentile(times_ms, 0.5), SLOW: percentile(times_ms, 0.99)})


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser)
    add_tokens(parser, 400, "steps of each variant in a round")
    add_thin(parser)
    add_threads(parser, "torch threads of each server")


async def run(options: Options) -> Report:
    crossings = [_Variant(f"crossing, {what}", worker) for what in POSITIONS for worker in WORKERS]
    sizes = [positions for positions in POSITIONS.values() for _ in WORKERS]
    hops = [_Variant(what, worker) for what in ("hop, idle", "hop, under load") for worker in WORKERS]
    crossed = CROSSINGS // 4 if options.thin else CROSSINGS
    with single_error():
        async with _open_echoes() as echoes, _open_servers(options) as servers:
            for number in rounds(options.repeats, thin=options.thin):
                turn = -1 if number % 2 else 1
                taken: list[tuple[_Variant, list[float]]] = []
                for variant, positions in list(zip(crossings, sizes, strict=True))[::turn]:
                    taken.append((variant, await _cross(echoes[variant.worker], positions, crossed)))
                for variant in hops[:2][::turn]:
                    taken.append((variant, await _decode(servers[variant.worker], options.tokens)))
                for variant in hops[2:][::turn]:
                    taken.append((variant, await _decode_beside(servers[variant.worker], options.tokens)))
                for variant, times_ms in taken if number >= 0 else ():
                    variant.note(times_ms)
    conditions = {
        "rounds": options.repeats,
        "crossings": crossed,
        "steps": options.tokens,
        "load": f"{DECODERS} sessions that decode, and one that prefills {PREFILL} positions after {PREFILL}",
    }
    return Report(_rows([*crossings, *hops]), _aims(crossings, hops), conditions)


@asynccontextmanager
async def _open_echoes() -> AsyncIterator[dict[str, BatchingWorker]]:
    """A worker of each kind. It computes nothing, and accepts all operations at once."""
    most = max(POSITIONS.values())
    whole = BatchPolicy(unmeasured_prefill=most, most_prefill=most)
    command = (sys.executable, "-P", *as_program("bench.workers.echoing"))
    process = await start_process(command, WorkerPolicy())
    try:
        await process.say_hello()
        await process.ask(OPEN_MODEL, asdict(Wanted()), report=print)
        loaded = await process.ask(LOAD, 1, 0, ECHO.blocks, report=print)
        held = HeldSpan(process, 1, Span(0, ECHO.blocks), loaded, ECHO.row_bytes)
        own = BatchingWorker(held, held.run, time.perf_counter, whole)
        yield {THREAD: ThreadWorker(EchoExecutor(), whole), PROCESS: own}
    finally:
        await process.end()


async def _cross(worker: BatchingWorker, positions: int, times: int) -> list[float]:
    """The times of calls beyond the forward, in ms."""
    session, hidden = SessionId(secrets.token_bytes(SESSION_ID_BYTES)), secrets.token_bytes(positions * ECHO.row_bytes)
    assert await worker.do(operations.Open(session, worker.span, times * positions, PeerId("bench")))
    times_ms = []
    for number in range(times):
        began_s = time.perf_counter()
        computed = await worker.do(operations.Forward(session, number * positions, positions, hidden))
        times_ms.append(1e3 * (time.perf_counter() - began_s) - computed.compute_us / 1e3)
    await worker.do(operations.Close(session))
    return times_ms


@asynccontextmanager
async def _open_servers(options: Options) -> AsyncIterator[dict[str, _Server]]:
    """A real server for each kind of worker, and a connection to it."""
    async with AsyncExitStack() as stack:
        processes = {}
        for worker in WORKERS:
            swarm = private_swarm([Span(0, 1)], threads=options.threads, options=["--worker", worker])
            (processes[worker],) = await stack.enter_async_context(swarm)
        await all_ready(list(processes.values()))
        network = await stack.enter_async_context(open_network([], LinkPolicy()))
        pool = await stack.enter_async_context(open_pool(network))
        servers = {}
        for worker, process in processes.items():
            pool.network.vouch([process.address])
            connection = await pool.connect([process.address])
            servers[worker] = _Server(connection, await connection.describe(TIMEOUT_S))
        yield servers


@dataclass(frozen=True, slots=True)
class _Server:
    connection: PeerConnection
    model: Description


class _Session:
    """A session of one hop, made of bare frames: so the client's own work has no part in the times."""

    def __init__(self, server: _Server) -> None:
        self._connection = server.connection
        self._model = server.model
        self._begin()

    def _begin(self) -> None:
        self._name = SessionId(secrets.token_bytes(SESSION_ID_BYTES))
        self._steps = self._position = 0

    async def open(self) -> None:
        model = self._model
        request = OpenRequest(
            model_digest=model.model_digest,
            span_start=model.span_start,
            span_end=model.span_end,
            max_length=LENGTH,
            dtype=model.dtype,
            adapter=model.adapter,
            codec=Codec.RAW,
            priority="interactive",
            keep_outputs=False,
        )
        frame = Frame(FrameType.OPEN, self._name, meta=pack(request))
        await self._connection.ask(frame, FrameType.OPENED, TIMEOUT_S)

    async def step(self, positions: int) -> float:
        """The time of a step beyond the forward, in ms."""
        if self._position + positions > LENGTH:
            await self.close()
            self._begin()
            await self.open()
        payload = bytes(positions * 4 * self._model.hidden_size)
        frame = Frame(
            FrameType.STEP,
            self._name,
            step=Step(self._steps),
            start=self._position,
            length=positions,
            payload=payload,
            value_bytes=4,
        )
        began_s = time.perf_counter()
        answer = await self._connection.ask(frame, FrameType.RESULT, TIMEOUT_S)
        took_ms = 1e3 * (time.perf_counter() - began_s)
        self._steps += 1
        self._position += positions
        return took_ms - unpack(Result, answer.meta).compute_us / 1e3

    async def close(self) -> None:
        await self._connection.tell(Frame(FrameType.CLOSE, self._name))


async def _decode(server: _Server, steps: int) -> list[float]:
    session = _Session(server)
    await session.open()
    times_ms = [await session.step(1) for _ in range(steps)]
    await session.close()
    return times_ms


async def _decode_beside(server: _Server, steps: int) -> list[float]:
    others = [(_Session(server), 1) for _ in range(DECODERS)] + [(_Session(server), PREFILL)]
    for other, _ in others:
        await other.open()

    async def go_on(session: _Session, positions: int) -> None:
        while not is_over:
            await session.step(positions)

    is_over = False
    async with trio.open_nursery() as nursery:
        for other, positions in others:
            nursery.start_soon(go_on, other, positions)
        times_ms = await _decode(server, steps)
        is_over = True
    for other, _ in others:
        await other.close()
    return times_ms


def _rows(variants: Sequence[_Variant]) -> list[Row]:
    rows: list[Row] = []
    for thread, process in _pairs(variants):
        for each in (thread, process):
            row: Row = {"what": each.what, "worker": each.worker}
            row |= each.series.row()
            row["p50, beyond thread's"] = spread(differences(each.series[MEDIAN], thread.series[MEDIAN]))
            row["p99, beyond thread's"] = spread(differences(each.series[SLOW], thread.series[SLOW]))
            rows.append(row)
    return rows


def _aims(crossings: Sequence[_Variant], hops: Sequence[_Variant]) -> Iterator[Aim]:
    for _, process in _pairs(crossings):
        name = f"process: {process.what}, both ways, p50, ms"
        yield at_most(name, process.series.median(MEDIAN), MOST_CROSSING_MS)
    thread, process = list(_pairs(hops))[-1]
    for quantity in (MEDIAN, SLOW):
        dearer = spread(differences(process.series[quantity], thread.series[quantity])).median
        yield at_most(f"{process.what}: process beyond thread, {quantity}", dearer, MOST_DEARER_MS)


def _pairs(variants: Sequence[_Variant]) -> list[tuple[_Variant, _Variant]]:
    """Pairs of a variant with a thread and one with a process."""
    return list(zip(variants[::2], variants[1::2], strict=True))
