"""`llmnode bench clients`: 1 to 16 clients of one server of the whole model, and decodes beside a prefill, or training.

Every client is a peer of its own, with its own connection, session and compute thread; all of them are in this process,
since the cores of a small machine are the server's and ours. A ratio is to one client alone in the same round.
Training is what servers compute first for a batch of it: forwards of some rows at once, of its priority.
The scheduler's choice between those who decode and those who prefill is measured without a network, see `sharing.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import trio

from bench.clients.sharing import Sharing, load_workers, measure_sharing, p95, plot, row_of, workers
from bench.kit.exact import Reference
from bench.kit.random_llama import opened
from bench.kit.report import Aim, Row, environment, print_report, spread
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.policy import ClientPolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.errors import single_error
from llmnode.models.tensors import to_bytes
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class ClientsBench:
    """What was asked for: a `model` as `random_llama.opened` has it. `threads` are torch's, here and in the server."""

    model: str | None
    repeats: int
    tokens: int
    thin: bool
    threads: int
    json: bool
    plot: Path | None = None

    @property
    def trained_rows(self) -> int:
        return TRAINED_ROWS // 8 if self.thin else TRAINED_ROWS


@dataclass(slots=True)
class _Variant:
    """So many clients at one level, round by round."""

    level: str
    clients: int
    per_s: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of what one client has in the same round."""
    slow_ms: list[float] = field(default_factory=list)
    """The 95th percentile of the time between two tokens of one client."""


async def bench_clients(config: ClientsBench) -> None:
    torch.set_num_threads(config.threads)
    with opened(config.model) as folder:
        await _bench(config, folder)


async def _bench(config: ClientsBench, folder: ModelFolder) -> None:
    parts, reference = load_parts(folder), Reference(folder.path)
    counts = (1, OF_CLIENTS) if config.thin else COUNTS
    variants = [_Variant(level, clients) for level in LEAST_TIMES for clients in counts]
    shared = [Sharing(f"server, chunks of {chunk}") for chunk in CHUNKS]
    shared.append(Sharing(f"server, rows of {config.trained_rows} x {TRAINED_TOKENS}", work="training"))
    alone = workers(thin=config.thin)
    with single_error():
        async with AsyncExitStack() as stack:
            span = Span(0, folder.info.blocks)
            swarm = private_swarm([span], threads=config.threads, model=config.model and str(folder.path))
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
            rig = _Rig(config, parts, reference.vocabulary, clients, prefilling)
            for number in range(-1, config.repeats):  # round -1 warms everything up
                print(f"round {number + 1} of {config.repeats}", file=sys.stderr)
                await rig.measure_round(variants, shared, discard=number < 0)
        loaded = await trio.to_thread.run_sync(load_workers, folder, rig.prefill, config.tokens)
        for number in range(config.repeats):
            print(f"workers, round {number + 1} of {config.repeats}", file=sys.stderr)
            for sharing in alone:
                await loaded.measure(sharing)
    if config.plot is not None:
        plot([*shared, *alone], config.plot)
    judged = [reference.judge(text, range(PROMPT_TOKENS, len(text))) for text in sorted(rig.texts)]
    conditions = environment(config.threads) | {
        "model": folder.name,
        "tokens": config.tokens,
        "prompt": PROMPT_TOKENS,
        "prefill": rig.prefill_tokens,
        "clients": "each a peer of its own, all in one process",
        "texts": len(judged),
        "near_ties": sum(ties for ties, _ in judged),
    }
    rows = [*(_row(variant) for variant in variants), *(row_of(sharing) for sharing in [*shared, *alone])]
    wrong = sum(wrong for _, wrong in judged)
    print_report("clients", conditions, rows, _aims(variants, shared[0], shared[-1], wrong), as_json=config.json)


class _Rig:
    """`texts` are all that was generated, token ids from the prompt on."""

    def __init__(
        self,
        config: ClientsBench,
        parts: ClientParts,
        vocabulary: int,
        clients: Sequence[Client],
        prefilling: Sequence[Client],
    ) -> None:
        self.prefill_tokens = PREFILL_TOKENS // 8 if config.thin else PREFILL_TOKENS
        self.texts: set[tuple[int, ...]] = set()
        words = [each % vocabulary for each in parts.tokenizer.encode(topics["types"] + topics["specialnames"])]
        self._prompts = [words[at * PROMPT_TOKENS :][:PROMPT_TOKENS] for at in range(len(clients))]
        self._hidden = [to_bytes(parts.ends.embed(prompt, 0)) for prompt in self._prompts]
        self.prefill = to_bytes(parts.ends.embed(words[: self.prefill_tokens], 0))
        self.row = to_bytes(parts.ends.embed(words[:1], 0))
        self._tokens = config.tokens
        self._clients = clients
        self._prefilling = prefilling
        rows = [words[row * TRAINED_TOKENS :][:TRAINED_TOKENS] for row in range(config.trained_rows)]
        self._trained = [to_bytes(parts.ends.embed(row, 0)) for row in rows]

    async def measure_round(self, variants: Sequence[_Variant], shared: Sequence[Sharing], *, discard: bool) -> None:
        if discard:
            variants = [replace(variant, per_s=[], times=[], slow_ms=[]) for variant in variants]
            shared = [Sharing(sharing.name, work=sharing.work) for sharing in shared]
        for variant in variants:
            act = self._step if variant.level == STEPS else self._generate
            stamps = await _all_at_once(act, variant.clients)
            variant.per_s.append(rate(stamps))
            alone = next(each for each in variants if each.level == variant.level and each.clients == 1)
            variant.times.append(variant.per_s[-1] / alone.per_s[-1])
            variant.slow_ms.append(1e3 * p95([later - at for each in stamps for at, later in pairwise(each)]))
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
        generation = await self._clients[number].generate(
            self._prompts[number],
            self._tokens + 1,
            on_token=lambda _: stamps.append(time.perf_counter()),
            stop_at_eos=False,
        )
        self.texts.add((*self._prompts[number], *generation.token_ids))
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
        """Another's forward of a batch, and a client of its own: rows all at once, and their outputs back."""

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
    """What each client's `act` returns; it awaits its second argument, and goes on when all do."""
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
    """Tokens per second, of all together, from when half of them had one until half had their last.

    Who comes with many others may have its first when another has its last.
    """
    since, until = statistics.median(each[0] for each in stamps), statistics.median(each[-1] for each in stamps)
    return sum(since < at <= until for each in stamps for at in each) / (until - since)


def _row(variant: _Variant) -> Row:
    return {
        "level": variant.level,
        "variant": f"{variant.clients} client{'s' * (variant.clients > 1)}",
        "tokens/s": spread(variant.per_s),
        "of one client": spread(variant.times),
        "p95, ms": spread(variant.slow_ms),
    }


def _aims(variants: Sequence[_Variant], prefill: Sharing, training: Sharing, wrong: int) -> list[Aim]:
    aims = [Aim("tokens that are not transformers', and no near tie", wrong, "= 0", wrong == 0)]
    for variant in variants:
        if variant.clients == OF_CLIENTS:
            times, least = statistics.median(variant.times), LEAST_TIMES[variant.level]
            name = f"{OF_CLIENTS} clients, {variant.level}: tokens/s, of one client's"
            aims.append(Aim(name, times, f">= {least:g}", times >= least))
    for sharing in (prefill, training):
        decode = statistics.median(sharing.decode_times)
        name = f"decodes beside {sharing.work}: p95, of alone"
        aims.append(Aim(name, decode, f"<= {MOST_DECODE:g}", decode <= MOST_DECODE))
    slower, speed = statistics.median(prefill.work_times), 1 / statistics.median(training.work_times)
    return [
        *aims,
        Aim("the prefill beside decodes: time, of alone", slower, f"<= {MOST_PREFILL:g}", slower <= MOST_PREFILL),
        Aim("training beside decodes: speed, of alone", speed, f">= {LEAST_TRAINING:g}", speed >= LEAST_TRAINING),
    ]
