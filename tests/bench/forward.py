"""`llmnode bench forward`: batches of rows through two servers against one process, hidden states in and out.

The rows of a batch are sessions that are stepped together, so that the two servers compute at the same time, each on
threads of its own. Hence two baselines: transformers' forward of the whole batch on the threads of one server, and on
those of both. All take turns within each round.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import trio

from bench.kit.exact import Reference
from bench.kit.report import Aim, Row, environment, print_report, spread
from llmnode.client.connect import load_parts
from llmnode.client.model import connect
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.sources.embedded import open_embedded
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.client.connect import ClientParts
    from llmnode.models.load import Ends
    from llmnode.models.sources.folder import ModelFolder

ROW_TOKENS = 128
BATCHES = (1, 16, 64)
THIN_BATCHES = (1, 4)
SERVERS = 2
LEAST_OF_ONE = 0.95
"""At the largest batch, with the threads of one server on either side; Petals has 0.89 there."""


@dataclass(frozen=True, slots=True)
class ForwardBench:
    """What was asked for. `threads` are torch's in each server; `thin` makes the batches small."""

    repeats: int
    thin: bool
    threads: int
    json: bool


@dataclass(slots=True)
class _Variant:
    """So many rows at once: round by round the positions a second of the servers, and what that is of each baseline."""

    rows: int
    per_s: list[float] = field(default_factory=list)
    of_one: list[float] = field(default_factory=list)
    of_both: list[float] = field(default_factory=list)


async def bench_forward(config: ForwardBench) -> None:
    torch.set_num_threads(config.threads)
    folder = open_embedded()
    parts = load_parts(folder)
    variants = [_Variant(rows) for rows in (THIN_BATCHES if config.thin else BATCHES)]
    with single_error():
        spans = split_evenly(parts.model.blocks, SERVERS)
        async with private_swarm(spans, threads=config.threads) as servers:
            await all_ready(servers)
            peers = [server.address for server in servers]
            rig = _Rig(folder, parts.ends, _texts(parts, variants[-1].rows))
            await trio.to_thread.run_sync(_measure, config, rig, peers, variants)
    judged = [rig.reference.judge_choices(text, choices) for text, choices in zip(rig.texts, rig.choices, strict=True)]
    ties, wrong = (sum(counts) for counts in zip(*judged, strict=True))
    conditions = environment(config.threads) | {"positions": ROW_TOKENS * len(rig.texts), "near_ties": ties}
    print_report("forward", conditions, [_row(each) for each in variants], _aims(variants, wrong), as_json=config.json)


def _texts(parts: ClientParts, rows: int) -> list[list[int]]:
    token_ids = parts.tokenizer.encode("".join(topics.values()))
    return [token_ids[row * ROW_TOKENS :][:ROW_TOKENS] for row in range(rows)]


def _measure(config: ForwardBench, rig: _Rig, peers: Sequence[str], variants: Sequence[_Variant]) -> None:
    with connect(peers=peers) as model:
        for number in range(-1, config.repeats):  # round -1 warms everything up
            print(f"round {number + 1} of {config.repeats}", file=sys.stderr)
            for variant in variants if number >= 0 else variants[:-1]:
                one_s = rig.locally(variant.rows, config.threads)
                servers_s = rig.through_servers(model, variant.rows)
                both_s = rig.locally(variant.rows, SERVERS * config.threads)
                if number >= 0:
                    variant.per_s.append(variant.rows * ROW_TOKENS / servers_s)
                    variant.of_one.append(one_s / servers_s)
                    variant.of_both.append(both_s / servers_s)


class _Rig:
    """`choices` has, for each text, the token that the servers' latest forward makes likeliest at each position."""

    def __init__(self, folder: ModelFolder, ends: Ends, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.choices: list[dict[int, int]] = [{} for _ in texts]
        self.reference = Reference(folder.path)
        self._ends = ends
        self._hidden = [ends.embed(text, 0) for text in texts]

    def through_servers(self, model: DistributedModelForCausalLM, rows: int) -> float:
        """How long it takes from opening the rows' sessions until all are closed."""
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
        """How long transformers takes for the blocks and the norm, which is next to nothing, of all rows together."""
        torch.set_num_threads(threads)  # of the thread that calls
        batch = torch.stack(self._hidden[:rows])
        began_s = time.perf_counter()
        self.reference.model.model(inputs_embeds=batch, use_cache=False)
        return time.perf_counter() - began_s


def _row(variant: _Variant) -> Row:
    return {
        "batch": f"{variant.rows} x {ROW_TOKENS}",
        "positions/s": spread(variant.per_s),
        "of 1 process, threads of one server": spread(variant.of_one),
        "of 1 process, threads of both": spread(variant.of_both),
    }


def _aims(variants: Sequence[_Variant], wrong: int) -> list[Aim]:
    of_one = statistics.median(variants[-1].of_one)
    name = f"{variants[-1].rows} x {ROW_TOKENS}, of 1 process with the threads of one server (Petals: 0.89)"
    return [
        Aim("choices that are not transformers', and no near tie", wrong, "= 0", wrong == 0),
        Aim(name, of_one, f">= {LEAST_OF_ONE}", of_one >= LEAST_OF_ONE),
    ]
