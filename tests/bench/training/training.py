"""`tests/bench/run training`: clients that train LoRA through two servers, against one process and against each other.

Each client trains a classifier of two labels, with a LoRA adapter of its own, by AdamW. Its blocks are on the servers.
All clients are in this process, in a thread each. Every step has another version of the adapter, which the client
sends. One process is transformers and PEFT over the whole model, with the threads of both servers. Ratios
compare values of the same round.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import trio

from bench.clients.sharing import Sharing, measure_sharing
from bench.kit.options import add_repeats, add_thin, add_threads
from bench.kit.report import Report, Row, Series, at_least, at_most, rounds, spread
from bench.training.kept import KeptSize, measure_kept
from bench.training.trainer import (
    ALL_LAYERS,
    Adapter,
    Trainer,
    local_trainer,
    remote_trainer,
    some_texts,
    tokens_per_s,
)
from bench.training.wire import Crossed, by_connection, crossed_since
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.models.tensors import to_bytes
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.client.connect import Client
    from llmnode.models.sources.folder import ModelFolder

SERVERS = 2
RANKS = (8, 4, 16, 2, 12, 6, 24, 3)
"""The rank of each client."""
LARGE_ADAPTER = Adapter(16, ALL_LAYERS)
MEMORY = "memory"
PROMPT_TOKENS, POSITIONS = 32, 4096
"""Those of the session that decodes: before it begins, and at most in all. It decodes while a client trains."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Size:
    """`batches` are texts a step of one client, each of `tokens`. Several clients have `rows` of them a step."""

    tokens: int = 128
    batches: Sequence[int] = (16, 64)
    clients: Sequence[int] = (1, 2, 4, 8)
    rows: int = 4
    steps: int = 4
    decodes: int = 64
    kept: KeptSize = KeptSize()


THIN = _Size(32, (2,), (1, 2), 1, 1, 16, KeptSize((2, 4), 1, 2, 1))

LEAST_OF_ONE, PETALS_OF_ONE = 0.8, 0.5
LEAST_TIMES, OF_CLIENTS = 2.5, 4
MOST_DECODE, LEAST_TRAINING = 2.5, 0.3
MOST_LOSS_ERROR = 1e-5

WHAT, PER_S, OF_ONE, TIMES = "what", "tokens/s", "of one process", "of one client"


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 3)
    add_thin(parser)
    add_threads(parser, "torch threads of each server")
    parser.add_argument("--only", choices=["", MEMORY], default="", help="measure the servers' memory alone")


async def run(options: Options) -> Report:
    folder = open_embedded()
    with single_error():
        spans = split_evenly(folder.info.blocks, SERVERS)
        async with private_swarm(spans, threads=options.threads) as servers:
            await all_ready(servers)
            rig = _Rig(options, folder, [server.address for server in servers])
            if options.only != MEMORY:
                await _measure_speeds(rig, options, folder)
            kept = await measure_kept(servers, rig.peers, rig.texts, rig.size.kept)
    if options.only == MEMORY:
        return Report([*kept.rows()], [*kept.aims()], {"ranks": rig.size.kept.ranks, "layers": "all"})
    conditions = {"ranks": RANKS[: max(rig.size.clients)], "layers": "q, v"}
    return Report([*rig.rows(), *kept.rows()], [*rig.aims(), *kept.aims()], conditions)


async def _measure_speeds(rig: _Rig, options: Options, folder: ModelFolder) -> None:
    """All but the servers' memory."""
    try:
        await trio.to_thread.run_sync(rig.measure_batches)
        await trio.to_thread.run_sync(rig.measure_clients)
        async with aconnect(rig.peers, parts=load_parts(folder)) as client:
            for number in rounds(options.repeats, thin=options.thin):
                await rig.measure_sharing(client, discard=number < 0)
        await trio.to_thread.run_sync(rig.measure_bytes)
    finally:
        await trio.to_thread.run_sync(rig.close)


class _Rig:
    """The clients are the same in all measurements but the last. `close` ends them."""

    def __init__(self, options: Options, folder: ModelFolder, peers: Sequence[str]) -> None:
        self.peers = peers
        self.size = size = THIN if options.thin else _Size()
        self.texts = some_texts(load_parts(folder).tokenizer, max(size.batches), size.tokens)
        self._options = options
        self._folder = folder
        self._series = {rows: Series() for rows in size.batches}
        self._of_clients = {clients: Series() for clients in size.clients}
        self._sharing = Sharing("two servers", work="training")
        self._of_bytes: list[Row] = []
        self._loss_error = 0.0
        self._stack = ExitStack()
        self._trainers: list[Trainer] = []

    def close(self) -> None:
        self._stack.close()

    def _clients(self, count: int) -> Sequence[Trainer]:
        """The first clients, which train with `RANKS`."""
        for rank in RANKS[len(self._trainers) : count]:
            self._trainers.append(self._stack.enter_context(remote_trainer(self.peers, Adapter(rank))))
        return self._trainers[:count]

    def measure_batches(self) -> None:
        """One client, and one process with the threads of both servers, by turns."""
        alone = local_trainer(self._folder, Adapter(RANKS[0]))
        (trainer,) = self._clients(1)
        self._compare_losses(alone, trainer)
        for number in rounds(self._options.repeats, thin=self._options.thin):
            for rows, series in self._series.items():
                texts = self.texts[:rows]
                torch.set_num_threads(SERVERS * self._options.threads)
                one_s = _seconds(partial(alone.step, texts))
                torch.set_num_threads(1)
                took_s = _seconds(partial(trainer.step, texts))
                if number >= 0:
                    series.note({PER_S: texts.numel() / took_s, OF_ONE: one_s / took_s})

    def _compare_losses(self, alone: Trainer, trainer: Trainer) -> None:
        """The losses of the first steps: in the second both adapters have learnt from their gradients."""
        for _ in range(2):
            ours, theirs = trainer.step(self.texts[:2]), alone.step(self.texts[:2])
            self._loss_error = max(self._loss_error, abs(ours - theirs) / theirs)

    def measure_clients(self) -> None:
        """Different numbers of clients at once, by turns."""
        trainers, texts = self._clients(max(self.size.clients)), self.texts[: self.size.rows]
        for number in rounds(self._options.repeats, thin=self._options.thin):
            found: dict[int, float] = {}
            for clients, series in self._of_clients.items():
                found[clients] = tokens_per_s(trainers[:clients], texts, self.size.steps)
                if number >= 0:
                    series.note({PER_S: found[clients], TIMES: found[clients] / found[1]})

    async def measure_sharing(self, client: Client, *, discard: bool) -> None:
        """A session that decodes, and a client that trains beside it."""
        hidden = torch.nn.functional.normalize(torch.randn(PROMPT_TOKENS + 1, client.model.hidden_size))

        @asynccontextmanager
        async def open_decoder() -> AsyncIterator[Callable[[], Awaitable[object]]]:
            async with client.inference_session(POSITIONS) as session:
                await session.step(to_bytes(hidden[:PROMPT_TOKENS]))
                yield lambda: session.step(to_bytes(hidden[PROMPT_TOKENS:]))

        (trainer,) = self._clients(1)
        texts = self.texts[: self.size.rows * self.size.steps]

        async def train() -> None:
            await trio.to_thread.run_sync(trainer.step, texts)

        sharing = Sharing("discarded") if discard else self._sharing
        await measure_sharing(sharing, open_decoder, train, self.size.decodes)

    def measure_bytes(self) -> None:
        """One step of a batch, with the adapter as it was before and with a version that the servers do not have."""
        texts = self.texts[: self.size.batches[0]]
        large = self._stack.enter_context(remote_trainer(self.peers, LARGE_ADAPTER))
        for adapter, trainer in ((Adapter(RANKS[0]), self._clients(1)[0]), (LARGE_ADAPTER, large)):
            trainer.step(texts)
            trainer.gradients(texts)
            known, known_s = _crossed(partial(trainer.gradients, texts))
            trainer.step(texts)
            whole, whole_s = _crossed(partial(trainer.gradients, texts))
            self._of_bytes.append(
                {
                    WHAT: f"one step of {len(texts)} x {self.size.tokens}, {adapter.name}",
                    "sent, MiB": known.sent / MIB,
                    "received, MiB": known.received / MIB,
                    "a version, MiB": (whole.sent - known.sent) / MIB,
                    "a version, ms": 1e3 * (whole_s - known_s),
                }
            )

    def rows(self) -> Iterator[Row]:
        for rows, series in self._series.items():
            yield {WHAT: f"{rows} x {self.size.tokens}, one client"} | series.row()
        for clients, series in self._of_clients.items():
            what = f"{self.size.rows} x {self.size.tokens}, {clients} client{'s' * (clients > 1)}"
            yield {WHAT: what} | series.row()
        shared = self._sharing
        times: Row = {"p95, of alone": spread(shared.decode_times), "p95, ms": spread(shared.beside_ms)}
        yield {WHAT: "decodes beside training"} | times
        yield {WHAT: "training beside decodes", "speed, of alone": spread(self._training_speeds)}
        yield from self._of_bytes

    @property
    def _training_speeds(self) -> list[float]:
        return [1 / each for each in self._sharing.work_times]

    def aims(self) -> Iterator[Aim]:
        yield at_most("losses, off from one process", self._loss_error, MOST_LOSS_ERROR)
        for rows, series in self._series.items():
            batch = f"{rows} x {self.size.tokens}"
            name = f"{batch}: speed, of one process with the threads of both (Petals: {PETALS_OF_ONE})"
            yield at_least(name, series.median(OF_ONE), LEAST_OF_ONE)
        most = min(OF_CLIENTS, max(self.size.clients))
        yield at_least(f"{most} clients: speed, of one client's", self._of_clients[most].median(TIMES), LEAST_TIMES)
        yield at_most("decodes beside training: p95, of alone", spread(self._sharing.decode_times).median, MOST_DECODE)
        yield at_least("training beside decodes: speed, of alone", spread(self._training_speeds).median, LEAST_TRAINING)


def _seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def _crossed(act: Callable[[], object]) -> tuple[Crossed, float]:
    """The bytes that cross meanwhile, and the time that it takes."""
    before = by_connection()
    took_s = _seconds(act)
    return crossed_since(before), took_s
