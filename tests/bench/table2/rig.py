"""One swarm of the benchmark `table2` behind links of any shape, its clients, and what they measure."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import trio

from bench.clients.clients import rate
from bench.kit.cpu import cpu_s
from bench.kit.shaped import shaped_swarm
from bench.kit.timed_ends import TimedEnds
from bench.table2.forms import NETWORKS
from bench.table2.limit import Leg, batch_s, path_s, units_per_s
from llmnode.client.connect import aconnect, load_parts
from llmnode.client.generate import next_token, run_blocks
from llmnode.client.model import connect
from llmnode.core.policy import ClientPolicy
from llmnode.errors import single_error
from llmnode.node.processes import with_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from bench.kit.proxy import Proxies
    from bench.table2.forms import Form, Network
    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.client.connect import Client
    from llmnode.core.span import Span
    from llmnode.node.processes import ServerProcess
    from llmnode.session.session import InferenceSession

ROW_TOKENS = 128
DIRECT_WITHIN_S = 60.0
ANSWER_S = 60.0
SPARE_TOKENS = 64
CHUNK_TOKENS = 128
"""The positions of a prompt that go at once. Those of BLOOM's width take much of a server's memory."""
MOST_ROWS = 64
MOST_ECHO_ERROR = 0.2
"""The relative error of hidden states that were put into 8 bits at each of 12 hops is below this."""
CORES = os.cpu_count() or 1

PER_S, LIMIT, OF_LIMIT, OPENING = "a second", "limit", "of the limit", "of it opening, s"
BLOCKS_CPU, SERVERS_CPU = "CPU ms: blocks", "CPU ms: servers' rest"
ENDS_CPU, CLIENT_CPU, PROXIES_CPU = "CPU ms: ends", "CPU ms: clients' rest", "CPU ms: proxies"
LATE = "proxies late, ms"


@dataclass(frozen=True, slots=True)
class Work:
    """The work until a moment: seconds for which each stage has computed, and CPU seconds of processes."""

    stages_s: tuple[float, ...]
    workers_s: float
    servers_s: float
    ends_s: float
    client_s: float
    proxies_s: float

    def since(self, before: Work) -> Work:
        """The work from `before` on."""
        stages = zip(self.stages_s, before.stages_s, strict=True)
        return Work(
            tuple(now - then for now, then in stages),
            self.workers_s - before.workers_s,
            self.servers_s - before.servers_s,
            self.ends_s - before.ends_s,
            self.client_s - before.client_s,
            self.proxies_s - before.proxies_s,
        )

    @property
    def stages_cpu_s(self) -> tuple[float, ...]:
        """CPU seconds of computing, stage by stage.

        A worker's process does other things too, and the time for which it computes may include waits for a core: the
        lesser of the two sums counts.
        """
        share = min(1.0, self.workers_s / sum(self.stages_s)) if self.workers_s else 1.0
        return tuple(share * each for each in self.stages_s)

    def profile(self, units: int) -> dict[str, float]:
        """CPU milliseconds of a unit of work, by the part that has taken them."""
        blocks_s = sum(self.stages_cpu_s) if self.workers_s else 0.0
        return {
            BLOCKS_CPU: 1e3 * blocks_s / units,
            SERVERS_CPU: 1e3 * (self.servers_s + self.workers_s - blocks_s) / units,
            ENDS_CPU: 1e3 * self.ends_s / units,
            CLIENT_CPU: 1e3 * (self.client_s - self.ends_s) / units,
            PROXIES_CPU: 1e3 * self.proxies_s / units,
        }


@dataclass(slots=True)
class Texter:
    """A client and its session of some length. `token` is the next one of its text."""

    client: Client
    session: InferenceSession
    token: int


class Rig:
    """Real servers, links that `shape` sets, some clients, and one more with the API of transformers for batches."""

    def __init__(
        self,
        form: Form,
        servers: Sequence[ServerProcess],
        proxies: Proxies,
        clients: Sequence[Client],
        ends: TimedEnds,
        batches: DistributedModelForCausalLM,
    ) -> None:
        self.form = form
        self.spans: list[Span] = [server.span for server in servers]
        self._servers = servers
        self._proxies = proxies
        self._clients = clients
        self._ends = ends
        self._batches = batches
        self._network = NETWORKS[0]
        self._texters: dict[int, list[Texter]] = {}
        self._text = [each % ends.vocabulary for each in b"".join(map(str.encode, topics.values()))]
        if form.is_real:
            self._text = clients[0].tokenizer.encode("".join(topics.values()))
        self._processes = [[each.pid for each in with_worker(server.pid)] for server in servers]
        self._rows = _wide_rows(form)
        if form.is_real:
            starts = range(0, MOST_ROWS * ROW_TOKENS, ROW_TOKENS)
            self._rows = [clients[0].ends.embed(self._text[start : start + ROW_TOKENS], 0) for start in starts]

    def shape(self, network: Network) -> None:
        """All links are those of `network` from now on."""
        self._network = network
        self._proxies.shape(one_way_s=network.one_way_s, bytes_per_s=network.bytes_per_s)

    # Steps of sessions

    async def open(self, stack: AsyncExitStack, length: int, tokens: int, clients: int) -> None:
        """Open a session of `length` for each client, with a text that leaves `tokens` positions, at its hops directly.

        It is quick on links without delay.
        """
        texters: list[Texter] = []
        for client in self._clients[:clients]:
            session = await stack.enter_async_context(client.inference_session(length + SPARE_TOKENS))
            texters.append(Texter(client, session, self._text[length - tokens]))

        async def fill(texter: Texter) -> None:
            start = length - tokens
            hidden = texter.client.ends.embed(self._text[:start], 0)
            await run_blocks(texter.session, hidden)
            with trio.fail_after(DIRECT_WITHIN_S):
                while True:
                    await self._step(texter)
                    if all(hop.direct for hop in texter.session.timings[1:]):
                        return
                    await texter.session.truncate(start)

        for texter in texters:
            await fill(texter)
        self._texters[length] = texters

    async def steps(self, length: int, tokens: int, clients: int) -> Mapping[str, float]:
        """The steps a second of each of the `clients`, at the positions up to `length`.

        Several begin in the same moment, so they come to each server together. They take `tokens` steps before those
        that are measured, and spread over the servers meanwhile, as users do that begin at any time.
        """
        texters, before_it = self._texters[length][:clients], tokens if clients > 1 else 0
        steps = before_it + tokens
        for texter in texters:
            await texter.session.truncate(length - steps)
            await self._step(texter)  # with the link warm, and each hop at its place
        before = await self._work()
        stamps: list[list[float]] = [[] for _ in texters]
        least_s: list[float] = []

        async def run(texter: Texter, own: list[float]) -> None:
            own.append(time.perf_counter())
            for _ in range(steps):
                await self._step(texter)
                own.append(time.perf_counter())
                least_s.append(path_s(self._legs_of_step(texter.session)))

        async with trio.open_nursery() as nursery:
            for texter, own in zip(texters, stamps, strict=True):
                nursery.start_soon(run, texter, own)
        work = (await self._work()).since(before)
        units = steps * len(texters)
        ends_s = work.ends_s / units
        if clients == 1:
            per_s = tokens / (stamps[0][-1] - stamps[0][0])
            limit = 1 / (statistics.mean(least_s) + ends_s)
        else:
            per_s = rate([each[before_it:] for each in stamps]) / clients
            stages = [
                Leg(f"stage {index}", each / units, computes=True) for index, each in enumerate(work.stages_cpu_s)
            ]
            if not self.form.is_real:
                stages = self.form.charged_stages(self.spans, 1, length - tokens // 2)
            limit = units_per_s(self.form.legs(self._network, 1, stages, ends_s), clients, CORES)
        return self._figures(per_s, limit, work, units)

    async def _step(self, texter: Texter) -> None:
        """One token: a step through the blocks, and for a real model the ends too."""
        if self.form.is_real:
            choice, _ = await next_token(texter.session, texter.client.ends, [texter.token])
            texter.token = choice.id
        else:
            row = self._rows[0][:1]
            output = await run_blocks(texter.session, row)
            _check_echo(row, output)

    def _legs_of_step(self, session: InferenceSession) -> list[Leg]:
        """Those of the latest step of a session that is alone, without the ends."""
        if self.form.is_real:
            stages = [Leg(str(hop.span), hop.compute_us / 1e6) for hop in session.timings]
        else:
            stages = self.form.charged_stages(self.spans, 1, session.position - 1)
        return self.form.legs(self._network, 1, stages)

    # Batches

    async def forward(self, rows: int, *, passes: bool) -> Mapping[str, float]:
        """The positions a second of a batch of `rows`: through sessions as a forward without gradients goes, or in
        `passes` as one goes that trains.
        """
        given, before = self._rows[:rows], await self._work()
        run = partial(self._pass if passes else self._run_rows, given)
        began_s = time.perf_counter()
        outputs, opening_s = await trio.to_thread.run_sync(run)
        took_s = time.perf_counter() - began_s
        work = (await self._work()).since(before)
        if not self.form.is_real:
            for row, output in zip(given, outputs, strict=True):
                _check_echo(row, output)
        if self.form.is_real:
            each_s = [each / rows for each in work.stages_cpu_s]
            stages = [Leg(f"stage {index}", each, computes=True) for index, each in enumerate(each_s)]
        else:
            stages = self.form.charged_stages(self.spans, ROW_TOKENS)
        least_s = batch_s(self.form.legs(self._network, ROW_TOKENS, stages), rows, CORES)
        positions = rows * ROW_TOKENS
        figures = dict(self._figures(positions / took_s, positions / least_s, work, rows))
        return figures if passes else {**figures, OPENING: opening_s}

    def _run_rows(self, rows: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor | None], float]:
        """Returns the time until all sessions were open, too."""
        began_s = time.perf_counter()
        with self._batches.open_cache(ROW_TOKENS, len(rows), priority="batch") as cache:
            opening_s = time.perf_counter() - began_s
            return cache.run_rows(rows), opening_s

    def _pass(self, rows: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor | None], float]:
        with torch.no_grad():
            return list(self._batches.remote_blocks(torch.stack(list(rows)))), 0.0

    # Costs

    def _figures(self, per_s: float, limit: float, work: Work, units: int) -> Mapping[str, float]:
        lateness = self._proxies.lateness()
        late_ms = 1e3 * lateness.sum_s / max(1, lateness.chunks)
        return {PER_S: per_s, LIMIT: limit, OF_LIMIT: per_s / limit, **work.profile(units), LATE: late_ms}

    async def _work(self) -> Work:
        stages_s = [0.0] * len(self._servers)

        async def ask(index: int) -> None:
            connection = await self._clients[0].swarm.connect([self._servers[index].address])
            stages_s[index] = (await connection.describe(ANSWER_S)).busy_us / 1e6

        with single_error():
            async with trio.open_nursery() as nursery:
                for index in range(len(stages_s)):
                    nursery.start_soon(ask, index)
        return Work(
            tuple(stages_s),
            sum(cpu_s(each) for processes in self._processes for each in processes[1:]),
            sum(cpu_s(processes[0]) for processes in self._processes),
            self._ends.busy_s,
            cpu_s(os.getpid()),
            self._proxies.cpu_s,
        )


@asynccontextmanager
async def open_rig(form: Form, servers: int, clients: int, threads: int) -> AsyncIterator[Rig]:
    """A swarm of `servers`, and `clients`, each a peer of its own, on links without delay."""
    async with AsyncExitStack() as stack:
        parts = load_parts(form.folder)
        ends = TimedEnds(parts.ends, time.thread_time)
        swarm = shaped_swarm(
            form.spans(servers),
            threads,
            bytes_per_s=NETWORKS[0].bytes_per_s,
            program=form.program,
            model=form.model,
            options=form.options,
        )
        processes, proxies = await stack.enter_async_context(swarm)
        peers, policy = [server.address for server in processes], ClientPolicy(chunk_tokens=CHUNK_TOKENS)
        connected = [
            await stack.enter_async_context(aconnect(peers, parts=ends.within(parts), codec=form.codec, policy=policy))
            for _ in range(clients)
        ]
        opening: Callable[[], DistributedModelForCausalLM] = partial(connect, form.model, peers=peers, codec=form.codec)
        batches = await trio.to_thread.run_sync(opening)
        stack.push_async_callback(trio.to_thread.run_sync, batches.close)
        yield Rig(form, processes, proxies, connected, ends, batches)


def _wide_rows(form: Form) -> list[torch.Tensor]:
    """One row for all places: 64 would take memory, and nothing looks for rows that are alike."""
    generator = torch.Generator().manual_seed(0)
    return MOST_ROWS * [torch.randn(ROW_TOKENS, form.folder.info.hidden_size, generator=generator)]


def _check_echo(given: torch.Tensor, output: torch.Tensor | None) -> None:
    """Blocks that compute nothing give back what came, as far as the codec carries it."""
    assert output is not None, "each row had something to compute"
    error = float((output - given).norm() / given.norm())
    assert error < MOST_ECHO_ERROR, f"{error:.3f} of what went in has changed on the way"
