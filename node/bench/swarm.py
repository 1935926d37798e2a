"""`llmnode bench swarm`: generation through 1, 2 and 3 servers against transformers in one process.

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
from transformers import AutoModelForCausalLM, DynamicCache

from llmnode.client.connect import Client, aconnect, load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.node.bench.report import Aim, Row, environment, print_report, spread
from llmnode.node.processes import ServerProcess, all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.generate import Generation

PROMPT = "The history of computing begins long before the first electronic machines. " * 2
SERVER_COUNTS = (1, 2, 3)
LOCAL = "transformers, 1 process"


@dataclass(frozen=True, slots=True)
class SwarmBench:
    """What was asked for. `threads` is torch's, in this process and in each server."""

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
    folder = open_embedded()
    parts = load_parts(folder)
    model = AutoModelForCausalLM.from_pretrained(folder.path, local_files_only=True).eval()
    with single_error():
        async with AsyncExitStack() as stack:
            clients: list[Client] = []
            for count in SERVER_COUNTS:
                spans = split_evenly(folder.info.blocks, count)
                servers: Sequence[ServerProcess] = await stack.enter_async_context(
                    private_swarm(spans, threads=config.threads)
                )
                await all_ready(servers)
                addresses = [server.address for server in servers]
                clients.append(await stack.enter_async_context(aconnect(addresses, parts=parts)))
            local, variants = await _measure(config, model, clients)
    rows = [_row(local), *(_row(variant) for variant in variants)]
    print_report("swarm", environment(config.threads), rows, _aims(variants), as_json=config.json)


async def _measure(
    config: SwarmBench, model: Any, clients: Sequence[Client]
) -> tuple[_Variant, list[_Variant]]:  # Any: transformers types its models so
    prompt = clients[0].tokenizer.encode(PROMPT)
    local = _Variant(LOCAL)
    variants = [_Variant(f"{count} server{'s' * (count > 1)}") for count in SERVER_COUNTS]
    for round_number in range(-1, config.repeats):  # round -1 warms everything up
        print(f"round {round_number + 1} of {config.repeats}", file=sys.stderr)
        expected, local_s = await trio.to_thread.run_sync(_generate_locally, model, prompt, config.tokens)
        if round_number >= 0:
            local.speeds.append(1 / statistics.mean(local_s))
            local.ratios.append(1.0)
            local.token_ms.append(statistics.median(local_s) * 1e3)
        for variant, client in zip(variants, clients, strict=True):
            generation = await client.generate(prompt, config.tokens, stop_at_eos=False)
            if list(generation.token_ids) != expected:
                print(f"{variant.name}: tokens differ from transformers'", file=sys.stderr)
            speed = generation.tokens_per_s
            if round_number >= 0 and speed is not None:
                variant.speeds.append(speed)
                variant.ratios.append(speed / local.speeds[-1])
                variant.token_ms.append(statistics.median(t.total_s for t in generation.timings[1:]) * 1e3)
                variant.generations.append(generation)
    return local, variants


@torch.inference_mode()
def _generate_locally(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and the seconds of each but the first. The bare loop: `generate` would add its own cost."""
    cache = DynamicCache(config=model.config)
    fresh = torch.tensor([prompt])
    chosen: list[int] = []
    seconds: list[float] = []
    while len(chosen) < tokens:
        started = time.perf_counter()
        logits = model(fresh, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        chosen.append(int(logits[0, -1].argmax()))
        fresh = torch.tensor([chosen[-1:]])
        seconds.append(time.perf_counter() - started)
    return chosen, seconds[1:]


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


def _aims(variants: Sequence[_Variant]) -> list[Aim]:
    three = statistics.median(variants[-1].ratios)
    by_round = zip(variants[0].token_ms, variants[-1].token_ms, strict=True)
    slope_ms = statistics.median((last - first) / (SERVER_COUNTS[-1] - SERVER_COUNTS[0]) for first, last in by_round)
    return [
        Aim("3 servers, of transformers in one process", three, ">= 0.8", three >= 0.8),
        Aim("ms per added hop (slope from 1 to 3 servers)", slope_ms, "<= 3", slope_ms <= 3),
    ]
