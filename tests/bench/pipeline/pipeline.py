"""Benchmark `pipeline`: texts one after another, and several at once through 1, 2 and 3 servers (MDI-LLM's thesis).

All variants take turns within each round. A variant keeps a number of texts going: when one ends, the next begins. The
speed is counted while all of them are going. Its bound is that of a pipeline whose busiest part never waits: a token
takes the time for which the slowest stage, or the ends, work on one. This time is measured twice: while all texts are
going, on shared cores; and before, with one text after another. A server that batches texts may exceed the latter.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import trio

from bench.kit.child import as_program
from bench.kit.drawing import axes_in
from bench.kit.options import add_plot, add_repeats, add_thin, add_threads, add_tokens
from bench.kit.report import Aim, Report, Row, Series, at_least, rounds
from bench.kit.timed_ends import TimedEnds
from llmnode.client.connect import aconnect, load_parts
from llmnode.client.generate import Generation
from llmnode.core.policy import LinkPolicy
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.net.host import open_network
from llmnode.node.batch_generate import AT_ONCE_PER_STAGE
from llmnode.node.processes import LLMNODE, all_ready, private_swarm
from llmnode.swarm.pool import open_pool

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bench.kit.options import Options
    from llmnode.client.connect import Client, ClientParts
    from llmnode.swarm.peer_connection import PeerConnection

PROMPT_TOKENS = 24
TEXTS_PER_PLACE = 3
"""The texts for each of those at once. The first and the last have fewer beside them, and are not counted."""
CHARGED = as_program("bench.pipeline.charged")
IN_THREAD = ["--worker", "thread"]
"""The charged blocks are in the server's own process."""
REAL_NODES = (1, 2)
"""Each node has one thread. The client's ends take a fifth of the blocks' time, on the same two cores."""
EMULATED_NODES = (1, 2, 3, 4)
ANSWER_S = 60.0
LEAST_OF_BOUND = 0.9
THESIS_GAIN = 1.95
"""The gain of 3 nodes over 1 (MDI-LLM's thesis, TinyLlama)."""


SPEED, OF_ONE, STAGE_MS, ENDS_MS = "tokens/s", "of 1 node, in turn", "slowest stage, ms", "ends, ms"
OF_BOUND, OF_LONE_BOUND = "of the bound", "of the bound alone"


@dataclass(slots=True)
class _Variant:
    """A number of nodes, and a number of texts at once."""

    nodes: int
    at_once: int
    is_emulated: bool
    client: Client
    servers: Sequence[PeerConnection]
    mib_per_node: float
    series: Series = field(default_factory=Series)
    differing: int = 0
    """Texts that differ from those of the first variant. One token in a thousand is a near tie."""
    times_s: list[float] = field(default_factory=list)
    """The time of each token, since the beginning of the last round."""

    @property
    def name(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}{', emulated' if self.is_emulated else ''}"
        return f"{nodes}: {'one text after another' if self.at_once == 1 else f'{self.at_once} texts at once'}"


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser)
    add_tokens(parser, 24)
    add_thin(parser)
    add_threads(parser)
    add_plot(parser, "tokens against time")


async def run(options: Options) -> Report:
    parts = load_parts(open_embedded())
    ends = TimedEnds(parts.ends)
    with single_error():
        async with AsyncExitStack() as stack:
            variants = await _variants(options, ends.within(parts), stack)
            await _measure(options, variants, ends, _prompts(parts))
    if options.plot is not None:
        plot(variants, options.plot)
    conditions = {"tokens": options.tokens, "rounds": options.repeats}
    return Report([_row(variant) for variant in variants], _aims(variants), conditions)


def _prompts(parts: ClientParts) -> list[list[int]]:
    token_ids = parts.tokenizer.encode(topics["types"])
    return [token_ids[start : start + PROMPT_TOKENS] for start in range(0, len(token_ids), PROMPT_TOKENS)]


async def _variants(options: Options, parts: ClientParts, stack: AsyncExitStack) -> list[_Variant]:
    variants: list[_Variant] = []
    onlooker = await stack.enter_async_context(
        open_pool(await stack.enter_async_context(open_network([], LinkPolicy())))
    )
    real, emulated = ((), EMULATED_NODES[::2]) if options.thin else (REAL_NODES, EMULATED_NODES)
    for is_emulated, counts in ((False, real), (True, emulated)):
        for nodes in counts:
            spans = split_evenly(parts.model.blocks, nodes)
            program, flags = (CHARGED, IN_THREAD) if is_emulated else (LLMNODE, [])
            swarm = private_swarm(spans, threads=options.threads, program=program, options=flags)
            servers = await stack.enter_async_context(swarm)
            await all_ready(servers)
            mib = statistics.mean(server.pss_mib for server in servers)
            client = await stack.enter_async_context(aconnect([server.address for server in servers], parts=parts))
            onlooker.network.vouch([server.address for server in servers])
            asked = [await onlooker.connect([server.address]) for server in servers]
            at_once = 1, AT_ONCE_PER_STAGE * nodes
            variants += [_Variant(nodes, texts, is_emulated, client, asked, mib) for texts in at_once]
    return variants


async def _measure(
    options: Options, variants: Sequence[_Variant], ends: TimedEnds, prompts: Sequence[list[int]]
) -> None:
    expected: dict[bool, list[Generation]] = {}
    for number in rounds(options.repeats):
        base: dict[bool, float] = {}
        lone_s = 0.0
        for variant in variants:
            print(variant.name, file=sys.stderr)
            texts = TEXTS_PER_PLACE * variant.at_once
            run = await _run(variant, ends, [prompts[index % len(prompts)] for index in range(texts)], options.tokens)
            if number < 0:
                continue
            began, ended = run.began, run.ended
            busiest_s = max(ended.ends_s(began), ended.stage_s(began))
            if variant.at_once == 1:
                lone_s = busiest_s
            speed = ended.speed(began)
            variant.series.note(
                {
                    SPEED: speed,
                    OF_ONE: speed / base.setdefault(variant.is_emulated, speed),
                    OF_BOUND: speed * busiest_s,
                    OF_LONE_BOUND: speed * lone_s,
                    STAGE_MS: 1e3 * ended.stage_s(began),
                    ENDS_MS: 1e3 * ended.ends_s(began),
                }
            )
            variant.times_s = sorted(run.times_s)
            first = expected.setdefault(variant.is_emulated, run.generations)
            variant.differing += sum(
                one.token_ids != other.token_ids for one, other in zip(first, run.generations, strict=False)
            )


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, and what has happened until then: tokens, and the busy seconds of the ends and of each stage."""

    at_s: float
    tokens: int
    ends_busy_s: float
    stages_busy_s: Sequence[float]

    def speed(self, before: Moment) -> float:
        """Tokens a second since `before`."""
        return (self.tokens - before.tokens) / (self.at_s - before.at_s)

    def stage_s(self, before: Moment) -> float:
        """The seconds a token for which the busiest stage has worked since `before`."""
        worked_s = (now - then for now, then in zip(self.stages_busy_s, before.stages_busy_s, strict=True))
        return max(worked_s) / (self.tokens - before.tokens)

    def ends_s(self, before: Moment) -> float:
        return (self.ends_busy_s - before.ends_busy_s) / (self.tokens - before.tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """The texts of one variant: the time of each token, the results, and the time in which all texts were going."""

    times_s: Sequence[float]
    generations: list[Generation]
    began: Moment
    ended: Moment


async def _run(variant: _Variant, ends: TimedEnds, prompts: Sequence[list[int]], tokens: int) -> _Run:
    generations: dict[int, Generation] = {}
    times_s: list[float] = []
    moments: list[Moment] = []
    under_way: set[int] = set()
    places = trio.CapacityLimiter(variant.at_once)
    all_taken, one_is_free = trio.Event(), trio.Event()
    start_s = trio.current_time()

    def note_token(index: int) -> None:
        times_s.append(trio.current_time() - start_s)
        under_way.add(index)
        if len(under_way) == variant.at_once:
            all_taken.set()

    async def generate(index: int) -> None:
        async with places:
            made = []
            async for token in variant.client.generate(prompts[index], tokens, stop_at_eos=False):
                note_token(index)
                made.append(token)
            generations[index] = Generation(tuple(made), "".join(token.text for token in made))
        if len(generations) > len(prompts) - variant.at_once:
            one_is_free.set()

    async def look() -> None:
        for event in (all_taken, one_is_free):
            await event.wait()
            at_s, come, ends_s = trio.current_time() - start_s, len(times_s), ends.busy_s
            stages_s = [(await each.describe(ANSWER_S)).busy_us / 1e6 for each in variant.servers]
            moments.append(Moment(at_s, come, ends_s, stages_s))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for index in range(len(prompts)):
            nursery.start_soon(generate, index)
    return _Run(times_s, [generations[index] for index in range(len(prompts))], *moments)


def _row(variant: _Variant) -> Row:
    row: Row = {"variant": variant.name}
    return row | variant.series.row() | {"MiB per node": variant.mib_per_node, "texts that differ": variant.differing}


def _aims(variants: Sequence[_Variant]) -> Iterator[Aim]:
    for variant in variants:
        if variant.at_once == 1 or variant.nodes == 1:
            continue
        yield at_least(f"of the bound, {variant.name}", variant.series.median(OF_BOUND), LEAST_OF_BOUND)
        if variant.nodes == 3:
            name = "3 nodes, emulated, of 1 node in turn (thesis: 1.95)"
            yield at_least(name, variant.series.median(OF_ONE), THESIS_GAIN)
    memory = [variant.mib_per_node for variant in variants if variant.is_emulated]
    falls = memory == sorted(memory, reverse=True)
    yield Aim("MiB of a node, of most nodes, of 1 node's", memory[-1] / memory[0], "falls", falls)


def plot(variants: Sequence[_Variant], path: Path) -> None:
    """Tokens against time, like figures 10 to 19 of the thesis."""
    with axes_in(path, "bench pipeline", "s", "tokens") as axes:
        for variant in variants:
            style = "--" if variant.is_emulated else "-"
            axes.plot(variant.times_s, range(1, len(variant.times_s) + 1), style, label=variant.name)
        axes.legend()
