"""`tests/bench/run table1`: Table 1 of the Petals paper (ICLR version, section 4.1), with our servers and our client.

It counts the steps a second of one sequence through four stages. Each send to a stage fails with some probability.
It compares a session that recovers, one that starts from scratch after each failure, and no cache at all. All run the
same given text. The next tokens that they would choose are compared with transformers in one process, off the clock.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import numpy as np
import trio

from bench.kit.exact import Reference
from bench.kit.options import add_repeats, add_thin, add_threads
from bench.kit.paired import change_percent
from bench.kit.report import Report, Row, at_least, below, exactly, few_near_ties, spread
from bench.table1.failing import Draws, count_restarts, typical_seed
from bench.table1.strategies import Run, Shape, Strategies, open_strategies
from llmnode.client.connect import load_parts
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim, Interval, Spread

TWINS = 2
RECOVERS, RESTARTS, NO_CACHE = "a session of llmnode", "restarts from scratch", "no cache"
LEAST_SPEED = {128: 0.85, 512: 0.6, 1024: 0.6}
MOST_OVERHEAD_PERCENT = 2
RESTARTED = 3
"""Restarts are really run if the draws let them finish within this multiple of the text's steps."""
CALCULATED = 100
"""Up to this multiple they are calculated. Beyond it they "did not finish in a reasonable time", as in the paper."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of the measurement. The first of the failure `rates` is 0."""

    stages: int
    rates: Sequence[float]
    shapes: Sequence[Shape]


FULL = Extent(4, (0.0, 1e-4, 1e-3, 1e-2), (Shape(128, 1, 128, 8), Shape(1024, 8, 32, 4)))
THIN = Extent(2, (0.0, 2e-2), (Shape(128, 2, 25, 2), Shape(512, 2, 13, 1)))
"""It has half the stages, at twice the failure rate: a step meets the same number of failures."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The extra time of a step that met failures, and the parts of that time."""

    all_s: float
    replace_s: float
    """The time until the lost stages were replaced."""
    prefill_s: float
    """The least time that a prefill of the lost positions takes."""


@dataclass(slots=True)
class Judgement:
    """How transformers judges all tokens that the runs would have chosen. `indirect` steps went through the client."""

    indirect: int = 0
    choices: int = 0
    near_ties: int = 0
    wrong: int = 0


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 3)
    add_thin(parser)
    add_threads(parser)


async def run(options: Options) -> Report:
    folder = open_embedded()
    parts = load_parts(folder)
    extent = THIN if options.thin else FULL
    text = parts.tokenizer.encode(topics["types"])[: max(shape.tokens for shape in extent.shapes)]
    reference = await trio.to_thread.run_sync(Reference, folder.path)
    spans = split_evenly(folder.info.blocks, extent.stages)
    with single_error():
        async with private_swarm(spans * TWINS, threads=options.threads) as servers:
            await all_ready(servers)
            async with open_strategies([server.address for server in servers], parts, text) as strategies:
                bench = _Bench(strategies, reference, extent, [_Table(shape) for shape in extent.shapes])
                await bench.warm_up()
                for number in range(options.repeats):
                    await bench.play_round(number, options.repeats)
    conditions = {
        "near_tie_below": reference.epsilon,
        "choices": bench.judgement.choices,
        "near_ties": bench.judgement.near_ties,
        "indirect_steps": bench.judgement.indirect,
    }
    rows = [row for table in bench.tables for row in table.rows(extent.rates)]
    aims = [aim for table in bench.tables for aim in table.aims(extent.rates[-1])]
    aims.append(exactly("wrong tokens", bench.judgement.wrong))
    aims.append(few_near_ties(bench.judgement.near_ties, bench.judgement.choices))
    return Report(rows, aims, conditions, legend="steps/s, median (lowest-highest)")


@dataclass(slots=True)
class _Bench:
    strategies: Strategies
    reference: Reference
    extent: Extent
    tables: Sequence[_Table]
    judgement: Judgement = field(default_factory=Judgement)

    async def warm_up(self) -> None:
        """Warm up every server, and the code that handles a failure."""
        print("warming up", file=sys.stderr)
        shape = Shape(64, 2, 8, 1)
        await self._judge(await self.strategies.recover(shape, Draws("warm-up", 0.1, self.extent.stages)))

    async def play_round(self, number: int, rounds: int) -> None:
        """Run all strategies at all rates, one after the other, with the same failures."""
        rates, stages = self.extent.rates, self.extent.stages
        for table in self.tables:
            steps = [step for window in table.shape.timed for step in window]
            seed = typical_seed(f"{number} {table.shape.tokens}", rates[-1], stages, steps)
            for name, play in ((RECOVERS, self._recover), (RESTARTS, self._restart), (NO_CACHE, self._recompute)):
                for rate in rates:
                    speed, note = await play(table, Draws(seed, rate, stages))
                    table.speeds.setdefault((name, rate), []).append(speed)
                    where = (
                        f"round {number + 1} of {rounds}: {table.shape.tokens} tokens, {name}, failure rate {rate:g}"
                    )
                    print(f"{where}: {f'{speed:.3g} steps/s' if speed else '-'} ({note})", file=sys.stderr)
            compared = await self.strategies.compare(table.shape, Draws(seed, 0.0, stages))
            for run, seconds in zip(compared, (table.bare_s, table.recovers_s, table.usual_s), strict=True):
                await self._judge(run)
                seconds += [step.seconds for step in run.steps]
            costs = f"{table.recovery_percent} %, with receipts {table.overhead_percent} %"
            print(f"{table.shape.tokens} tokens: so far, recovery costs {costs}", file=sys.stderr)

    async def _recover(self, table: _Table, draws: Draws) -> tuple[float, str]:
        run = await self.strategies.recover(table.shape, draws)
        await self._judge(run)
        table.undisturbed_shares.setdefault(draws.rate, []).append(run.undisturbed_share)
        usual_s = statistics.median(step.seconds for step in run.steps if not step.recoveries)
        for step in run.steps:
            if step.recoveries and step.position:
                prefill_s = sum([await self.strategies.prefill_s(each, draws) for each in step.recoveries])
                replace_s = sum(each.stall_s for each in step.recoveries)
                table.pauses.setdefault(draws.rate, []).append(Pause(step.seconds - usual_s, replace_s, prefill_s))
        return run.steps_per_s, run.note

    async def _restart(self, table: _Table, draws: Draws) -> tuple[float | None, str]:
        """Run the restarts if that ends soon. Else calculate them, from the same failures and the undisturbed steps."""
        tokens = table.shape.tokens
        if draws.rate:
            restarts = await trio.to_thread.run_sync(
                count_restarts, draws, table.step_s(), table.undisturbed.open_s, CALCULATED * tokens
            )
            if restarts is None:
                return None, f"not done in {CALCULATED * tokens} steps"
            if table.shape.steps < tokens or restarts.steps > RESTARTED * tokens:
                table.calculated.add(draws.rate)
                return tokens / restarts.seconds, f"calculated: {restarts.steps} steps, {restarts.failures} failures"
        run = await self.strategies.restart(table.shape, draws)
        if not draws.rate:
            table.undisturbed = run
        await self._judge(run)
        return run.steps_per_s, run.note

    async def _recompute(self, table: _Table, draws: Draws) -> tuple[float, str]:
        run = await self.strategies.recompute(table.shape, draws)
        await self._judge(run)
        return run.steps_per_s, run.note

    async def _judge(self, run: Run) -> None:
        choices = await trio.to_thread.run_sync(self.strategies.choices, run)
        judge, text = self.reference.judge_choices, self.strategies.text
        ties, wrong = await trio.to_thread.run_sync(judge, text, choices)
        self.judgement.indirect += run.indirect
        self.judgement.choices += len(choices)
        self.judgement.near_ties += ties
        self.judgement.wrong += wrong


@dataclass(slots=True)
class _Table:
    """The results for one length of text."""

    shape: Shape
    speeds: dict[tuple[str, float], list[float | None]] = field(default_factory=dict)
    """Steps a second of each round, by strategy and failure rate; None if a run did not finish."""
    undisturbed_shares: dict[float, list[float]] = field(default_factory=dict)
    pauses: dict[float, list[Pause]] = field(default_factory=dict)
    calculated: set[float] = field(default_factory=set)
    """The failure rates at which restarts were calculated."""
    undisturbed: Run = field(default_factory=Run)
    """The last run of a session that would restart, at rate 0."""
    bare_s: list[float] = field(default_factory=list)
    recovers_s: list[float] = field(default_factory=list)
    usual_s: list[float] = field(default_factory=list)
    """Seconds of the same steps in three sessions: without recovery, with it, and with receipts too."""

    def step_s(self) -> list[float]:
        """The time of the step at each position, without failures. Between timed steps it is interpolated."""
        steps = self.undisturbed.steps
        timed, seconds = [step.position for step in steps], [step.seconds for step in steps]
        return list(np.interp(range(self.shape.tokens), timed, seconds).tolist())

    @property
    def recovery_percent(self) -> Interval:
        """The time that the ability to recover adds to a step."""
        return change_percent(self.bare_s, self.recovers_s)

    @property
    def overhead_percent(self) -> Interval:
        """The time that this and receipts add to a step."""
        return change_percent(self.bare_s, self.usual_s)

    def shares(self, name: str, rate: float) -> list[float]:
        """The speeds at `rate`, each as a share of the speed without failures in the same round."""
        pairs = zip(self.speeds[name, rate], self.speeds[name, 0.0], strict=True)
        return [with_failures / without for with_failures, without in pairs if with_failures and without]

    def rows(self, rates: Sequence[float]) -> list[Row]:
        rows = []
        for name in (RECOVERS, RESTARTS, NO_CACHE):
            row: Row = {"tokens": self.shape.tokens, "strategy": name}
            row |= {f"at {rate:g}": self._cell(name, rate) for rate in rates}
            if shares := self.shares(name, rates[-1]):
                row[f"{rates[-1]:g}, of 0"] = spread(shares)
            row["timed"] = self._timed(name)
            if name == RECOVERS:
                row["of undisturbed steps"] = spread(self.undisturbed_shares[rates[-1]])
                row |= {"recovery costs, %": self.recovery_percent, "with receipts, %": self.overhead_percent}
                row |= self._recovery(self.pauses.get(rates[-1], []))
            rows.append(row)
        return rows

    def aims(self, rate: float) -> list[Aim]:
        tokens, least = self.shape.tokens, LEAST_SPEED[self.shape.tokens]
        share = statistics.median(self.shares(RECOVERS, rate))
        percent = self.recovery_percent.estimate
        return [
            at_least(f"{tokens} tokens: speed at {rate:g}, of that without failures", share, least),
            below(f"{tokens} tokens: overhead of being able to recover, %", percent, MOST_OVERHEAD_PERCENT),
        ]

    def _cell(self, name: str, rate: float) -> Spread | str:
        speeds = [speed for speed in self.speeds[name, rate] if speed is not None]
        return spread(speeds) if len(speeds) == len(self.speeds[name, rate]) else "-"

    def _timed(self, name: str) -> str:
        if name == NO_CACHE:
            return f"{self.shape.recomputed} steps, evenly spaced"
        timed = "all" if self.shape.steps == self.shape.tokens else f"{self.shape.windows} x {self.shape.window} steps"
        rates = ", ".join(f"{rate:g}" for rate in sorted(self.calculated))
        return f"{timed}; at {rates} calculated" if name == RESTARTS and rates else timed

    def _recovery(self, pauses: Sequence[Pause]) -> Row:
        """A row of the pauses at the highest failure rate."""
        if not pauses:
            return {"pauses": 0}
        return {
            "pauses": len(pauses),
            "pause, ms": spread([pause.all_s * 1e3 for pause in pauses]),
            "until replaced, ms": spread([pause.replace_s * 1e3 for pause in pauses]),
            "prefill, ms": spread([pause.prefill_s * 1e3 for pause in pauses]),
            "pause / prefill": spread([pause.all_s / pause.prefill_s for pause in pauses]),
        }
