"""`tests/bench/run swarm`: generation through 1, 2 and 3 servers against transformers in one process, of any model.

All variants take turns within each round, with the same threads, prompt and number of tokens. A ratio compares two
values of one round. The breakdown shows where the time of a hop goes.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import torch
import trio
from transformers import DynamicCache

from bench.kit.exact import Reference, judge_all
from bench.kit.options import add_model, add_repeats, add_threads, add_tokens
from bench.kit.random_llama import opened
from bench.kit.report import Report, Row, Series, at_least, at_most, exact_tokens, rounds
from llmnode.client.connect import Client, aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.node.processes import ServerProcess, all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.client.generate import Generation

PROMPT = "The history of computing begins long before the first electronic machines. " * 2
SERVER_COUNTS = (1, 2, 3)
LOCAL = "transformers, 1 process"


SPEED, RATIO, TOKEN_MS = "tokens/s", "of transformers", "ms/token"


class _Variant:
    """A number of servers. The local variant has no generations."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.series = Series()
        self.generations: list[Generation] = []


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_repeats(parser)
    add_tokens(parser, 64)
    add_threads(parser)


async def run(options: Options) -> Report:
    with opened(options.model) as folder, single_error():
        parts, reference = load_parts(folder), Reference(folder.path)
        async with AsyncExitStack() as stack:
            clients: list[Client] = []
            for count in SERVER_COUNTS:
                spans = split_evenly(folder.info.blocks, count)
                servers: Sequence[ServerProcess] = await stack.enter_async_context(
                    private_swarm(spans, threads=options.threads, model=options.model and str(folder.path))
                )
                await all_ready(servers)
                addresses = [server.address for server in servers]
                clients.append(await stack.enter_async_context(aconnect(addresses, parts=parts)))
            prompt = [each % reference.vocabulary for each in parts.tokenizer.encode(PROMPT)]
            local, variants = await _measure(options, reference.model, clients, prompt)
        texts = {(*prompt, *each.token_ids) for variant in variants for each in variant.generations}
        ties, wrong = judge_all(reference, texts, len(prompt))
    conditions = {"model": folder.name, "texts": len(texts), "near_ties": ties}
    return Report([_row(each) for each in (local, *variants)], _aims(variants, wrong), conditions)


async def _measure(
    options: Options, model: Any, clients: Sequence[Client], prompt: list[int]
) -> tuple[_Variant, list[_Variant]]:  # Any: transformers types its models so
    local = _Variant(LOCAL)
    variants = [_Variant(f"{count} server{'s' * (count > 1)}") for count in SERVER_COUNTS]
    for number in rounds(options.repeats):
        local_s = await trio.to_thread.run_sync(_generate_locally, model, prompt, options.tokens)
        local_speed = 1 / statistics.mean(local_s)
        if number >= 0:
            local.series.note({SPEED: local_speed, RATIO: 1.0, TOKEN_MS: statistics.median(local_s) * 1e3})
        for variant, client in zip(variants, clients, strict=True):
            generation = await client.generate(prompt, options.tokens, stop_at_eos=False)
            speed = generation.tokens_per_s
            if number >= 0 and speed is not None:
                token_ms = statistics.median(timing.total_s for timing in generation.timings[1:]) * 1e3
                variant.series.note({SPEED: speed, RATIO: speed / local_speed, TOKEN_MS: token_ms})
                variant.generations.append(generation)
    return local, variants


@torch.inference_mode()
def _generate_locally(model: Any, prompt: list[int], tokens: int) -> list[float]:
    """The seconds of each greedy token but the first. It is a bare loop, since `generate` would add its own cost."""
    cache = DynamicCache(config=model.config)
    fresh = torch.tensor([prompt])
    seconds: list[float] = []
    while len(seconds) < tokens:
        started = time.perf_counter()
        logits = model(fresh, cache=cache, use_cache=True, logits_to_keep=1).logits
        fresh = logits[:, -1].argmax(dim=-1, keepdim=True)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _row(variant: _Variant) -> Row:
    row: Row = {"variant": variant.name} | variant.series.row()
    return row | _breakdown(variant.generations) if variant.generations else row


def _breakdown(generations: Sequence[Generation]) -> Row:
    """Medians over all decodes, in ms, of the whole token, and of its parts summed over its hops."""
    decodes = [timing for generation in generations for timing in generation.timings[1:]]

    def median_ms(values: list[float]) -> float:
        return statistics.median(values) * 1e3

    hops = len(decodes[0].hops)
    rest_us = [sum(hop.elapsed_us - hop.queue_us - hop.compute_us for hop in timing.hops) for timing in decodes]
    return {
        "embed": median_ms([timing.embed_s for timing in decodes]),
        "head": median_ms([timing.head_s for timing in decodes]),
        "hops: compute": median_ms([sum(hop.compute_us for hop in timing.hops) / 1e6 for timing in decodes]),
        "hops: queue": median_ms([sum(hop.queue_us for hop in timing.hops) / 1e6 for timing in decodes]),
        "hops: wire and loops": statistics.median(rest_us) / 1e3,
        "wire and loops per hop": statistics.median(rest_us) / 1e3 / hops,
    }


def _aims(variants: Sequence[_Variant], wrong: int) -> Iterator[Aim]:
    one, *_, three = (variant.series for variant in variants)
    by_round = zip(one[TOKEN_MS], three[TOKEN_MS], strict=True)
    slope_ms = statistics.median((last - first) / (SERVER_COUNTS[-1] - SERVER_COUNTS[0]) for first, last in by_round)
    yield exact_tokens(wrong)
    yield at_least("1 server, of transformers in one process", one.median(RATIO), 1)
    yield at_least("3 servers, of transformers in one process", three.median(RATIO), 0.9)
    yield at_most("ms per added hop (slope from 1 to 3 servers)", slope_ms, 2)
