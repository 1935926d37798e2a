"""What weights of 8 bits gain end to end: tokens a second through a server, against one with weights as they are.

    python tests/bench/int8.py [MODEL] [ROUNDS]      (llama-222m, which needs all its bits; 7)

Both servers are real and on loopback, with one torch thread; a generation through each in turn in every round.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from statistics import median, quantiles

import torch
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import Span
from llmnode.errors import single_error
from llmnode.node.bench.random_llama import VOCABULARY, opened
from llmnode.node.processes import all_ready, private_swarm

TOKENS = 48
PROMPT = "The history of computing begins long before the first electronic machines. "


async def main(model: str = "llama-222m", rounds: str = "7") -> None:
    torch.set_num_threads(1)
    speeds: dict[str, list[float]] = {"none": [], "int8": []}
    with opened(model) as folder:
        parts = load_parts(folder)
        prompt = [each % VOCABULARY for each in parts.tokenizer.encode(PROMPT)]
        async with AsyncExitStack() as stack:
            clients = {}
            for quant, dtype in (("none", "float32"), ("int8", "float32+int8")):
                swarm = private_swarm(
                    [Span(0, folder.info.blocks)], threads=1, model=str(folder.path), options=["--quant", quant]
                )
                servers = await stack.enter_async_context(swarm)
                await all_ready(servers)
                client = aconnect([servers[0].address], parts=parts, dtype=dtype)
                clients[quant] = await stack.enter_async_context(client)
            for number in range(-1, int(rounds)):  # round -1 warms up
                for quant, client in clients.items():
                    speed = (await client.generate(prompt, TOKENS, stop_at_eos=False)).tokens_per_s
                    if number >= 0 and speed is not None:
                        speeds[quant].append(speed)
    ratios = [few / all_ for few, all_ in zip(speeds["int8"], speeds["none"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    print("| weights | tokens/s | of as they are |\n|---|---|---|")
    print(f"| as they are | {median(speeds['none']):.1f} | 1 |")
    print(f"| int8 | {median(speeds['int8']):.1f} | {median(ratios):.2f} ({low:.2f}-{high:.2f}) |")


if __name__ == "__main__":
    with single_error():
        trio.run(main, *sys.argv[1:])
