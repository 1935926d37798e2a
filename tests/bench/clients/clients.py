"""Benchmark `clients`: 1 to 16 clients of one server of the whole model, and decodes beside a prefill or training.

Every client is a peer with its own connection, session and compute thread. All are in this process, since a small
machine needs its cores for the server and the benchmark. A ratio compares with one client alone in the same round.
Training stands for the work that servers do first for a training batch: forwards of some rows at once, at its priority.
`sharing.py` measures without a network how the scheduler divides its time between decodes and prefills.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import trio

from bench.clients.sharing import Sharing, load_workers, measure_sharing, plot, workers
from bench.kit.exact import judge_all, reference_of
from bench.kit.options import add_model, add_plot, add_repeats, add_thin, add_threads, add_tokens
from bench.kit.random_llama import opened
from bench.kit.report import Report, Row, Series, at_least, at_most, exact_tokens, percentile, rounds
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.policy import ClientPolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.errors import single_error
from llmnode.models.tensors import to_bytes
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.client.connect import Client, ClientParts
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.wire.frame import Buffer

COUNTS = (1, 2, 4, 8, 16)
PROMPT_TOKENS = 32
PREFILL_TOKENS = 2000
CHUNKS = (512, 128)
TRAINED_ROWS, TRAINED_TOKENS = 16, 128
STEPS, END_TO_END = "session.step", "end to end"
LEAST_TIMES = {STEPS: 3.0, END_TO_END: 2.2}
OF_CLIENTS = 8
MOST_DECODE, MOST_PREFILL, LEAST_TRAINING = 2.5, 3.0, 0.3


PER_S, TIMES, SLOW_MS = "tokens/s", "of one client", "p95, ms"


class _Variant:
    """A number of clients at one level. `SLOW_MS` is the time between two tokens of one client."""

    def __init__(self, level: str, clients: int) -> None:
        self.level = level
        self.clients = clients
        self.series = Series()

    def row(self) -> Row:
        row: Row = {"level": self.level, "variant": f"{self.clients} client{'s' * (self.clients > 1)}"}
        return row | self.series.row()


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_repeats(parser)
    add_tokens(parser, 64)
    add_thin(parser)
    add_threads(parser)
    add_plot(parser, "decodes beside a prefill against what it takes")


async def run(options: Options) -> Report:
    with opened(options.model) as folder:
        return await _measure(options, folder)


async def _measure(options: Options, folder: ModelFolder) -> Report:
    parts, reference = load_parts(folder), reference_of(folder.path)
    counts = (1, OF_CLIENTS) if options.thin else COUNTS
    variants = [_Variant(level, clients) for level in LEAST_TIMES for clients in counts]
    shared = [Sharing(f"server, chunks of {chunk}") for chunk in CHUNKS]
    shared.append(Sharing(f"server, rows of {_trained_rows(options)} x {TRAINED_TOKENS}", work="training"))
    alone = workers(thin=options.thin)
    with single_error():
        async with AsyncExitStack() as stack:
            span = Span(0, folder.info.blocks)
            swarm = private_swarm([span], threads=options.threads, model=options.model and str(folder.path))
            servers = await stack.enter_async_context(swarm)
            await all_ready(servers)
            clients = [
                await stack.enter_async_context(aconnect([servers[0].address], parts=parts)) for _ in range(counts[-1])
            ]
            prefilling = [
                await stack.enter_async_context(
                    aconnect([servers[0].address], parts=parts, policy=ClientPolicy(chunk_tokens=chunk))
                )
                for chunk in CHUNKS
            ]
            rig = _Rig(options, parts, reference.vocabulary, clients, prefilling)
            for number in rounds(options.repeats, thin=options.thin):
                await rig.measure_round(variants, shared, discard=number < 0)
        loaded = await trio.to_thread.run_sync(load_workers, folder, rig.prefill, options.tokens)
        for _ in range(options.repeats):
            for sharing in alone:
                await loaded.measure(sharing)
    if options.plot is not None:
        plot([*shared, *alone], options.plot)
    ties, wrong = judge_all(reference, rig.texts, PROMPT_TOKENS)
    conditions = {
        "model": folder.name,
        "tokens": options.tokens,
        "prompt": PROMPT_TOKENS,
        "prefill": rig.prefill_tokens,
        "clients": "each a peer of its own, all in one process",
        "texts": len(rig.texts),
        "near_ties": ties,
    }
    rows = [*(each.row() for each in variants), *(each.row() for each in [*shared, *alone])]
    return Report(rows, _aims(variants, shared[0], shared[-1], wrong), conditions)


def _trained_rows(options: Options) -> int:
    return TRAINED_ROWS // 8 if options.thin else TRAINED_ROWS


class _Rig:
    """`texts` has all texts of the run, as token ids from the prompt on."""

    def __init__(
        self,
        options: Options,
        parts: ClientParts,
        vocabulary: int,
        clients: Sequence[Client],
        prefilling: Sequence[Client],
    ) -> None:
        self.prefill_tokens = PREFILL_TOKENS // 8 if options.thin else PREFILL_TOKENS
        self.texts: set[tuple[int, ...]] = set()
        words = [each % vocabulary for each in parts.tokenizer.encode(topics["types"] + topics["specialnames"])]
        self._prompts = [words[at * PROMPT_TOKENS :][:PROMPT_TOKENS] for at in range(len(clients))]
        self._hidden = [to_bytes(parts.ends.embed(prompt, 0)) for prompt in self._prompts]
        self.prefill = to_bytes(parts.ends.embed(words[: self.prefill_tokens], 0))
        self.row = to_bytes(parts.ends.embed(words[:1], 0))
        self._tokens = options.tokens
        self._clients = clients
        self._prefilling = prefilling
        rows = [words[row * TRAINED_TOKENS :][:TRAINED_TOKENS] for row in range(_trained_rows(options))]
        self._trained = [to_bytes(parts.ends.embed(row, 0)) for row in rows]

    async def measure_round(self, variants: Sequence[_Variant], shared: Sequence[Sharing], *, discard: bool) -> None:
        if discard:
            variants = [_Variant(variant.level, variant.clients) for variant in variants]
            shared = [Sharing(sharing.name, work=sharing.work) for sharing in shared]
        for variant in variants:
            act = self._step if variant.level == STEPS else self._generate
            stamps = await _all_at_once(act, variant.clients)
            variant.series[PER_S].append(rate(stamps))
            alone = next(each for each in variants if each.level == variant.level and each.clients == 1)
            variant.series[TIMES].append(variant.series[PER_S][-1] / alone.series[PER_S][-1])
            between = [later - at for each in stamps for at, later in pairwise(each)]
            variant.series[SLOW_MS].append(1e3 * percentile(between, 0.95))
        works: list[Callable[[], Awaitable[None]]] = [
            *(partial(self._prefill, client) for client in self._prefilling),
            self._train,
        ]
        for sharing, work in zip(shared, works, strict=True):
            await measure_sharing(sharing, self._decoder, work, self._tokens)

    async def _step(self, number: int, start: Callable[[], Awaitable[None]]) -> list[float]:
        stamps = []
        async with self._clients[number].inference_session(PROMPT_TOKENS + self._tokens) as session:
            await session.step(self._hidden[number])
            await start()
            for _ in range(self._tokens):
                await session.step(self.row)
                stamps.append(time.perf_counter())
        return stamps

    async def _generate(self, number: int, start: Callable[[], Awaitable[None]]) -> list[float]:
        stamps: list[float] = []
        await start()
        text = list(self._prompts[number])
        async for token in self._clients[number].generate(self._prompts[number], self._tokens + 1, stop_at_eos=False):
            stamps.append(time.perf_counter())
            text.append(token.id)
        self.texts.add(tuple(text))
        return stamps

    @asynccontextmanager
    async def _decoder(self) -> AsyncIterator[Callable[[], Awaitable[object]]]:
        client = self._clients[0]
        async with client.inference_session(client.model.context_tokens) as session:
            await session.step(self._hidden[0])
            yield lambda: session.step(self.row)

    async def _prefill(self, client: Client) -> None:
        async with client.inference_session(self.prefill_tokens) as session:
            await session.step(self.prefill)

    async def _train(self) -> None:
        """Train with a client of its own: it sends the rows of a batch at once, and gets their outputs."""

        async def forward(row: Buffer) -> None:
            trained = self._prefilling[-1].inference_session(TRAINED_TOKENS, priority=Priority.TRAINING)
            async with trained as session:
                await session.step(row)

        async with trio.open_nursery() as nursery:
            for row in self._trained:
                nursery.start_soon(forward, row)


async def _all_at_once(
    act: Callable[[int, Callable[[], Awaitable[None]]], Awaitable[list[float]]], clients: int
) -> list[list[float]]:
    """The results of each client's `act`. An act awaits its second argument, and goes on when all have come there."""
    stamps: list[list[float]] = []
    ready, everybody = 0, trio.Event()

    async def start() -> None:
        nonlocal ready
        ready += 1
        if ready == clients:
            everybody.set()
        await everybody.wait()

    async def one(number: int) -> None:
        stamps.append(await act(number, start))

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(one, number)
    return stamps


def rate(stamps: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all together, from when half of them had their first until half had their last.

    With many clients, one may have its first token when another has its last.
    """
    since, until = statistics.median(each[0] for each in stamps), statistics.median(each[-1] for each in stamps)
    return sum(since < at <= until for each in stamps for at in each) / (until - since)


def _aims(variants: Sequence[_Variant], prefill: Sharing, training: Sharing, wrong: int) -> Iterator[Aim]:
    yield exact_tokens(wrong)
    for variant in variants:
        if variant.clients == OF_CLIENTS:
            name = f"{OF_CLIENTS} clients, {variant.level}: tokens/s, of one client's"
            yield at_least(name, variant.series.median(TIMES), LEAST_TIMES[variant.level])
    for sharing in (prefill, training):
        decode = statistics.median(sharing.decode_times)
        yield at_most(f"decodes beside {sharing.work}: p95, of alone", decode, MOST_DECODE)
    slower, speed = statistics.median(prefill.work_times), 1 / statistics.median(training.work_times)
    yield at_most("the prefill beside decodes: time, of alone", slower, MOST_PREFILL)
    yield at_least("training beside decodes: speed, of alone", speed, LEAST_TRAINING)
