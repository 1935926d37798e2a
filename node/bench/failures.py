"""`llmnode bench failures`: a session of real processes outlives each fault, of each span, at each moment.

Six servers, two for each third of the model, and one client that holds the same dialogue in every cell of the matrix:
it opens a session, reads a prompt in chunks, decodes, takes some of it back, goes on otherwise. One thing goes wrong on
the way. Then what was chosen is compared with transformers in one process, and the longest pause with the time that
the lost span takes to read the same positions undisturbed.
"""

from __future__ import annotations

import signal
import statistics
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, TypeVar

import torch
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.client.generate import generate_greedy
from llmnode.client.join import join_swarm
from llmnode.compute.tensors import to_bytes
from llmnode.compute.worker import ComputeThread
from llmnode.core.policy import ClientPolicy, LinkPolicy, ServePolicy
from llmnode.core.view import online
from llmnode.errors import LlmnodeError, single_error
from llmnode.models.embedded import open_embedded
from llmnode.node.bench.exact import Reference
from llmnode.node.bench.replicas import SPANS, replicas, start_all
from llmnode.node.bench.report import Aim, Row, environment, print_report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from llmnode.client.connect import Client, ClientParts
    from llmnode.client.pool import ConnectionPool
    from llmnode.client.recovery import Recovery
    from llmnode.client.session import InferenceSession
    from llmnode.core.ids import PeerId
    from llmnode.node.bench.replicas import Replica

    T = TypeVar("T")

PROMPT_TOKENS = 256
CHUNK_TOKENS = 64
DECODES = 4
"""Before the rollback, and after."""
TAKEN_BACK = 3
EDIT = "\n\nIn other words,"
COMES_BACK = "decode 7"
"""Before this act, those that were started again, or told to leave, have done so."""
MAX_LENGTH = 320
BASELINES = 3
SETTLE_S = 60.0
"""For news to reach the client, and for KV to be free again: longer than any deadline that may have to pass."""
POLL_S = 0.005
NEAR_TIE_LIMIT = 0.001


class Fault(StrEnum):
    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    WAKE = "SIGSTOP, SIGCONT after the failover"
    RESTART = "SIGKILL, restart, then its twin"
    """The session has to come back to a peer that it has lost: same identity, same port, no memory."""
    LEAVE = "SIGTERM"


class Moment(Enum):
    """In words, and the act of the dialogue that it belongs to: its beginning, if the words do not say otherwise."""

    OPEN = "open", "open"
    PREFILL = "prefill, in its 2nd chunk", "prefill"
    BETWEEN = "between decodes", "decode 3"
    DECODE = "in a decode", "decode 3"
    ROLLBACK = "rollback", "rollback"
    RECOVERY = "another recovery", "decode 3"


@dataclass(frozen=True, slots=True)
class Cell:
    """Something goes wrong with the servers of `spans` that the session goes through."""

    fault: Fault
    moment: Moment
    spans: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.fault.name} {self.moment.name} {'+'.join(map(str, self.spans))}".lower()

    def delay_s(self, undisturbed_s: float) -> float:
        """So long into the act, the first of the lost servers computes."""
        in_a_hop = self.spans[0] + 0.5
        match self.moment:
            case Moment.PREFILL:  # the second chunk: they go through the hops one behind the other
                return (1 + in_a_hop) / (PROMPT_TOKENS / CHUNK_TOKENS + SPANS - 1) * undisturbed_s
            case Moment.DECODE:
                return in_a_hop / SPANS * undisturbed_s
        return 0.0


EACH = [(0,), (1,), (2,)]
FULL = [
    Cell(fault, moment, spans)
    for fault in Fault
    for moment in Moment
    for spans in [*EACH, (0, 2)]
    if (fault, moment) != (Fault.RESTART, Moment.RECOVERY)  # is SIGKILL's: all that died there come back
]
THIN = [
    *(Cell(Fault.KILL, Moment.DECODE, spans) for spans in [*EACH, (0, 2)]),
    Cell(Fault.KILL, Moment.OPEN, (1,)),
    Cell(Fault.KILL, Moment.PREFILL, (1,)),
    Cell(Fault.KILL, Moment.ROLLBACK, (1,)),
    Cell(Fault.KILL, Moment.RECOVERY, (1,)),
    Cell(Fault.FREEZE, Moment.PREFILL, (0,)),
    Cell(Fault.WAKE, Moment.DECODE, (1,)),
    Cell(Fault.RESTART, Moment.BETWEEN, (2,)),
    Cell(Fault.LEAVE, Moment.DECODE, (0,)),
]


@dataclass(frozen=True, slots=True)
class FailuresBench:
    """What was asked for. `threads` is torch's, in this process and in each server."""

    thin: bool
    threads: int
    json: bool


async def bench_failures(config: FailuresBench) -> None:
    torch.set_num_threads(config.threads)
    folder = open_embedded()
    reference = await trio.to_thread.run_sync(Reference, folder.path)
    parts = load_parts(folder)
    cells = THIN if config.thin else FULL
    outcomes: list[Outcome] = []
    with replicas(folder.info.blocks, config.threads) as servers:
        await start_all(servers, servers)
        async with open_matrix(servers, parts, reference) as matrix:
            for number, cell in enumerate(cells, 1):
                outcomes.append(await matrix.play(cell))
                print(f"{number} of {len(cells)}: {outcomes[-1]}", file=sys.stderr)
    surroundings = environment(config.threads) | {
        "near_tie_below": reference.epsilon,
        "undisturbed_s": matrix.undisturbed.acts_s,
        "prefill_s": [PROMPT_TOKENS * each for each in matrix.undisturbed.position_s],
    }
    rows = [outcome.row() for outcome in outcomes]
    print_report("failures", surroundings, rows, _aims(outcomes), as_json=config.json, legend="one session a cell")


# What was seen


@dataclass(frozen=True, slots=True)
class Act:
    """One call of the session, as it went."""

    name: str
    began_s: float
    ended_s: float
    recoveries: Sequence[Recovery]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Medians, in seconds: of each act, and of one of the prompt's positions in each span."""

    acts_s: dict[str, float]
    position_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Pause:
    """By how much an act took longer than undisturbed, and what of it reading the lost positions anew takes."""

    all_s: float
    prefill_s: float

    @property
    def beyond_s(self) -> float:
        return self.all_s - self.prefill_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one cell. `error` is what is wrong with it, empty if nothing is."""

    cell: Cell
    error: str
    positions: int
    near_ties: int
    recoveries: Sequence[Recovery]
    pause: Pause
    """The longest. During another recovery it counts from when the span has a server again."""

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
    ties = sum(outcome.near_ties for outcome in outcomes) / max(1, sum(outcome.positions for outcome in outcomes))
    aims = [
        Aim("exact cells", exact, f"= {len(outcomes)}", exact == len(outcomes)),
        Aim("near ties, of all choices", ties, f"<= {NEAR_TIE_LIMIT}", ties <= NEAR_TIE_LIMIT),
    ]

    def add(name: str, most_s: float, chosen: Iterable[Outcome]) -> None:
        if pauses := [outcome.pause.beyond_s for outcome in chosen]:
            longest_s = max(pauses)
            what = f"longest pause beyond one prefill, s: {name}"
            aims.append(Aim(what, longest_s, f"< {most_s:g}", longest_s < most_s))

    alone = [outcome for outcome in outcomes if outcome.cell.moment is not Moment.RECOVERY]
    add("SIGKILL", 1, (each for each in alone if each.cell.fault in (Fault.KILL, Fault.RESTART)))
    add("SIGSTOP", 7, (each for each in alone if each.cell.fault in (Fault.FREEZE, Fault.WAKE)))
    add("SIGTERM", 1, (each for each in alone if each.cell.fault is Fault.LEAVE))
    add("during another recovery", 7, (each for each in outcomes if each.cell.moment is Moment.RECOVERY))
    return aims


# What is done


@asynccontextmanager
async def open_matrix(
    servers: Sequence[Replica], parts: ClientParts, reference: Reference, undisturbed: Undisturbed | None = None
) -> AsyncIterator[Matrix]:
    """For servers that run: one client. What a dialogue takes `undisturbed` is measured, if it is not known."""
    addresses = [server.address for server in servers]
    policy = ClientPolicy(chunk_tokens=CHUNK_TOKENS)
    with single_error():
        async with (
            join_swarm(addresses, LinkPolicy()) as (pool, _),
            aconnect(addresses, parts=parts, policy=policy) as client,
        ):
            matrix = Matrix(servers, parts, reference, client, pool)
            await matrix.settle()
            matrix.undisturbed = undisturbed or await matrix.measure()
            yield matrix


class Matrix:
    """What all cells share. `pool` is an onlooker's."""

    def __init__(
        self, servers: Sequence[Replica], parts: ClientParts, reference: Reference, client: Client, pool: ConnectionPool
    ) -> None:
        self.servers = servers
        self.client = client
        self.ends = parts.ends
        self.thread = ComputeThread()
        self.prompt = parts.tokenizer.encode(topics["types"])[:PROMPT_TOKENS]
        self.edit = parts.tokenizer.encode(EDIT)
        self.undisturbed = Undisturbed({}, [])
        self._reference = reference
        self._pool = pool

    async def measure(self) -> Undisturbed:
        """The first dialogue warms everything up."""
        seen: dict[str, list[float]] = {}
        for _ in range(1 + BASELINES):
            dialogue = Dialogue(self, None)
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
        """Six servers live at its beginning and at its end."""
        dialogue = Dialogue(self, cell)
        await dialogue.hold()
        error = dialogue.error
        try:
            await self.settle()
        except trio.TooSlowError:
            error = error or "afterwards, news did not arrive or KV was not freed"
        ties = 0
        for text, chosen in dialogue.texts:
            here, wrong = await trio.to_thread.run_sync(self._reference.judge, text, chosen)
            ties += here
            if wrong:
                error = error or f"{wrong} of {len(chosen)} tokens wrong"
        recoveries = dialogue.session.recoveries if dialogue.session else []
        positions = sum(len(chosen) for _, chosen in dialogue.texts)
        pause = max((self._pause(act, dialogue) for act in dialogue.acts), key=lambda pause: pause.all_s)
        return Outcome(cell, error, positions, ties, recoveries, pause)

    async def settle(self) -> None:
        """All six live, the client knows of their present lives, and no KV is reserved. Raises TooSlowError."""
        for server in self.servers:
            if server.is_frozen:
                server.signal(signal.SIGCONT)
        await start_all([server for server in self.servers if not server.answers], self.servers)
        with trio.fail_after(SETTLE_S):
            for server in self.servers:
                await self.client.swarm.meet(server.address)
            await self.until_known(self.servers)
            for server in self.servers:
                await self.until_kv(server, taken=False)

    async def until_known(self, servers: Sequence[Replica]) -> None:
        swarm = self.client.swarm
        while True:
            said_ms = {each.peer: each.sequence for each in online(swarm.view.announcements())}
            if all(said_ms.get(server.peer, 0) >= server.since_ms for server in servers):
                return
            with trio.move_on_after(POLL_S):  # a peer that is back, and offers what it offered, is no news
                await swarm.wait_changed()

    async def until_kv(self, server: Replica, *, taken: bool) -> None:
        connection = await self._pool.connect([server.address])
        while True:
            description = await connection.describe(SETTLE_S)
            if (description.kv_tokens_free < ServePolicy().kv_tokens) == taken:
                return
            await trio.sleep(POLL_S)

    def server(self, peer: PeerId) -> Replica:
        return next(server for server in self.servers if server.peer == peer)

    def twin(self, of: Replica) -> Replica:
        return next(server for server in self.servers if server.span == of.span and server is not of)

    async def _prefill_s(self) -> list[float]:
        """Of each span, for the prompt."""
        hidden = self.ends.embed(self.prompt, 0)
        total_us = [0] * SPANS
        async with self.client.inference_session(MAX_LENGTH) as session:
            for chunk in hidden.split(CHUNK_TOKENS):
                await session.step(to_bytes(chunk))
                for span, timing in enumerate(session.timings):
                    total_us[span] += timing.round_trip_us
        return [each / 1e6 for each in total_us]

    def _pause(self, act: Act, dialogue: Dialogue) -> Pause:
        all_s = act.ended_s - act.began_s - self.undisturbed.acts_s[act.name]
        if act.began_s < dialogue.returned_s < act.ended_s:
            all_s -= dialogue.returned_s - act.began_s
        spans = [server.span for server in self.servers[:SPANS]]
        prefill_s = sum(each.positions * self.undisturbed.position_s[spans.index(each.span)] for each in act.recoveries)
        return Pause(all_s, prefill_s)


class Dialogue:
    """One session, what was chosen in it, and what befell it: `cell`, if any. Its servers are not put right again."""

    def __init__(self, matrix: Matrix, cell: Cell | None) -> None:
        self.acts: list[Act] = []
        self.texts: list[tuple[list[int], range]] = []
        """Token ids, and which of them were chosen."""
        self.session: InferenceSession | None = None
        self.returned_s = 0.0
        """When, during another recovery, the lost spans had servers again."""
        self.error = ""
        self._matrix = matrix
        self._cell = cell
        self._struck: list[Replica] = []
        self._restarted = trio.Event()

    async def hold(self) -> None:
        await self._matrix.client.router.find_any()
        async with trio.open_nursery() as self._nursery:
            try:
                async with AsyncExitStack() as stack:
                    await self._converse(stack)
            except LlmnodeError as error:
                self.error = str(error)
        self.error = self.error or self._what_is_missing()

    async def _converse(self, stack: AsyncExitStack) -> None:
        matrix = self._matrix
        opening = matrix.client.inference_session(MAX_LENGTH)
        session = self.session = await self._act("open", lambda: stack.enter_async_context(opening))
        text = list(matrix.prompt)
        await self._act("prefill", lambda: self._choose(text, text))
        for number in range(DECODES):
            await self._act(f"decode {number + 1}", lambda: self._choose(text, text[-1:]))
        self.texts.append((list(text), range(PROMPT_TOKENS, len(text))))
        kept = session.position - TAKEN_BACK
        await self._act("rollback", lambda: session.truncate(kept))
        text[kept:] = matrix.edit
        await self._act("edit", lambda: self._choose(text, matrix.edit))
        for number in range(DECODES, 2 * DECODES):
            await self._act(f"decode {number + 1}", lambda: self._choose(text, text[-1:]))
        self.texts.append((text, range(kept + len(matrix.edit), len(text))))

    async def _choose(self, text: list[int], fresh: list[int]) -> None:
        """Append the likeliest token to `text`, whose end is `fresh`: not yet given to the session."""
        matrix, session = self._matrix, self.session
        assert session is not None
        generation = await generate_greedy(
            session,
            matrix.ends,
            matrix.thread,
            fresh,
            1,
            stop_token_id=None,
            on_token=lambda _token: None,
        )
        text.extend(generation.token_ids)

    async def _act(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        await self._between(name)
        known = self.session.recoveries if self.session else []
        before = len(known)
        began_s, ended = trio.current_time(), trio.Event()
        if self._cell and name == self._cell.moment.value[1]:
            if delay_s := self._cell.delay_s(self._matrix.undisturbed.acts_s[name]):
                self._nursery.start_soon(self._strike_later, delay_s, ended)
            else:
                self._strike()
        result = await call()
        ended.set()
        self.acts.append(Act(name, began_s, trio.current_time(), known[before:]))
        return result

    async def _between(self, name: str) -> None:
        """What is part of the fault, and comes after a failover."""
        if self._cell is None or self.session is None or not self._struck:
            return
        route = [hop.peer for hop in self.session.route]
        match self._cell.fault:
            case Fault.WAKE:
                for server in self._struck:
                    if server.is_frozen and server.peer not in route:
                        server.signal(signal.SIGCONT)
            case Fault.RESTART if name == COMES_BACK:
                await self._restarted.wait()
                await self._matrix.until_known(self._struck)
                for server in self._struck:
                    self._matrix.twin(server).kill()
            case Fault.LEAVE if name == COMES_BACK:
                for server in self._struck:
                    if status := await server.end():
                        self.error = f"SIGTERM: exit status {status}"

    async def _strike_later(self, delay_s: float, ended: trio.Event) -> None:
        """After the delay, or as soon as the act has ended: it may be faster than it was undisturbed."""
        with trio.move_on_after(delay_s):
            await ended.wait()
        self._strike()

    def _strike(self) -> None:
        """At once, without a checkpoint: nobody has noticed yet when the act goes on."""
        assert self._cell is not None
        route = self.session.route if self.session else self._matrix.client.route
        self._struck = [self._matrix.server(route[span].peer) for span in self._cell.spans]
        if self._cell.moment is Moment.RECOVERY:
            for server in self._struck:
                server.kill()
            self._nursery.start_soon(self._strike_twins, self._struck)
        else:
            self._apply(self._struck)

    async def _strike_twins(self, killed: Sequence[Replica]) -> None:
        """As soon as the first of them replays. The killed are started again: they are all that is left."""
        twins = [self._matrix.twin(server) for server in killed]
        await self._matrix.until_kv(twins[0], taken=True)
        self._struck = twins
        self._apply(twins)
        await start_all(killed, self._matrix.servers)
        self.returned_s = trio.current_time()

    def _apply(self, servers: Sequence[Replica]) -> None:
        assert self._cell is not None
        for server in servers:
            match self._cell.fault:
                case Fault.KILL | Fault.RESTART:
                    server.kill()
                case Fault.FREEZE | Fault.WAKE:
                    server.signal(signal.SIGSTOP)
                case Fault.LEAVE:
                    server.signal(signal.SIGTERM)
        if self._cell.fault is Fault.RESTART:
            self._nursery.start_soon(self._restart, servers)

    async def _restart(self, servers: Sequence[Replica]) -> None:
        await start_all(servers, self._matrix.servers)
        self._restarted.set()

    def _what_is_missing(self) -> str:
        """A cell in which nothing was lost proves nothing."""
        if self._cell is None or self.session is None:
            return ""
        moved = (self._cell.moment is not Moment.OPEN) + (self._cell.fault is Fault.RESTART)
        recoveries = len(self.session.recoveries)
        return f"only {recoveries} recoveries" if recoveries < moved * len(self._cell.spans) else ""
