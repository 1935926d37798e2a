"""`llmnode bench swarm`: generation through 1, 2 and 3 servers against transformers in one process, of any model.

All variants take turns within each round, with the same threads, prompt and number of tokens; a ratio compares the
two of one round. The breakdown says where a hop's time goes.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import trio
from transformers import DynamicCache

from bench.kit.exact import Reference
from bench.kit.random_llama import opened
from bench.kit.report import Aim, Row, environment, print_report, spread
from llmnode.client.connect import Client, aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.node.processes import ServerProcess, all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.generate import Generation

PROMPT = "The history of computing begins long before the first electronic machines. " * 2
SERVER_COUNTS = (1, 2, 3)
LOCAL = "transformers, 1 process"


@dataclass(frozen=True, slots=True)
class SwarmBench:
    """What was asked for: a `model` as `random_llama.opened` has it. `threads` are torch's, here and in each server."""

    model: str | None
    repeats: int
    tokens: int
    threads: int
    json: bool


@dataclass(slots=True)
class _Variant:
    """Measurements of one number of servers; the local one has no generations."""

    name: str
    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)


async def bench_swarm(config: SwarmBench) -> None:
    torch.set_num_threads(config.threads)
    with opened(config.model) as folder, single_error():
        parts, reference = load_parts(folder), Reference(folder.path)
        async with AsyncExitStack() as stack:
            clients: list[Client] = []
            for count in SERVER_COUNTS:
                spans = split_evenly(folder.info.blocks, count)
                servers: Sequence[ServerProcess] = await stack.enter_async_context(
                    private_swarm(spans, threads=config.threads, model=config.model and str(folder.path))
                )
                await all_ready(servers)
                addresses = [server.address for server in servers]
                clients.append(await stack.enter_async_context(aconnect(addresses, parts=parts)))
            prompt = [each % reference.vocabulary for each in parts.tokenizer.encode(PROMPT)]
            local, variants = await _measure(config, reference.model, clients, prompt)
        texts = {(*prompt, *each.token_ids) for variant in variants for each in variant.generations}
        judged = [reference.judge(text, range(len(prompt), len(text))) for text in sorted(texts)]
    ties, wrong = (sum(counts) for counts in zip(*judged, strict=True))
    conditions = environment(config.threads) | {"model": folder.name, "texts": len(texts), "near_ties": ties}
    rows = [_row(local), *(_row(variant) for variant in variants)]
    print_report("swarm", conditions, rows, _aims(variants, wrong), as_json=config.json)


async def _measure(
    config: SwarmBench, model: Any, clients: Sequence[Client], prompt: list[int]
) -> tuple[_Variant, list[_Variant]]:  # Any: transformers types its models so
    local = _Variant(LOCAL)
    variants = [_Variant(f"{count} server{'s' * (count > 1)}") for count in SERVER_COUNTS]
    for round_number in range(-1, config.repeats):  # round -1 warms everything up
        print(f"round {round_number + 1} of {config.repeats}", file=sys.stderr)
        local_s = await trio.to_thread.run_sync(_generate_locally, model, prompt, config.tokens)
        if round_number >= 0:
            local.speeds.append(1 / statistics.mean(local_s))
            local.ratios.append(1.0)
            local.token_ms.append(statistics.median(local_s) * 1e3)
        for variant, client in zip(variants, clients, strict=True):
            generation = await client.generate(prompt, config.tokens, stop_at_eos=False)
            speed = generation.tokens_per_s
            if round_number >= 0 and speed is not None:
                variant.speeds.append(speed)
                variant.ratios.append(speed / local.speeds[-1])
                variant.token_ms.append(statistics.median(t.total_s for t in generation.timings[1:]) * 1e3)
                variant.generations.append(generation)
    return local, variants


@torch.inference_mode()
def _generate_locally(model: Any, prompt: list[int], tokens: int) -> list[float]:
    """The seconds of each greedy token but the first. The bare loop: `generate` would add its own cost."""
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
    row: Row = {
        "variant": variant.name,
        "tokens/s": spread(variant.speeds),
        "of transformers": spread(variant.ratios),
        "ms/token": spread(variant.token_ms),
    }
    if variant.generations:
        row |= _breakdown(variant.generations)
    return row


def _breakdown(generations: Sequence[Generation]) -> Row:
    """Medians over all decodes, in ms: of the whole token, and summed over its hops."""
    decodes = [timing for generation in generations for timing in generation.timings[1:]]

    def median_ms(values: list[float]) -> float:
        return statistics.median(values) * 1e3

    hops = len(decodes[0].hops)
    rest_us = [sum(hop.round_trip_us - hop.queue_us - hop.compute_us for hop in timing.hops) for timing in decodes]
    return {
        "embed": median_ms([timing.embed_s for timing in decodes]),
        "head": median_ms([timing.head_s for timing in decodes]),
        "hops: compute": median_ms([sum(hop.compute_us for hop in timing.hops) / 1e6 for timing in decodes]),
        "hops: queue": median_ms([sum(hop.queue_us for hop in timing.hops) / 1e6 for timing in decodes]),
        "hops: wire and loops": statistics.median(rest_us) / 1e3,
        "wire and loops per hop": statistics.median(rest_us) / 1e3 / hops,
    }


def _aims(variants: Sequence[_Variant], wrong: int) -> list[Aim]:
    one, three = (statistics.median(variants[index].ratios) for index in (0, -1))
    by_round = zip(variants[0].token_ms, variants[-1].token_ms, strict=True)
    slope_ms = statistics.median((last - first) / (SERVER_COUNTS[-1] - SERVER_COUNTS[0]) for first, last in by_round)
    return [
        Aim("tokens that are not transformers', and no near tie", wrong, "= 0", wrong == 0),
        Aim("1 server, of transformers in one process", one, ">= 1", one >= 1),
        Aim("3 servers, of transformers in one process", three, ">= 0.9", three >= 0.9),
        Aim("ms per added hop (slope from 1 to 3 servers)", slope_ms, "<= 2", slope_ms <= 2),
    ]
