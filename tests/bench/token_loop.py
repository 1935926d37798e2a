"""The time of the client's own token loop, against transformers' `generate` through the same servers, by turns.

It runs one text, and `--at-once` texts beside each other: as tasks of the loop, and as threads that call `generate`.
Both show their text as it comes. The client's CPU time has all its threads: embedding, scores, links and Python.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import trio
from transformers.generation.streamers import BaseStreamer

from bench.kit.options import add_repeats, add_threads, add_tokens, count
from bench.kit.report import Report, Row, ratios, rounds, spread
from llmnode.client.causal_lm import DistributedModelForCausalLM
from llmnode.client.connect import aconnect, load_parts
from llmnode.client.distributed import Connection
from llmnode.client.portal import open_portal
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.models.text.streaming import TextStream
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from bench.kit.options import Options
    from llmnode.client.connect import Client, ClientParts
    from llmnode.client.portal import Portal

PROMPT_TOKENS = 24


class _Took(NamedTuple):
    tokens_per_s: float
    cpu_ms: float
    """This process's CPU time, for each token."""


class _Shown(BaseStreamer):
    """Turns tokens into text, as a program does that shows them. transformers passes the prompt first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._text: TextStream | None = None

    def put(self, value: torch.Tensor) -> None:
        if self._text is None:
            self._text = TextStream(self._client.tokenizer, value.flatten().tolist())
            return
        self._text.add(int(value))

    def end(self) -> None:
        """The benchmark shows nothing."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=count(), default=1, metavar="N", help="servers, each with a span (default 1)")
    parser.add_argument(
        "--at-once", type=count(2), nargs="+", default=[8], metavar="N", help="texts at once (default 8)"
    )
    add_tokens(parser, 64)
    add_repeats(parser)
    add_threads(parser, "torch threads of each process")


async def run(options: Options) -> Report:
    torch.set_num_threads(options.threads)
    parts = load_parts(open_embedded())
    spans = split_evenly(parts.model.blocks, options.nodes)
    with single_error():
        async with private_swarm(spans, threads=options.threads) as servers:
            await all_ready(servers)
            addresses = [server.address for server in servers]
            return await trio.to_thread.run_sync(_compare, parts, addresses, options)


def _compare(parts: ClientParts, addresses: Sequence[str], options: Options) -> Report:
    """Runs in a thread, since the client's event loop has another one, as in a command."""
    ids = parts.tokenizer.encode(topics["types"])
    rows: list[Row] = []
    with ExitStack() as stack:
        portal = stack.enter_context(open_portal())
        client = stack.enter_context(portal.enter(aconnect(addresses, parts=parts)))
        model = DistributedModelForCausalLM(Connection(open_embedded(), parts.ends, client, portal, ExitStack()))
        for texts in (1, *options.at_once):
            prompts = [ids[at : at + PROMPT_TOKENS] for at in range(0, texts * PROMPT_TOKENS, PROMPT_TOKENS)]
            variants = {
                "transformers": partial(_by_transformers, model, client, prompts, options.tokens),
                "token loop": partial(_by_loop, portal, client, prompts, options.tokens),
            }
            rows += _rows(texts, variants, options)
    return Report(rows)


def _rows(texts: int, variants: Mapping[str, Callable[[], None]], options: Options) -> list[Row]:
    took: dict[str, list[_Took]] = {name: [] for name in variants}
    for number in rounds(options.repeats):
        for name, generate in variants.items():
            measured = _measured(generate, texts * options.tokens)
            if number >= 0:
                took[name].append(measured)
    first = [each.tokens_per_s for each in took["transformers"]]
    return [
        {
            "texts": texts,
            "by": name,
            "tokens/s": spread([each.tokens_per_s for each in measured]),
            "of transformers": spread(ratios([each.tokens_per_s for each in measured], first)),
            "client's CPU, ms a token": spread([each.cpu_ms for each in measured]),
        }
        for name, measured in took.items()
    ]


def _measured(generate: Callable[[], None], tokens: int) -> _Took:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    generate()
    return _Took(tokens / (time.perf_counter() - began_s), 1e3 * (time.process_time() - cpu_s) / tokens)


def _by_transformers(model: Any, client: Client, prompts: Sequence[list[int]], tokens: int) -> None:
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

    def generate(prompt: list[int]) -> None:
        inputs = torch.tensor([prompt])
        with model.open_cache(len(prompt) + tokens) as cache:
            mask = torch.ones_like(inputs)
            model.generate(inputs, attention_mask=mask, cache=cache, streamer=_Shown(client), **options)

    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in pool.map(generate, prompts):
            pass


def _by_loop(portal: Portal, client: Client, prompts: Sequence[list[int]], tokens: int) -> None:
    async def generate(give: Callable[[str], None], prompt: list[int]) -> None:
        async for token in client.generate(prompt, tokens, stop_at_eos=False):
            give(token.text)

    async def generate_all(give: Callable[[str], None]) -> None:
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(generate, give, prompt)

    for _ in portal.stream(generate_all):
        pass
