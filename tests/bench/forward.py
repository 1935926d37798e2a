"""`tests/bench/run forward`: batches of rows through two servers against one process, hidden states in and out.

The rows of a batch are sessions that are stepped together. So both servers compute at the same time, each on threads of
its own. Hence there are two baselines: transformers' forward of the whole batch on the threads of one server, and on
those of both. All take turns within each round.
"""

from __future__ import annotations

import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import trio

from bench.kit.exact import reference_of
from bench.kit.options import add_repeats, add_thin, add_threads
from bench.kit.report import Report, Row, Series, at_least, exact_tokens, rounds
from llmnode.client.connect import load_parts
from llmnode.client.model import connect
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bench.kit.options import Options
    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.client.connect import ClientParts
    from llmnode.models.load import Ends
    from llmnode.models.sources.folder import ModelFolder

ROW_TOKENS = 128
BATCHES = (1, 16, 64)
THIN_BATCHES = (1, 4)
SERVERS = 2
LEAST_OF_ONE = 0.95
"""The largest batch, with the threads of one server on either side, must reach this. Petals has 0.89 there."""


PER_S, OF_ONE, OF_BOTH = (
    "positions/s",
    "of 1 process, threads of one server",
    "of 1 process, threads of both",
)


class _Variant:
    """A number of rows in a batch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.name = f"{rows} x {ROW_TOKENS}"
        self.series = Series()


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser)
    add_thin(parser)
    add_threads(parser, "torch threads of each server")


async def run(options: Options) -> Report:
    folder = open_embedded()
    parts = load_parts(folder)
    variants = [_Variant(rows) for rows in (THIN_BATCHES if options.thin else BATCHES)]
    with single_error():
        spans = split_evenly(parts.model.blocks, SERVERS)
        async with private_swarm(spans, threads=options.threads) as servers:
            await all_ready(servers)
            peers = [server.address for server in servers]
            rig = _Rig(folder, parts.ends, _texts(parts, variants[-1].rows))
            await trio.to_thread.run_sync(_measure, options, rig, peers, variants)
    judged = [rig.reference.judge_choices(text, choices) for text, choices in zip(rig.texts, rig.choices, strict=True)]
    ties, wrong = (sum(counts) for counts in zip(*judged, strict=True))
    rows: list[Row] = [{"batch": variant.name} | variant.series.row() for variant in variants]
    name = f"{variants[-1].name}, of 1 process with the threads of one server (Petals: 0.89)"
    aims = [exact_tokens(wrong), at_least(name, variants[-1].series.median(OF_ONE), LEAST_OF_ONE)]
    return Report(rows, aims, {"positions": ROW_TOKENS * len(rig.texts), "near_ties": ties})


def _texts(parts: ClientParts, rows: int) -> list[list[int]]:
    token_ids = parts.tokenizer.encode("".join(topics.values()))
    return [token_ids[row * ROW_TOKENS :][:ROW_TOKENS] for row in range(rows)]


def _measure(options: Options, rig: _Rig, peers: Sequence[str], variants: Sequence[_Variant]) -> None:
    with connect(peers=peers) as model:
        for number in rounds(options.repeats, thin=options.thin):
            for variant in variants if number >= 0 else variants[:-1]:
                one_s = rig.locally(variant.rows, options.threads)
                servers_s = rig.through_servers(model, variant.rows)
                both_s = rig.locally(variant.rows, SERVERS * options.threads)
                if number >= 0:
                    per_s = variant.rows * ROW_TOKENS / servers_s
                    variant.series.note({PER_S: per_s, OF_ONE: one_s / servers_s, OF_BOTH: both_s / servers_s})


class _Rig:
    """`choices` has, for each text, the likeliest token at each position by the servers' latest forward."""

    def __init__(self, folder: ModelFolder, ends: Ends, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.choices: list[dict[int, int]] = [{} for _ in texts]
        self.reference = reference_of(folder.path)
        self._ends = ends
        self._hidden = [ends.embed(text, 0) for text in texts]

    def through_servers(self, model: DistributedModelForCausalLM, rows: int) -> float:
        """The time from opening the rows' sessions until all are closed."""
        began_s = time.perf_counter()
        with model.open_cache(ROW_TOKENS, rows, priority="batch") as cache:
            outputs = cache.run_rows(self._hidden[:rows])
        took_s = time.perf_counter() - began_s
        for row, output in enumerate(outputs):
            assert output is not None
            chosen = self._ends.logits(output).argmax(dim=-1).tolist()
            self.choices[row] = dict(enumerate(chosen, start=1))
        return took_s

    @torch.inference_mode()
    def locally(self, rows: int, threads: int) -> float:
        """The time of transformers for the blocks and the norm of all rows together. The norm takes next to nothing."""
        torch.set_num_threads(threads)  # it holds for the calling thread
        batch = torch.stack(self._hidden[:rows])
        began_s = time.perf_counter()
        self.reference.model.model(inputs_embeds=batch, use_cache=False)
        return time.perf_counter() - began_s
