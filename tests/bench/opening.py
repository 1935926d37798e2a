"""How long a client takes, from nothing, until it has something of a swarm that is far away.

    python tests/bench/opening.py [ROUND_TRIP_MS] [ROUNDS]      (100; 5)

Three real servers of SmolLM2-135M on loopback, each behind a proxy that makes it so far away; they know each other. In
every round a new client, with nothing but the address of one of them, connects, opens a session, and gives it a prompt
of 8 tokens and then one more.
"""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
import trio

from bench.kit.shaped import shaped_swarm
from llmnode.client.connect import ClientParts, aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.sources.embedded import open_embedded
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS = 8
STAGES = ("connect", "session", "prompt", "next token", "until the first token")


async def use(peers: Sequence[str], parts: ClientParts) -> list[float]:
    """Seconds of each of the stages."""
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


async def main(round_trip_ms: str = "100", rounds: str = "5") -> None:
    torch.set_num_threads(1)
    parts = load_parts(open_embedded())
    async with AsyncExitStack() as stack:
        servers, proxies = await stack.enter_async_context(shaped_swarm(split_evenly(parts.model.blocks, 3), 1))
        addresses = [server.address for server in servers]
        await use(addresses, parts)  # who names all of them has them meet, and all is warm
        proxies.shape(one_way_s=float(round_trip_ms) / 2000)
        results = [await use(addresses[:1], parts) for _ in range(int(rounds))]
    print("| stage | s |\n|---|---|")
    for stage, seconds in zip(STAGES, zip(*results, strict=True), strict=True):
        print(f"| {stage} | {median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f}) |")


if __name__ == "__main__":
    with single_error():
        trio.run(partial(main, *sys.argv[1:]))
