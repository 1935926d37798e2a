"""The laws that must hold in any simulated world, after any faults. Each raises AssertionError, and knows no fault."""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.core.policy import ClientPolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute
from llmnode.testing.exact_blocks import EXACT_MODEL, exact_input, exact_output
from llmnode.testing.simulate import simulated_ms

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import RoutePolicy
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.membership import Swarm
    from llmnode.testing.watched_finder import WatchedFinder
    from llmnode.testing.world import World

SETTLE_S = 20.0
"""By when servers have noticed that clients are gone, and done what they were busy with."""

COVERED_WITHIN_S = 60.0
"""By when views are right again: an announcement of a dead peer lasts 45 s, and an exchange may fail."""

PATIENCE_S = 300.0
"""How long a dialogue goes on trying a step: by then faults are over, and the step can be made."""

LOOK_EVERY_S = 0.1

Answer = TypeVar("Answer")


class Dialogue:
    """A session, what was said in it, and so what it should answer: to the bit what it would undisturbed."""

    def __init__(
        self,
        session: InferenceSession,
        rng: random.Random,
        *,
        model: ModelInfo = EXACT_MODEL,
        policy: ClientPolicy | None = None,
    ) -> None:
        self.session = session
        self._rng = rng
        self._model = model
        self._policy = policy or ClientPolicy()
        self._said = b""

    async def step(self, positions: int) -> None:
        """Say something random, and check the answer and when it comes."""
        hidden = exact_input(self._rng, positions, self._model)
        answer = bytes(await self._insist(lambda: self.session.step(hidden)))
        self._said += hidden
        expected = exact_output(self._said, Span(0, self._model.blocks))[-len(hidden) :]
        assert answer == expected, f"wrong at position {self.session.position}, after {self.session.recoveries}"

    async def go_back(self, positions: int) -> None:
        """Forget that many."""
        keep = self.session.position - positions
        with suppress(NoRoute), before_deadline(self._policy, self.session):  # it is done with the next step
            await self.session.truncate(keep)
        self._said = self._said[: keep * self._model.row_bytes]

    async def fork(self, copy: Dialogue) -> None:
        """Have the other one be a copy of this one."""
        await self._insist(lambda: self.session.fork([copy.session]))
        copy.now_as(self)

    def now_as(self, source: Dialogue) -> None:
        """Its session has become a copy of that of `source`."""
        assert self.session.position == source.session.position
        self._said = source._said

    async def _insist(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of `work`, tried again while no peer holds some blocks and the session gives up."""
        patient_until_s = trio.current_time() + PATIENCE_S
        while True:
            try:
                with before_deadline(self._policy, self.session):
                    return await work()
            except NoRoute as error:
                if trio.current_time() > patient_until_s:
                    raise AssertionError(f"no progress in {PATIENCE_S:g} s") from error
                await trio.sleep(1)


@contextmanager
def before_deadline(policy: ClientPolicy, session: InferenceSession) -> Iterator[None]:
    """A step ends, in a result or a typed error, before all that it may wait for has run out once and again.

    A hop may keep it waiting until it is given up, and the last of those that take its place too.
    """
    longest_s = policy.recovery.timeout_s + 2 * (policy.step_timeout_s + policy.push.patience_s)
    longest_s += policy.memory_patience_s
    try:
        with trio.fail_after(longest_s):
            yield
    except trio.TooSlowError:
        raise AssertionError(f"neither a result nor an error in {longest_s:g} s, through {session.route}") from None


def check_no_banned_peer(finder: WatchedFinder, policy: ClientPolicy) -> None:
    """A peer that was banned for a failure is on no route that was found without hurry."""
    for asked_s, failures, route in finder.found:
        banned = _banned(finder.failures[:failures], asked_s, policy.route)
        used = [hop for hop in route if hop.peer in banned]
        assert not used, f"{used} were banned when they were chosen, {asked_s:.3f} s into the run"


def _banned(failures: Iterable[tuple[float, PeerId, float]], now_s: float, policy: RoutePolicy) -> set[PeerId]:
    """The bans by the rules of `core.bans`, from all failures anew: a failure during a ban makes it longer only by what
    it cost itself.
    """
    until_s: dict[PeerId, float] = {}
    lasted_s: dict[PeerId, float] = {}
    for failed_s, peer, waited_s in failures:
        least_s = min(policy.ban_times * waited_s, policy.longest_costly_ban_s)
        ended_s, length_s = until_s.get(peer, -math.inf), lasted_s.get(peer, 0.0)
        if failed_s < ended_s:
            until_s[peer], lasted_s[peer] = max(ended_s, failed_s + least_s), max(length_s, least_s)
            continue
        longest_s = policy.longest_costly_ban_s if least_s > policy.ban_s else policy.longest_ban_s
        forgotten = failed_s >= ended_s + max(policy.longest_ban_s, length_s)
        doubled_s = policy.ban_s if forgotten else min(2 * length_s, longest_s)
        lasted_s[peer] = max(least_s, doubled_s)
        until_s[peer] = failed_s + lasted_s[peer]
    return {peer for peer, end_s in until_s.items() if now_s < end_s}


def check_nobody_is_convicted(session: InferenceSession) -> None:
    """Peers that fail have signed no two things that contradict each other: only liars do."""
    convictions = session.receipts.convictions if session.receipts is not None else []
    assert not convictions, f"honest peers convicted: {convictions}"


async def check_kv_is_free(world: World) -> None:
    """To be called when all sessions are closed: soon no server holds KV, or anything else of a session."""
    await _until(lambda: not _holding(world), SETTLE_S, lambda: f"KV or sessions are left: {_holding(world)}")


def _holding(world: World) -> list[str]:
    return [
        f"{node.name}: {node.worker.reserved} positions, {len(node.server.sessions)} sessions"
        for node in world.nodes.values()
        if node.worker.reserved or node.server.sessions
    ]


async def check_coverage(world: World) -> None:
    """To be called when nothing fails any more: soon every view has all nodes that live, and nobody else."""
    await _until(lambda: not _mistaken(world), COVERED_WITHIN_S, lambda: "; ".join(_mistaken(world)))


def _mistaken(world: World) -> list[str]:
    living = {node.peer for node in world.nodes.values()}
    views: dict[str, Swarm] = {node.name: node.swarm for node in [*world.nodes.values(), *world.relays.values()]}
    return [
        f"{name} lacks {sorted(living - known)}, and still has {sorted(known - living)}"
        for name, swarm in {**views, **world.clients}.items()
        if (known := _known(swarm)) != living
    ]


def _known(swarm: Swarm) -> set[PeerId]:
    swarm.view.drop_expired(simulated_ms())
    return {each.peer for each in swarm.view.announcements()}


async def _until(condition: Callable[[], bool], within_s: float, complaint: Callable[[], str]) -> None:
    with trio.move_on_after(within_s):
        while not condition():  # noqa: ASYNC110 - simulated time costs nothing, and views change by expiry too
            await trio.sleep(LOOK_EVERY_S)
        return
    raise AssertionError(f"after {within_s:g} s {complaint()}")
