"""The number of texts at once that is best for a number of real servers on loopback. All numbers take turns.

`generate --prompts` takes `AT_ONCE_PER_STAGE` texts (node/batch_generate.py) for each server by default.
"""

from __future__ import annotations

import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import trio

from bench.kit.options import add_repeats, add_threads, count
from bench.kit.report import Report, Row, ratios, rounds, spread
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse

    from bench.kit.options import Options
    from llmnode.client.connect import Client

PROMPT_TOKENS = NEW_TOKENS = 24
TEXTS, TEXTS_ALONE = 36, 6
AT_ONCE = (4, 8, 12, 16)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=count(), default=2, metavar="N", help="servers, each with a span (default 2)")
    parser.add_argument("--at-once", type=count(), nargs="+", default=AT_ONCE, metavar="N", help="texts at once")
    add_repeats(parser, 2)
    add_threads(parser, "torch threads of each server")


async def run(options: Options) -> Report:
    parts = load_parts(open_embedded())
    ids = parts.tokenizer.encode(topics["types"])
    prompts = [ids[start : start + PROMPT_TOKENS] for start in range(0, TEXTS * PROMPT_TOKENS, PROMPT_TOKENS)]
    speeds: dict[int, list[float]] = {each: [] for each in options.at_once}
    spans = split_evenly(parts.model.blocks, options.nodes)
    with single_error():
        async with private_swarm(spans, threads=options.threads) as servers:
            await all_ready(servers)
            async with aconnect([server.address for server in servers], parts=parts) as client:
                for number in rounds(options.repeats):
                    for places, measured in speeds.items():
                        speed = await _speed(client, prompts[: TEXTS if places > 1 else TEXTS_ALONE], places)
                        if number >= 0:
                            measured.append(speed)
    first = next(iter(speeds.values()))
    rows: list[Row] = [
        {"texts at once": places, "tokens/s": spread(measured), "of the first": spread(ratios(measured, first))}
        for places, measured in speeds.items()
    ]
    return Report(rows)


async def _speed(client: Client, prompts: list[list[int]], at_once: int) -> float:
    """Tokens a second of all texts together."""
    places = trio.CapacityLimiter(at_once)

    async def generate(prompt: list[int]) -> None:
        async with places:
            await client.generate(prompt, NEW_TOKENS, stop_at_eos=False)

    began_s = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(generate, prompt)
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - began_s)
