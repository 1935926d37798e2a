"""The three ways of the Petals paper to run a text through stages that fail (section 4.1), with our servers and client.

A session that recovers; sessions without recovery, which start from scratch; and a forward of the whole text for every
step. Steps are timed one by one. The times of embeddings and logits are not counted, as in the paper.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import trio

from bench.table1.failing import FailingNetwork
from llmnode.core.ids import PeerId
from llmnode.core.policy import ClientPolicy, LinkPolicy, StandingPolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import online
from llmnode.errors import SessionLost
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.net.host import open_network
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router
from llmnode.session.session import open_session
from llmnode.session.tools import SessionTools
from llmnode.swarm.membership import Swarm
from llmnode.swarm.pool import open_pool
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

    from bench.table1.failing import Draws
    from llmnode.client.connect import ClientParts
    from llmnode.session.failures import Recovery
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.wire.frame import Buffer

SCORED_AT_ONCE = 128
"""The logits of this number of positions take 25 MB."""
SETTLE_S = 30.0


ANY_PEER = StandingPolicy(proven_positions=1 << 40, unproven_sessions=1 << 30, explored_share=0.0)
"""Routes depend on the draws alone, and not on what a client has seen of its peers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A text and its timed steps: `window` steps in the middle of each of `windows` equal parts.

    The steps between are run as one prefill; they do not count and do not fail. Without a cache, the text is cut into
    `recomputed` equal parts, and the step in the middle of each stands for the whole part.
    """

    tokens: int
    windows: int
    window: int
    recomputed: int

    @property
    def timed(self) -> list[range]:
        part = self.tokens // self.windows
        starts = [part * number + (part - self.window) // 2 for number in range(self.windows)]
        return [range(start, start + self.window) for start in starts]

    @property
    def recomputed_positions(self) -> list[int]:
        part = self.tokens / self.recomputed
        return [int(part * (number + 0.5)) for number in range(self.recomputed)]

    @property
    def steps(self) -> int:
        return self.windows * self.window


@dataclass(frozen=True, slots=True)
class TimedStep:
    position: int
    seconds: float
    recoveries: Sequence[Recovery]


@dataclass(slots=True)
class Run:
    """One run through a text. `seconds` has all time that counts, also for failed steps and fresh starts."""

    seconds: float = 0.0
    open_s: float = 0.0
    """The time that it took to open the last session."""
    failures: int = 0
    indirect: int = 0
    """The steps in which a hop got its input from the client, not from the hop before."""
    steps: list[TimedStep] = field(default_factory=list)
    outputs: dict[int, Buffer] = field(default_factory=dict)
    """Hidden states after the last block, by position."""

    @property
    def steps_per_s(self) -> float:
        return len(self.outputs) / self.seconds

    @property
    def undisturbed_share(self) -> float:
        """The speed, as a share of the speed of the run's own undisturbed steps. So the machine's noise drops out."""
        undisturbed = [step.seconds for step in self.steps if not step.recoveries]
        return self.steps_per_s * sum(undisturbed) / len(undisturbed)

    @property
    def note(self) -> str:
        recoveries = sum(len(step.recoveries) for step in self.steps)
        indirect = f", {self.indirect} steps by way of the client" if self.indirect else ""
        return f"{len(self.outputs)} steps, {self.failures} failures, {recoveries} recoveries{indirect}"


@dataclass(slots=True)
class Strategies:
    """Runs one text over one swarm. Made by `open_strategies`."""

    parts: ClientParts
    text: Sequence[int]
    network: FailingNetwork
    pool: ConnectionPool
    swarm: Swarm
    addresses: Sequence[str]
    rows: Sequence[Buffer]
    """The text's hidden states after the embedding, by position."""
    policy: ClientPolicy = field(default_factory=lambda: ClientPolicy(standing=ANY_PEER))

    async def recover(self, shape: Shape, draws: Draws) -> Run:
        """One session as users have it. It recovers from each failure."""
        run = Run()
        await self._connect_all()
        async with self._router(draws).open_session(shape.tokens, Codec.RAW) as session:
            await self._read(session, shape, draws, Counter(), run)
        return run

    async def restart(self, shape: Shape, draws: Draws) -> Run:
        """Sessions that end with the first failure, until one of them reaches the end."""
        run, attempts = Run(), Counter[int]()
        await self._until_through(shape, draws, run, lambda session: self._read(session, shape, draws, attempts, run))
        return run

    async def recompute(self, shape: Shape, draws: Draws) -> Run:
        """No cache: every step runs the whole text up to it. A step that fails is done again."""
        run, attempts = Run(), Counter[int]()

        async def read(session: InferenceSession) -> None:
            for position in shape.recomputed_positions:
                if position not in run.outputs:
                    await self._step(session, range(position + 1), draws, attempts, run)

        await self._until_through(shape, draws, run, read)
        return run

    async def compare(self, shape: Shape, draws: Draws) -> tuple[Run, Run, Run]:
        """Three sessions through the same peers take turns, step by step.

        The first cannot recover. The second can. The third is as users have it, and keeps receipts too.
        """
        bare, recovers, usual = Run(), Run(), Run()
        router = self._router(draws)
        async with (
            self._open(self._router(draws), self._whole, shape.tokens) as one,
            self._open(router, self._whole, shape.tokens, recovers=True) as other,
            self._router(draws).open_session(shape.tokens, Codec.RAW) as third,
        ):
            assert one.route == other.route == third.route  # the draws are the same
            turns = deque([(one, bare), (other, recovers), (third, usual)])
            for window in shape.timed:
                for session, _ in turns:
                    await self._skip_to(session, window.start)
                for position in window:
                    for session, run in turns:
                        await self._step(session, range(position, position + 1), draws, Counter(), run)
                    turns.rotate()
        return bare, recovers, usual

    async def prefill_s(self, recovery: Recovery, draws: Draws) -> float:
        """The time that an idle server needs to prefill the positions of `recovery`, with that span."""
        hidden = b"".join(self.rows[: recovery.positions])
        async with self._open(self._router(draws), recovery.span, recovery.positions) as session:
            began_s = time.perf_counter()
            await session.step(hidden)
            return time.perf_counter() - began_s

    def choices(self, run: Run) -> dict[int, int]:
        """The likeliest token after each position that the run timed, by its own position. Blocks."""
        positions = sorted(run.outputs)
        hidden = from_bytes(b"".join(run.outputs[each] for each in positions), self.parts.model.hidden_size)
        scored = [self.parts.ends.logits(part).argmax(-1) for part in hidden.split(SCORED_AT_ONCE)]
        return {position + 1: int(token) for position, token in zip(positions, torch.cat(scored), strict=True)}

    # Inside

    @property
    def _whole(self) -> Span:
        return Span(0, self.parts.model.blocks)

    async def _until_through(
        self, shape: Shape, draws: Draws, run: Run, work: Callable[[InferenceSession], Awaitable[None]]
    ) -> None:
        """Do `work` in sessions without recovery, until one finishes it. The time to open the first does not count."""
        router, lost = self._router(draws), set[PeerId]()
        await self._connect_all()
        while True:
            began_s = time.perf_counter()
            async with self._open(router, self._whole, shape.tokens, lost) as session:
                run.open_s = time.perf_counter() - began_s
                run.seconds += run.open_s if lost else 0.0
                try:
                    return await work(session)
                except SessionLost as error:
                    lost = {cause.peer for cause in error.causes if cause.peer is not None}

    async def _read(
        self, session: InferenceSession, shape: Shape, draws: Draws, attempts: Counter[int], run: Run
    ) -> None:
        for window in shape.timed:
            await self._skip_to(session, window.start)
            for position in window:
                await self._step(session, range(position, position + 1), draws, attempts, run)

    async def _skip_to(self, session: InferenceSession, position: int) -> None:
        if session.position < position:
            await session.step(b"".join(self.rows[session.position : position]))

    async def _step(
        self, session: InferenceSession, positions: range, draws: Draws, attempts: Counter[int], run: Run
    ) -> None:
        """Run the positions, and first roll the session back to them if needed. A failed attempt counts too."""
        step, known, broken = positions[-1], len(session.recoveries), self.network.broken
        stages = draws.failing(step, attempts[step])
        attempts[step] += 1
        hidden = b"".join(self.rows[positions.start : positions.stop])
        began_s = time.perf_counter()
        try:
            if session.position > positions.start:
                await session.truncate(positions.start)
            with self.network.failing(session, positions.start, stages):
                output = await session.step(hidden)
        finally:
            seconds = time.perf_counter() - began_s
            run.seconds += seconds
            run.failures += self.network.broken - broken
        run.steps.append(TimedStep(step, seconds, session.recoveries[known:]))
        run.outputs[step] = bytes(output[-self.parts.model.row_bytes :])
        run.indirect += not all(hop.direct for hop in session.timings[1:])

    def _router(self, draws: Draws) -> Router:
        """A router without any bans. The draws' seed decides between equal peers."""
        return Router(PeerFinder(self.parts.model, self.pool, self.swarm, self.policy, random.Random(draws.seed)))

    @asynccontextmanager
    async def _open(
        self,
        router: Router,
        span: Span,
        max_length: int,
        avoid: Collection[PeerId] = (),
        *,
        recovers: bool = False,
    ) -> AsyncIterator[InferenceSession]:
        """A session without receipts. It recovers from failures only if it is told to."""
        route, connections = await router.finder.find(span, max_length, avoid, hurry=True)
        terms = SessionTerms(self.parts.model, max_length, Codec.RAW, self.policy)
        tools = SessionTools(router.finder if recovers else None)
        async with open_session(route, connections, terms, tools) as session:
            yield session

    async def _connect_all(self) -> None:
        """Connect to the spare servers too, so that every run begins with a link to each."""
        for address in self.addresses:
            self.pool.network.vouch([address])
            await self.pool.connect([address])


@asynccontextmanager
async def open_strategies(
    addresses: Sequence[str], parts: ClientParts, text: Sequence[int]
) -> AsyncIterator[Strategies]:
    """A client of the servers at `addresses`. They know each other when it begins. Raises TooSlowError."""
    async with (
        open_network([], LinkPolicy()) as dialling,
        open_pool(network := FailingNetwork(dialling)) as pool,
        trio.open_nursery() as nursery,
    ):
        swarm = Swarm(network, pool, SwarmPolicy(), contacts=addresses, roams=False)
        with trio.fail_after(SETTLE_S):
            while len(online(swarm.view.of_model(parts.model.digest))) < len(addresses):
                await swarm.meet_all(addresses)
            await swarm.meet_all(addresses)  # now we know all of them, and each hears of the others from us
        nursery.start_soon(swarm.run)
        rows = [to_bytes(row) for row in parts.ends.embed(list(text), 0)]
        yield Strategies(parts, text, network, pool, swarm, addresses, rows)
        nursery.cancel_scope.cancel()
