"""How many texts are worth having under way at once through so many real servers on loopback, by turns.

    python tests/bench/at_once.py [NODES] [THREADS] [ROUNDS] [TEXTS AT ONCE ...]      (2, 1, 2; 4 8 12 16)

What `generate --prompts` does by default is `AT_ONCE_PER_STAGE` (node/batch_generate.py) for each of them.
"""

from __future__ import annotations

import sys
import time
from pydoc_data.topics import topics
from statistics import median
from typing import TYPE_CHECKING

import torch
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.sources.embedded import open_embedded
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    from llmnode.client.connect import Client

PROMPT_TOKENS = NEW_TOKENS = 24
TEXTS, TEXTS_ALONE = 36, 6
AT_ONCE = ("4", "8", "12", "16")


async def main(nodes: str = "2", threads: str = "1", rounds: str = "2", *at_once: str) -> None:
    torch.set_num_threads(1)
    parts = load_parts(open_embedded())
    ids = parts.tokenizer.encode(topics["types"])
    prompts = [ids[start : start + PROMPT_TOKENS] for start in range(0, TEXTS * PROMPT_TOKENS, PROMPT_TOKENS)]
    speeds: dict[int, list[float]] = {int(each): [] for each in at_once or AT_ONCE}
    async with private_swarm(split_evenly(parts.model.blocks, int(nodes)), threads=int(threads)) as servers:
        await all_ready(servers)
        async with aconnect([server.address for server in servers], parts=parts) as client:
            for number in range(-1, int(rounds)):  # round -1 warms up
                for places, measured in speeds.items():
                    speed = await _speed(client, prompts[: TEXTS if places > 1 else TEXTS_ALONE], places)
                    if number >= 0:
                        measured.append(speed)
    first = next(iter(speeds.values()))
    print("| texts at once | tokens/s | of the first |\n|---|---|---|")
    for places, measured in speeds.items():
        ratio = median(speed / base for speed, base in zip(measured, first, strict=True))
        print(f"| {places} | {median(measured):.1f} | {ratio:.2f} |")


async def _speed(client: Client, prompts: list[list[int]], at_once: int) -> float:
    """Tokens a second, of all texts."""
    places = trio.CapacityLimiter(at_once)

    async def generate(prompt: list[int]) -> None:
        async with places:
            await client.generate(prompt, NEW_TOKENS, stop_at_eos=False)

    began_s = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(generate, prompt)
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - began_s)


if __name__ == "__main__":
    with single_error():
        trio.run(main, *sys.argv[1:])
