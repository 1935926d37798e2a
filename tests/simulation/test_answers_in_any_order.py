"""Sessions with a hostile server that answers in any order: a typed error ends each, or it goes on elsewhere.

It never hangs, and keeps nothing of the session. Beside honest servers of the same blocks it has the right results.
LLMNODE_SEEDS=5000 plays more of them.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import pytest
import trio

from llmnode.client.generate import run_blocks
from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import NO_SESSION
from llmnode.core.policy import ClientPolicy, PushPolicy, RecoveryPolicy, RoutePolicy, SwarmPolicy, TrustPolicy
from llmnode.core.span import Span
from llmnode.errors import IntegrityError, LlmnodeError, LocalProtocolError, PeerError, SessionLost
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.session.passes import SwarmPasses
from llmnode.session.saved import read
from llmnode.swarm.membership import PLACE_BYTES
from llmnode.testing import EXACT_MODEL, Conditions, exact_input, exact_output, open_world, peer_named, seeds, simulated
from llmnode.testing.hostile.laws import check_no_wrong_ban
from llmnode.testing.simulate import say_if_it_fails
from llmnode.wire.payload import Codec
from simulation.disorder import Disorder
from simulation.passes import LENGTHS, drawn
from simulation.world import ALL_BLOCKS, DELAY_S, Dialogue, kv_is_free

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from llmnode.testing import SimulatedClient

Answer = TypeVar("Answer")

MAX_LENGTH = 60
POLICY = ClientPolicy(
    chunk_tokens=8,
    open_timeout_s=5.0,
    step_timeout_s=20.0,
    route=RoutePolicy(kv_patience_s=10.0),
    recovery=RecoveryPolicy(timeout_s=10.0, kv_patience_s=20.0),
)
POLICIES = [
    POLICY,
    POLICY,
    replace(POLICY, trust=TrustPolicy(strict=True)),
    replace(POLICY, push=PushPolicy(enabled=False)),
    replace(POLICY, chunks_ahead=1),
    replace(POLICY, route=replace(POLICY.route, ban_s=0.1, longest_ban_s=0.1)),
]
CUTS = [[Span(0, 6)], [Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 6)]]
ENDS_WITHIN_S = {True: 120.0, False: 300.0}
"""Each call ends within this time, with honest twins or without."""
SETTLE_S = 30.0
"""By then calls that were given up have ended, and links with them."""


class Talk(Dialogue):
    """Tokens: those of prompts, and each that follows from the last answer. Nothing is tried again after an error."""

    _next = 0

    async def step(self, positions: int) -> None:
        """One position is the next token, and more are those of a prompt."""
        tokens = [self._next] if positions == 1 else [self._rng.randrange(2**32) for _ in range(positions)]
        hidden = b"".join(exact_input(random.Random(token), 1) for token in tokens)
        size = EXACT_MODEL.hidden_size
        answer = to_bytes(await run_blocks(self.session, from_bytes(hidden, size)))
        self._said += hidden
        expected = exact_output(self._said, ALL_BLOCKS)
        assert answer == expected[-len(hidden) :], f"wrong at {self.session.position}, after {self.session.recoveries}"
        self._next = zlib.crc32(answer[-EXACT_MODEL.row_bytes :])

    async def _insist(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        return await work()


async def before(within_s: float, work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        with trio.fail_after(within_s):
            return await work()
    except trio.TooSlowError:
        raise AssertionError(f"neither a result nor an error in {within_s:g} s") from None


@pytest.mark.parametrize("seed", seeds(16))
@simulated
async def test_a_session_beside_honest_twins_has_the_right_results(seed: int, tmp_path: Path) -> None:
    await play(seed, tmp_path / "session", twins=True)


@pytest.mark.parametrize("seed", seeds(8))
@simulated
async def test_a_session_without_other_servers_ends_with_a_typed_error_or_right(seed: int, tmp_path: Path) -> None:
    await play(seed, tmp_path / "session", twins=False)


async def play(seed: int, file: Path, *, twins: bool) -> Counter[str]:
    """Servers of a cut of the model, of which some are hostile; and a client that says some things to them."""
    rng = random.Random(f"answers {seed} {twins}")
    acts: Counter[str] = Counter()
    say_if_it_fails(f"LLMNODE_TRACE=1 shows the frames of its servers, {'with' if twins else 'without'} twins")
    cut = rng.choice(CUTS)
    hostile = rng.sample(range(len(cut)), rng.randint(1, len(cut)))
    honest = [f"honest{number}" for number in range(len(cut)) if twins or number not in hostile]
    async with open_world(seed, conditions=Conditions(delay_s=DELAY_S)) as world:
        for name in honest:
            await world.start(name, cut[int(name[-1])])
        for number in hostile:
            for twin in "ab"[: rng.choice((1, 1, 2))]:
                node = await world.start(f"hostile{number}{twin}", cut[number], said_us=rng.choice((1, 1, 1000)))
                node.network.tamper = Disorder.drawn(rng, node.network, acts)
        await trio.sleep(2)
        async with world.client(rng.choice(POLICIES)) as client:
            for _ in range(2 if twins else 1):
                await Conversation(client, rng, file, acts, twins).run()
            await trio.sleep(SETTLE_S)
            check_nothing_is_kept(client)
        check_no_wrong_ban(client.router.finder, [peer_named(name) for name in honest])  # type: ignore[arg-type]
        await trio.sleep(SETTLE_S)
        held = client.router.finder.pool.network.budget.process.held
        held = held - Counter({Resource.MEMORY: SwarmPolicy().view_peers * PLACE_BYTES})
        assert not any(held.values()), f"the client still holds {held}"
        await kv_is_free(world)
        for node in world.nodes.values():
            process = node.network.budget.process
            left = [each.name for each in process.within(Kind.SESSION)]
            assert not left, f"{node.name} still has {left} of sessions"
            assert not process.held[Resource.PUSHES], f"{node.name} still holds pushes"
    return acts


def check_nothing_is_kept(client: SimulatedClient) -> None:
    """A client that lives on keeps nothing of the sessions that have ended."""
    finder = client.router.finder
    assert not finder.records.own._opening
    for connection in finder.pool.living():
        assert not connection.sessions
        assert not connection._listeners
        assert not [each for each in connection._waiting if each[0] != NO_SESSION]


def check_named(error: LlmnodeError) -> None:
    """Each failure of a peer says which peer it was, or which ones it may have been."""
    causes = error.causes if isinstance(error, SessionLost) else [error]
    for each in causes:
        is_named = not isinstance(each, PeerError) or each.peer or (isinstance(each, IntegrityError) and each.suspects)
        assert is_named, f"{each!r} names no peer"


@dataclass(slots=True)
class Conversation:
    """A client's sessions and passes. With `twins` nothing may fail, and without them any typed error may come."""

    client: SimulatedClient
    rng: random.Random
    file: Path
    acts: Counter[str]
    twins: bool
    _talks: list[Talk] = field(default_factory=list)

    async def run(self) -> None:
        rng, saved = self.rng, False
        async with AsyncExitStack() as stack:
            if not await self._try(lambda: self._open(stack)):
                return
            for _ in range(rng.randint(2, 8)):
                await self._try(lambda: self._say_something(stack))
                await trio.sleep(rng.choice((0, 0, 1, 7)))
            if rng.random() < 0.3:
                saved = await self._try(self._export)
        if saved:
            await self._try(self._resume)
        if rng.random() < 0.3:
            await self._try(self._pass)

    async def _try(self, work: Callable[[], Awaitable[object]]) -> bool:
        try:
            await before(ENDS_WITHIN_S[self.twins], work)
        except LocalProtocolError:
            raise
        except LlmnodeError as error:
            if self.twins:
                raise
            check_named(error)
            self.acts[type(error).__name__] += 1
            return False
        return True

    async def _open(self, stack: AsyncExitStack, source: Talk | None = None) -> None:
        """A new session, which becomes a copy of the `source`. One whose copy failed is not used."""
        beside = source.session if source is not None else None
        session = await stack.enter_async_context(self.client.router.open_session(MAX_LENGTH, Codec.RAW, beside))
        talk = Talk(session, self.rng)
        if source is not None:
            await source.fork(talk)
        self._talks.append(talk)

    async def _say_something(self, stack: AsyncExitStack) -> None:
        rng, talk = self.rng, self.rng.choice(self._talks)
        length, position = rng.choice((1, 1, 1, 5, 17)), talk.session.position
        if rng.random() < 0.1 and len(self._talks) < 3:
            await self._open(stack, talk)
        elif position and (rng.random() < 0.15 or position + length > MAX_LENGTH):
            await talk.go_back(rng.randint(min(length, position), position))
        else:
            await talk.step(length)

    async def _export(self) -> None:
        await self._talks[0].session.export(self.file)

    async def _resume(self) -> None:
        talk = self._talks[0]
        async with self.client.router.resume_session(read(self.file)) as session:
            talk.session = session
            if session.position < MAX_LENGTH:
                await talk.step(1)

    async def _pass(self) -> None:
        """Nobody can tell a wrong answer from a right one, without another peer: only the sizes are known."""
        passes, hidden = SwarmPasses(self.client.router.finder, Codec.RAW), drawn(1, sum(LENGTHS))
        output, crossed = await passes.outputs(ALL_BLOCKS, LENGTHS, hidden)
        found = await passes.all_gradients(crossed, output)
        assert len(output) == len(hidden) == len(found.hidden)
