"""The speed that weights of 8 bits gain for a model that needs all its bits: its blocks alone, and a server.

Both kinds of weights take turns in every round. The blocks run in one process, the servers on loopback.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.kit.decoding import FP32, decode_ratios
from bench.kit.random_llama import VOCABULARY, opened
from bench.kit.report import Row, at_least, ratios, spread
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import Span
from llmnode.errors import single_error
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.kit.report import Aim, Spread
    from llmnode.client.connect import Client
    from llmnode.models.sources.folder import ModelFolder

PROMPT = "The history of computing begins long before the first electronic machines. "
PRECISIONS = {"none": FP32, "int8": f"{FP32}+int8"}
"""The precision of each server, by the rounding of its weights."""
LEAST_OF_BLOCKS, LEAST_END_TO_END = 1.5, 1.3


@dataclass(frozen=True, slots=True)
class Int8Gain:
    """Speeds of decodes. `per_s` has tokens a second through a server, by the rounding of its weights."""

    model: str
    of_blocks: Spread
    end_to_end: Spread
    per_s: dict[str, Spread]

    def rows(self) -> Iterator[Row]:
        for quant, of_blocks, end_to_end in (("none", 1.0, 1.0), ("int8", self.of_blocks, self.end_to_end)):
            yield {
                "variant": f"{self.model}, weights in {'int8' if quant == 'int8' else 'fp32'}",
                "tokens/s, of fp32's blocks": of_blocks,
                "tokens/s, end to end": self.per_s[quant],
                "of fp32's, end to end": end_to_end,
            }

    def aims(self) -> Iterator[Aim]:
        name = f"weights in int8, {self.model}: tokens/s, of fp32's"
        yield at_least(f"{name}, blocks", self.of_blocks.median, LEAST_OF_BLOCKS)
        yield at_least(f"{name}, end to end", self.end_to_end.median, LEAST_END_TO_END)


async def measure_int8(model: str, rounds: int, tokens: int, threads: int) -> Int8Gain:
    """`model` is a name for `random_llama.opened`. The caller has set torch's threads."""
    with opened(model) as folder:
        of_blocks = decode_ratios(folder, Span(0, folder.info.blocks), [PRECISIONS["int8"]], rounds=rounds)
        with single_error():
            per_s = await _serve(folder, rounds, tokens, threads)
    end_to_end = ratios(per_s["int8"], per_s["none"])
    return Int8Gain(
        model, of_blocks[PRECISIONS["int8"]], spread(end_to_end), {quant: spread(each) for quant, each in per_s.items()}
    )


async def _serve(folder: ModelFolder, rounds: int, tokens: int, threads: int) -> dict[str, list[float]]:
    """Tokens a second of one generation in each round, by the rounding of the weights. A first round warms up."""
    parts = load_parts(folder)
    prompt = [each % VOCABULARY for each in parts.tokenizer.encode(PROMPT)]
    per_s: dict[str, list[float]] = {quant: [] for quant in PRECISIONS}
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for quant, precision in PRECISIONS.items():
            swarm = private_swarm(
                [Span(0, folder.info.blocks)], threads=threads, model=str(folder.path), options=["--quant", quant]
            )
            servers = await stack.enter_async_context(swarm)
            await all_ready(servers)
            client = aconnect([servers[0].address], parts=parts, dtype=precision)
            clients[quant] = await stack.enter_async_context(client)
        for number in range(-1, rounds):
            for quant, each in clients.items():
                speed = (await each.generate(prompt, tokens, stop_at_eos=False)).tokens_per_s
                if number >= 0 and speed is not None:
                    per_s[quant].append(speed)
    return per_s
