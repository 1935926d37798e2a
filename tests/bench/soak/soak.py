"""`tests/bench/run soak`: what servers have open and hold after many sessions, most of which were disturbed.

There are three spans with two real servers each, behind proxies, and eight clients in this process. A seed draws how
sessions are opened, stepped, rolled back, cancelled at any moment and abandoned, while links break and fall silent.
Meanwhile the benchmark asks the servers what they have open, and reads their memory from outside. `--saturate` keeps
every core busy beside it: then a slow peer must not be taken for a dead one.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import trio

from bench.kit.exact import reference_of
from bench.kit.options import add_thin, add_threads
from bench.kit.report import Interval, Report, Row, at_most, exactly, few_near_ties
from bench.kit.shaped import shaped_swarm
from bench.soak.trend import BLOCKS, slope_an_hour
from bench.soak.visits import Visitor, make_scripts
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.ids import PeerId
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.node.processes import with_worker

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from bench.kit.options import Options
    from bench.kit.proxy import Proxies
    from bench.kit.report import Aim
    from bench.soak.visits import Loss, Text, Visit
    from llmnode.client.connect import ClientParts
    from llmnode.node.processes import ServerProcess

SPANS, TWINS, CLIENTS = 3, 2, 8
THIN_SPANS, THIN_CLIENTS = 2, 3
SEED = 0
WARM_UP = 1 / 3
"""This first share of the samples is left out."""
SAMPLES = 45
"""The number of samples of a short run. Longer runs take one every `SAMPLE_EVERY_S`."""
FEWEST_SAMPLES = 2 * BLOCKS
"""A slope needs this number. If a busy machine took fewer, the run goes on."""
SAMPLE_EVERY_S = 5.0
TOLD_EVERY_S = 60.0
DISTURBED_EVERY_S = 10.0
SILENT_SHARE = 0.25
SILENCE_S = 9.0
"""It is longer than `LinkPolicy.silence_s`, so links are given up."""
AFTERMATH_S = 15.0
"""A session may notice a loss this long after its cause: after the silence limit, and at its next step."""
SETTLE_S = 60.0

MEMORY = "memory, MiB"
"""Without mapped files, since other programs come and go that map the same libraries."""
OPEN = ("links", "connections", "streams", "tasks", "files")
"""The counts of a readout that must not grow. Sessions and KV come and go, and must be 0 in the end."""
SERVERS, CLIENT = "a server", "the clients"
MOST_MEMORY_PERCENT = 1.0
"""An allocator's peak grows slowly for a while. A run of twice the length finds a leak of half the size."""

BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"


MINUTES, THIN_MINUTES = 30.0, 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """Values by quantity: `servers` has the means over the servers, `clients` those of this process."""

    time_s: float
    servers: dict[str, float]
    clients: dict[str, float]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """All links through one server's proxy broke, or were silent for a while."""

    peer: PeerId
    began_s: float
    ended_s: float
    links: int


@dataclass(slots=True)
class Record:
    """The events and samples of a run."""

    visits: list[Visit] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    sampled: trio.Event = field(default_factory=trio.Event)
    left: dict[str, int] = field(default_factory=dict)
    """The sums over the servers after the clients have left."""

    def was_disturbed(self, peer: PeerId, since_s: float, until_s: float) -> bool:
        return any(
            each.peer == peer and each.began_s <= until_s and since_s <= each.ended_s + AFTERMATH_S
            for each in self.disturbances
        )

    def false_deaths(self) -> list[Loss]:
        """Peers that a session lost although nothing had disturbed them."""
        return [
            loss
            for visit in self.visits
            for loss in visit.losses
            if not self.was_disturbed(loss.peer, visit.began_s, loss.noticed_s)
        ]

    def undisturbed(self) -> list[Visit]:
        return [
            visit
            for visit in self.visits
            if not any(self.was_disturbed(peer, visit.began_s, visit.ended_s) for peer in visit.peers)
        ]

    def counts(self) -> dict[str, int]:
        fates = Counter(visit.fate for visit in self.visits)
        undisturbed = self.undisturbed()
        return {
            "sessions": len(self.visits),
            **{f"sessions_{fate}": count for fate, count in sorted(fates.items())},
            "tokens": sum(visit.chosen for visit in self.visits),
            "disturbances": len(self.disturbances),
            "links_broken": sum(each.links for each in self.disturbances),
            "recoveries": sum(len(visit.losses) for visit in self.visits),
            "sessions_undisturbed": len(undisturbed),
            "tokens_undisturbed": sum(visit.chosen for visit in undisturbed),
        }


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=0.0,
        metavar="M",
        help=f"(default {MINUTES:g}; with --thin {THIN_MINUTES:g})",
    )
    parser.add_argument("--saturate", action="store_true", help="keep every core busy meanwhile")
    add_thin(parser)
    add_threads(parser)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{minutes:g}: give more than 0")
    return minutes


async def run(options: Options) -> Report:
    options.minutes = options.minutes or (THIN_MINUTES if options.thin else MINUTES)
    folder = open_embedded()
    parts = load_parts(folder)
    spans = split_evenly(parts.model.blocks, THIN_SPANS if options.thin else SPANS) * TWINS
    record = Record()
    with single_error(), ExitStack() as stack:
        async with shaped_swarm(spans, options.threads) as (servers, proxies):
            if options.saturate:
                stack.enter_context(_burners(os.cpu_count() or 1))
            await _soak(options, parts, servers, proxies, record)
            record.left = await _settled(servers)
            stack.close()
    counts = record.counts()
    print(", ".join(f"{name} {count}" for name, count in counts.items()), file=sys.stderr)
    texts = {text for visit in record.visits for text in visit.texts}
    print(f"comparing {len(texts)} different texts with transformers", file=sys.stderr)
    ties, wrong, compared = await trio.to_thread.run_sync(_judge, folder.path, texts)
    conditions = {
        "servers": len(spans),
        "clients": _clients(options),
        "minutes": options.minutes,
        "saturated": options.saturate,
        "seed": SEED,
        **counts,
        "different_texts": len(texts),
        "choices_compared": compared,
        "errors": sorted({visit.error for visit in record.visits if visit.error}),
        "false_deaths": [loss.cause for loss in record.false_deaths()],
    }
    rows = _rows(record.samples)
    aims = [*_aims_of_sessions(record, ties, wrong, compared), *_aims_of_growth(rows)]
    legend = f"medians after a warm-up of {WARM_UP:.0%}; slopes with intervals of 95 %"
    return Report(rows, aims, conditions, legend)


def _clients(options: Options) -> int:
    return THIN_CLIENTS if options.thin else CLIENTS


@contextmanager
def _burners(count: int) -> Iterator[None]:
    """Keep `count` cores busy. These processes end with this one too."""
    processes = [subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# During the run


async def _soak(
    options: Options, parts: ClientParts, servers: Sequence[ServerProcess], proxies: Proxies, record: Record
) -> None:
    """Run until the time is over and the last sessions have ended."""
    scripts = make_scripts(parts, SEED)
    async with AsyncExitStack() as stack:
        visitors = []
        for number in range(_clients(options)):
            client = await stack.enter_async_context(aconnect([each.address for each in servers], parts=parts))
            rng = random.Random(f"{SEED} client {number}")
            visitors.append(Visitor(client, scripts, rng, record.visits))
        began_s = trio.current_time()
        async with trio.open_nursery() as beside:
            beside.start_soon(_watch, options, servers, record, began_s)
            beside.start_soon(_disturb, servers, proxies, record)
            async with trio.open_nursery() as visiting:
                for visitor in visitors:
                    visiting.start_soon(visitor.visit_until, began_s + 60 * options.minutes)
            while len(record.samples) < FEWEST_SAMPLES:
                await record.sampled.wait()
            beside.cancel_scope.cancel()


async def _disturb(servers: Sequence[ServerProcess], proxies: Proxies, record: Record) -> None:
    """Disturb one server at a time, so that its twin can be reached. It never ends by itself."""
    rng = random.Random(f"{SEED} links")
    while True:
        await trio.sleep(rng.expovariate(1 / DISTURBED_EVERY_S))
        index = rng.randrange(len(servers))
        began_s, links = trio.current_time(), 0
        if rng.random() < SILENT_SHARE:
            proxies.cut(index)
            try:
                await trio.sleep(SILENCE_S)
            finally:
                proxies.heal(index)
        else:
            links = proxies.reset(index)
        record.disturbances.append(Disturbance(PeerId(servers[index].peer), began_s, trio.current_time(), links))


async def _watch(options: Options, servers: Sequence[ServerProcess], record: Record, began_s: float) -> None:
    """Take samples. It never ends by itself."""
    every_s = min(SAMPLE_EVERY_S, 60 * options.minutes / SAMPLES)
    told_s = 0.0
    while True:
        sample = await _sample(servers, trio.current_time() - began_s)
        record.samples.append(sample)
        record.sampled.set()
        record.sampled = trio.Event()
        if sample.time_s >= told_s:
            told_s += TOLD_EVERY_S
            open_now = ", ".join(f"{name} {count:.1f}" for name, count in sample.servers.items())
            print(f"{sample.time_s / 60:.1f} min, {len(record.visits)} sessions: {open_now}", file=sys.stderr)
        await trio.sleep(every_s)


async def _sample(servers: Sequence[ServerProcess], time_s: float) -> Sample:
    readouts = [await server.introspect() for server in servers]
    memory = [sum(map(_memory_mib, with_worker(server.pid))) for server in servers]
    of_servers = {name: statistics.mean(readout[name] for readout in readouts) for name in ("sessions", *OPEN)}
    of_servers[MEMORY] = statistics.mean(memory)
    tasks = trio.lowlevel.current_statistics().tasks_living
    own = psutil.Process()
    return Sample(time_s, of_servers, {"tasks": tasks, "files": own.num_fds(), MEMORY: _memory_mib(own)})


def _memory_mib(process: psutil.Process) -> float:
    memory = process.memory_info()
    size_bytes = memory.rss - memory.shared if hasattr(memory, "shared") else process.memory_full_info().uss
    return float(size_bytes) / 2**20


async def _settled(servers: Sequence[ServerProcess]) -> dict[str, int]:
    """The sums of what the unused servers still hold. It waits for some time until they are all 0."""
    left: dict[str, int] = {}
    with trio.move_on_after(SETTLE_S):
        while not left or any(left.values()):
            readouts = [await server.introspect() for server in servers]
            left = {name: sum(each[name] for each in readouts) for name in ("sessions", "kv_tokens_reserved")}
            await trio.sleep(0.1)
    return left


def _judge(path: Path, texts: Collection[Text]) -> tuple[int, int, int]:
    """The numbers of near ties, of wrong choices, and of all choices that were compared."""
    reference = reference_of(path)
    verdicts = [reference.judge(text.tokens, range(text.start, text.stop)) for text in texts]
    compared = sum(text.stop - text.start for text in texts)
    return sum(ties for ties, _ in verdicts), sum(wrong for _, wrong in verdicts), compared


# The report


def _rows(samples: Sequence[Sample]) -> list[Row]:
    kept = samples[round(WARM_UP * len(samples)) :]
    times_s = [sample.time_s for sample in kept]
    of_servers = [_row(SERVERS, name, times_s, [each.servers[name] for each in kept]) for name in samples[0].servers]
    of_clients = [_row(CLIENT, name, times_s, [each.clients[name] for each in kept]) for name in samples[0].clients]
    return of_servers + of_clients


def _row(process: str, quantity: str, times_s: Sequence[float], values: Sequence[float]) -> Row:
    third = len(values) // 3
    slope = slope_an_hour(times_s, values)
    percent = 100 * (times_s[-1] - times_s[0]) / 3600 / (statistics.median(values) or 1)
    return {
        "process": process,
        "quantity": quantity,
        "first third": statistics.median(values[:third]),
        "last third": statistics.median(values[-third:]),
        "most": max(values),
        "slope an hour": slope,
        "grew, %": Interval(slope.estimate * percent, slope.low * percent, slope.high * percent),
    }


def _aims_of_sessions(record: Record, ties: int, wrong: int, compared: int) -> list[Aim]:
    errors = sum(bool(visit.error) for visit in record.visits)
    false = len(record.false_deaths())
    return [
        exactly("wrong tokens", wrong),
        few_near_ties(ties, compared),
        exactly("sessions that failed", errors),
        exactly("peers lost that nobody disturbed", false),
        *(exactly(f"{name} in the end", count) for name, count in record.left.items()),
    ]


def _aims_of_growth(rows: Sequence[Row]) -> list[Aim]:
    """Aims for the growth of each quantity. The clients' memory has none, since it includes this benchmark's record."""
    aims = []
    for row in rows:
        grew, quantity = row["grew, %"], row["quantity"]
        assert isinstance(grew, Interval)
        most = MOST_MEMORY_PERCENT if quantity == MEMORY else 0
        if quantity in OPEN or (quantity == MEMORY and row["process"] == SERVERS):
            name = f"{row['process']}: {quantity} grew, %, low end of the interval"
            aims.append(at_most(name, grew.low, most))
    return aims
