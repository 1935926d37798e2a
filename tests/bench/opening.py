"""The time in which a new client gets its first tokens from a distant swarm.

Three real servers of SmolLM2-135M run on loopback, each behind a proxy that adds a delay. They know each other. In
every round a new client has the address of one of them and nothing else. It connects, opens a session, and gives it a
prompt of 8 tokens and then one more.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from bench.kit.options import add_repeats
from bench.kit.report import Report, spread
from bench.kit.shaped import shaped_swarm
from llmnode.client.connect import ClientParts, aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bench.kit.options import Options

PROMPT_TOKENS = 8
STAGES = ("connect", "session", "prompt", "next token", "until the first token")


async def use(peers: Sequence[str], parts: ClientParts) -> list[float]:
    """The seconds of each part of the way."""
    prompt, row = (to_bytes(parts.ends.embed([1] * count, 0)) for count in (PROMPT_TOKENS, 1))
    stamps = [time.perf_counter()]
    async with aconnect(peers, parts=parts) as client:
        stamps.append(time.perf_counter())
        async with client.inference_session(PROMPT_TOKENS + 1) as session:
            stamps.append(time.perf_counter())
            for hidden in (prompt, row):
                await session.step(hidden)
                stamps.append(time.perf_counter())
    return [*(end - start for start, end in pairwise(stamps)), stamps[3] - stamps[0]]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--round-trip-ms", type=float, default=100.0, metavar="MS", help="to each server (default 100)")
    add_repeats(parser)


async def run(options: Options) -> Report:
    parts = load_parts(open_embedded())
    with single_error():
        async with shaped_swarm(split_evenly(parts.model.blocks, 3), 1) as (servers, proxies):
            addresses = [server.address for server in servers]
            await use(addresses, parts)  # this client names all servers, so that they meet, and warms everything up
            proxies.shape(one_way_s=options.round_trip_ms / 2000)
            results = [await use(addresses[:1], parts) for _ in range(options.repeats)]
    columns = zip(STAGES, zip(*results, strict=True), strict=True)
    return Report([{"stage": stage, "s": spread(seconds)} for stage, seconds in columns])
