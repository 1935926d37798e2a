"""`tests/bench/run failures`: a session of real processes outlives each fault, of each span, at each moment.

There are six servers, two for each third of the model. One client holds the same dialogue in every cell of the matrix.
It opens a session, prefills a prompt in chunks, decodes, rolls some of it back, and goes on otherwise. One fault
strikes on the way. Then the tokens are compared with transformers in one process. The longest pause is compared with
the time that the lost span takes to prefill the same positions undisturbed.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from bench.failures.cells import CHUNK_TOKENS, PROMPT_TOKENS, SPANS, Fault, Moment, choose
from bench.failures.dialogue import MAX_LENGTH, Dialogue
from bench.failures.replicas import replicas, start_all
from bench.failures.rig import Rig
from bench.kit.exact import Reference
from bench.kit.options import add_thin, add_threads
from bench.kit.report import Aim, Report, Row, below, exactly, few_near_ties
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.models.tensors import to_bytes
from llmnode.swarm.join import join_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterable, Sequence

    from bench.failures.cells import Cell
    from bench.failures.dialogue import Act
    from bench.failures.replicas import Replica
    from bench.kit.options import Options
    from llmnode.client.connect import ClientParts
    from llmnode.session.failures import Recovery

BASELINES = 3


def add(parser: argparse.ArgumentParser) -> None:
    add_thin(parser)
    parser.add_argument("--only", default="", metavar="CELLS", help='the cells whose names begin so, as "kill"')
    add_threads(parser)


async def run(options: Options) -> Report:
    cells = choose(thin=options.thin, only=options.only)
    folder = open_embedded()
    reference = await trio.to_thread.run_sync(Reference, folder.path)
    parts = load_parts(folder)
    outcomes: list[Outcome] = []
    with replicas(folder.info.blocks, options.threads) as servers:
        await start_all(servers, servers)
        async with open_matrix(servers, parts, reference) as matrix:
            for number, cell in enumerate(cells, 1):
                outcomes.append(await matrix.play(cell))
                print(f"{number} of {len(cells)}: {outcomes[-1]}", file=sys.stderr)
    conditions = {
        "near_tie_below": reference.epsilon,
        "undisturbed_s": matrix.undisturbed.acts_s,
        "prefill_s": [PROMPT_TOKENS * each for each in matrix.undisturbed.position_s],
    }
    return Report([outcome.row() for outcome in outcomes], _aims(outcomes), conditions, legend="one session a cell")


# The results


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Medians, in seconds, of each act, and of one position of the prompt in each span."""

    acts_s: dict[str, float]
    position_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Pause:
    """The extra time of an act, and the part of it that a prefill of the lost positions takes."""

    all_s: float
    prefill_s: float

    @property
    def beyond_s(self) -> float:
        return self.all_s - self.prefill_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one cell. `error` says what is wrong with it; it is empty if nothing is."""

    cell: Cell
    error: str
    positions: int
    near_ties: int
    recoveries: Sequence[Recovery]
    pause: Pause
    """The longest one. During another recovery it counts from the time when the span has a server again. If all links
    were cut, it counts from their return."""

    def row(self) -> Row:
        return {
            "fault": self.cell.fault.value,
            "moment": self.cell.moment.value[0],
            "spans": "+".join(map(str, self.cell.spans)),
            "exact": self.error or "yes",
            "near ties": self.near_ties,
            "recoveries": len(self.recoveries),
            "longest recovery, s": max((each.stall_s for each in self.recoveries), default=0.0),
            "pause, s": self.pause.all_s,
            "prefill, s": self.pause.prefill_s,
            "beyond, s": self.pause.beyond_s,
        }

    def __str__(self) -> str:
        took = f"{len(self.recoveries)} recoveries, {self.pause.beyond_s:.2f} s beyond {self.pause.prefill_s:.2f} s"
        return f"{self.cell}: {self.error or 'exact'}, {took}"


def _aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    exact = sum(not outcome.error for outcome in outcomes)
    ties, choices = sum(each.near_ties for each in outcomes), sum(each.positions for each in outcomes)
    aims = [exactly("exact cells", exact, len(outcomes)), few_near_ties(ties, choices)]

    def add(name: str, most_s: float, chosen: Iterable[Outcome]) -> None:
        if pauses := [outcome.pause.beyond_s for outcome in chosen]:
            aims.append(below(f"longest pause beyond one prefill, s: {name}", max(pauses), most_s))

    alone = [outcome for outcome in outcomes if outcome.cell.moment is not Moment.RECOVERY]
    add("SIGKILL", 1, (each for each in alone if each.cell.fault in (Fault.KILL, Fault.RESTART)))
    add("SIGSTOP", 7, (each for each in alone if each.cell.fault in (Fault.FREEZE, Fault.WAKE)))
    add("SIGTERM", 1, (each for each in alone if each.cell.fault is Fault.LEAVE))
    add("out of memory", 1, (each for each in alone if each.cell.fault is Fault.STARVE))
    add("network cut", 7, (each for each in alone if each.cell.fault is Fault.CUT))
    add("all links cut, from when they are back", 7, (each for each in alone if each.cell.fault is Fault.CUT_OFF))
    add("during another recovery", 7, (each for each in outcomes if each.cell.moment is Moment.RECOVERY))
    return aims


# The measurement


@asynccontextmanager
async def open_matrix(
    servers: Sequence[Replica], parts: ClientParts, reference: Reference, undisturbed: Undisturbed | None = None
) -> AsyncIterator[Matrix]:
    """One client for running servers. The `undisturbed` times of a dialogue are measured if they are not known."""
    addresses = [server.address for server in servers]
    policy = ClientPolicy(chunk_tokens=CHUNK_TOKENS)
    with single_error():
        async with (
            join_swarm(addresses, LinkPolicy()) as (pool, _),
            aconnect(addresses, parts=parts, policy=policy) as client,
        ):
            rig = Rig(servers, parts, client, pool)
            await rig.settle()
            matrix = Matrix(rig, reference)
            matrix.undisturbed = undisturbed or await matrix.measure()
            yield matrix


class Matrix:
    """Plays cells on a rig, one after the other."""

    def __init__(self, rig: Rig, reference: Reference) -> None:
        self.undisturbed = Undisturbed({}, [])
        self._rig = rig
        self._reference = reference

    async def measure(self) -> Undisturbed:
        """Measure undisturbed dialogues. The first one warms everything up."""
        seen: dict[str, list[float]] = {}
        for _ in range(1 + BASELINES):
            dialogue = Dialogue(self._rig)
            await dialogue.hold()
            assert not dialogue.error, dialogue.error
            for act in dialogue.acts:
                seen.setdefault(act.name, []).append(act.ended_s - act.began_s)
        prefills = [await self._prefill_s() for _ in range(BASELINES)]
        return Undisturbed(
            {name: statistics.median(times[1:]) for name, times in seen.items()},
            [statistics.median(times) / PROMPT_TOKENS for times in zip(*prefills, strict=True)],
        )

    async def play(self, cell: Cell) -> Outcome:
        """Play a cell. All six servers live at its beginning and at its end."""
        dialogue = Dialogue(self._rig, cell, self.undisturbed.acts_s)
        await dialogue.hold()
        error = dialogue.error
        try:
            await self._rig.settle()
        except trio.TooSlowError:
            error = error or "afterwards, news did not arrive or KV was not freed"
        ties = 0
        for text, chosen in dialogue.texts:
            here, wrong = await trio.to_thread.run_sync(self._reference.judge, text, chosen)
            ties += here
            if wrong:
                error = error or f"{wrong} of {len(chosen)} tokens wrong"
        positions = sum(len(chosen) for _, chosen in dialogue.texts)
        pause = max((self._pause(act, dialogue) for act in dialogue.acts), key=lambda pause: pause.all_s)
        return Outcome(cell, error, positions, ties, dialogue.recoveries, pause)

    async def _prefill_s(self) -> list[float]:
        """The time of the prompt in each span."""
        hidden = self._rig.client.ends.embed(self._rig.prompt, 0)
        total_us = [0] * SPANS
        async with self._rig.client.inference_session(MAX_LENGTH) as session:
            for chunk in hidden.split(CHUNK_TOKENS):
                await session.step(to_bytes(chunk))
                for span, timing in enumerate(session.timings):
                    total_us[span] += timing.elapsed_us
        return [each / 1e6 for each in total_us]

    def _pause(self, act: Act, dialogue: Dialogue) -> Pause:
        all_s = act.ended_s - act.began_s - self.undisturbed.acts_s[act.name]
        if act.began_s < dialogue.returned_s < act.ended_s:
            all_s -= dialogue.returned_s - act.began_s
        spans = [server.span for server in self._rig.servers[:SPANS]]
        prefill_s = sum(each.positions * self.undisturbed.position_s[spans.index(each.span)] for each in act.recoveries)
        return Pause(all_s, prefill_s)
