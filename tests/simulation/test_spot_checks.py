"""Spot checks find a peer that computes garbage and signs it as soon as chance has it. They never accuse honest peers.

The arithmetic is exact, so any difference counts. LLMNODE_SEEDS=200 makes the table in `tests/bench/FIGURES.md` (-rP).
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.model import Precision
from llmnode.core.operations import Computed
from llmnode.core.policy import ClientPolicy, SpotCheckPolicy
from llmnode.core.priority import Priority
from llmnode.errors import IntegrityError, SessionLost
from llmnode.testing import FaultPlan, Odds, exact_input, seeds, simulate
from llmnode.testing.faults import ALL_KINDS
from llmnode.testing.network import peer_named
from llmnode.testing.world import SAID_BLOCK_US
from llmnode.wire.payload import Codec
from llmnode.wire.receipt import Convicted
from simulation.chaos import CAST, WEATHERS, open_at_last, talk
from simulation.world import MODEL, ROW, SPANS, Dialogue, World, kv_is_free, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Operation
    from llmnode.session.router import Router
    from llmnode.session.session import InferenceSession

CHECKS = SpotCheckPolicy(share=1.0, tolerance=0.0)
POLICY = ClientPolicy(chunk_tokens=8, spot_checks=CHECKS)


@asynccontextmanager
async def servers(twins: str, seed: int = 0) -> AsyncIterator[World]:
    """A server for each letter of `twins` and each span."""
    async with world(seed) as swarm:
        for index, span in enumerate(SPANS):
            for twin in twins:
                await swarm.start(f"{index}{twin}", span)
        await trio.sleep(10)
        yield swarm


@asynccontextmanager
async def session_of(swarm: World) -> AsyncIterator[tuple[Router, InferenceSession]]:
    async with swarm.client(POLICY) as (router, _), router.open_session(64, Codec.RAW) as session:
        yield router, session


def corrupt(swarm: World, peer: PeerId, share: float = 1.0, rng: random.Random | None = None) -> None:
    """From now on a share of its forwards is wrong. It signs these like all others."""
    worker, rng = swarm.node(peer).worker, rng or random.Random(0)
    do = worker.do

    async def do_wrongly(operation: Operation[object]) -> object:
        computed = await do(operation)
        if not isinstance(computed, Computed) or rng.random() >= share:
            return computed
        return replace(computed, hidden=bytes(each ^ 1 for each in bytes(computed.hidden)))

    worker.do = do_wrongly  # type: ignore[method-assign,assignment]


async def speak(session: InferenceSession, steps: int, positions: int = 1) -> None:
    """Run steps, whatever the answers are, and let the check of each step end."""
    assert session.spot_checks is not None
    for _ in range(steps):
        await session.step(exact_input(random.Random(random.random()), positions))
        await session.spot_checks.finish()


@pytest.mark.parametrize("index", range(3))
@simulated
async def test_two_against_one_ends_the_session_and_the_liar_is_not_used_again(index: int) -> None:
    async with servers("abc") as swarm, swarm.client(POLICY) as (router, _):
        async with router.open_session(64, Codec.RAW) as session:
            await speak(session, 3, positions=10)
            liar = session.route[index].peer
            corrupt(swarm, liar)
            with pytest.raises(SessionLost) as lost:
                await speak(session, 100)
            (cause,) = lost.value.causes
            assert isinstance(cause, IntegrityError)
            assert not isinstance(cause, Convicted)
            assert (cause.peer, cause.span) == (liar, SPANS[index])
            with pytest.raises(SessionLost):
                await session.step(bytes(ROW))
        await kv_is_free(swarm)
        for _ in range(5):
            async with router.open_session(64, Codec.RAW) as session:
                assert liar not in {hop.peer for hop in session.route}
                await Dialogue(session, random.Random(1)).step(20)


@simulated
async def test_a_checker_that_lies_is_outvoted_and_the_session_goes_on() -> None:
    async with (
        servers("abc") as swarm,
        swarm.client(POLICY) as (router, _),
        router.open_session(64, Codec.RAW) as session,
    ):
        used = {hop.peer for hop in session.route}
        liar = next(peer for name in ("0a", "0b", "0c") if (peer := swarm.nodes[name].peer) not in used)
        corrupt(swarm, liar)
        await speak(session, 40)
        assert session.spot_checks is not None
        assert session.spot_checks.passed == 40
        assert router.finder.records.suspicion.is_excluded(liar, trio.current_time())
        assert not any(router.finder.records.suspicion.is_excluded(peer, trio.current_time()) for peer in used)
        assert not session.recoveries


@asynccontextmanager
async def a_stranger_beside(honest: str) -> AsyncIterator[tuple[World, list[PeerId]]]:
    """Two servers of the middle blocks that lie alike, in one address group; sessions go through the first honest one.

    Returns the liars.
    """
    async with world() as swarm:
        for index in (0, 2):
            await swarm.start(f"{index}a", SPANS[index])
        for name in honest:
            await swarm.start(f"1{name}", SPANS[1], said_us=SAID_BLOCK_US // (10 if name == honest[0] else 1))
        for number, name in enumerate("yz"):
            swarm.internet.locate(peer_named(f"1{name}"), f"9.9.9.{number}")
            corrupt(swarm, (await swarm.start(f"1{name}", SPANS[1])).peer)
        await trio.sleep(10)
        yield swarm, [swarm.nodes[name].peer for name in ("1y", "1z")]


@simulated
async def test_two_of_one_address_group_do_not_outvote_a_peer_of_another_one() -> None:
    async with a_stranger_beside("a") as (swarm, liars), session_of(swarm) as (router, session):
        own = swarm.nodes["1a"].peer
        assert session.route[1].peer == own
        await speak(session, 20)
        assert session.spot_checks is not None
        assert session.spot_checks.undecided > 0
        suspicion, now_s = router.finder.records.suspicion, trio.current_time()
        assert not suspicion.is_excluded(own, now_s)
        assert all(suspicion.penalty(peer, now_s) > 1 for peer in liars)


@simulated
async def test_checkers_come_from_other_address_groups_if_there_are_such() -> None:
    async with a_stranger_beside("abc") as (swarm, liars), session_of(swarm) as (router, session):
        assert session.route[1].peer == swarm.nodes["1a"].peer
        await speak(session, 40)
        checks, suspicion, now_s = session.spot_checks, router.finder.records.suspicion, trio.current_time()
        assert checks is not None and checks.passed and not checks.undecided
        assert checks.passed + checks.given_up == 40, "nobody else has the other blocks"
        assert all(suspicion.is_excluded(peer, now_s) for peer in liars)
        honest = [swarm.nodes[name].peer for name in ("1a", "1b", "1c")]
        assert all(suspicion.penalty(peer, now_s) == 1 for peer in honest)


@simulated
async def test_peers_of_another_precision_are_not_asked_and_outvote_nobody() -> None:
    """Their outputs differ a little, right or wrong."""
    rounded = replace(MODEL, precision=Precision(kv_dtype="int8"))
    async with servers("a") as swarm:
        for twin in "bcd":
            other = await swarm.start(f"1{twin}", SPANS[1], rounded)
            if twin != "d":  # a server refuses a profile that it announces but does not serve
                other.role.model = rounded
                other.role.announce()
            corrupt(swarm, other.peer)
        await trio.sleep(10)
        async with session_of(swarm) as (router, session):
            await speak(session, 20)
            checks = session.spot_checks
            assert checks is not None
            assert (checks.passed, checks.undecided) == (0, 0)
            assert checks.given_up > 0
            used = [hop.peer for hop in session.route]
            assert used == [swarm.nodes[f"{index}a"].peer for index in range(3)]
            assert all(router.finder.records.suspicion.penalty(peer, trio.current_time()) == 1 for peer in used)


@simulated
async def test_of_two_that_differ_without_a_third_both_are_suspected_and_none_is_outvoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pairs_of_servers() as swarm, swarm.client(POLICY) as (router, _):
        async with router.open_session(64, Codec.RAW) as session:
            corrupt(swarm, session.route[1].peer)
            await speak(session, 20)
            assert session.spot_checks is not None
            assert session.spot_checks.undecided > 0
            both = [swarm.nodes[name].peer for name in ("1a", "1b")]
            now_s = trio.current_time()
            assert all(router.finder.records.suspicion.penalty(peer, now_s) > 1 for peer in both)
            assert not any(router.finder.records.suspicion.is_excluded(peer, now_s) for peer in both)
            assert any(all(peer in line for peer in both) for line in caplog.messages)
        await kv_is_free(swarm)


@simulated
async def test_a_hop_that_logs_something_else_than_it_signed_is_replaced_and_the_next_is_not_blamed() -> None:
    """Else the honest hop after it would be outvoted."""
    async with (
        servers("abc") as swarm,
        swarm.client(POLICY) as (router, _),
        router.open_session(64, Codec.RAW) as session,
    ):
        framer = session.route[0].peer
        honest = {hop.peer for hop in session.route[1:]}
        (served,) = swarm.node(framer).server.sessions.values()
        assert served._outputs is not None
        append = served._outputs.append
        served._outputs.append = lambda payload, length: append(bytes(len(payload)), length)  # type: ignore[method-assign]
        dialogue = Dialogue(session, random.Random(1), policy=POLICY)
        for _ in range(10):
            await dialogue.step(1)
            assert session.spot_checks is not None
            await session.spot_checks.finish()
        assert [each.lost for each in session.recoveries] == [framer]
        assert not any(router.finder.records.suspicion.is_excluded(peer, trio.current_time()) for peer in honest)


@simulated
async def test_a_check_never_holds_up_a_step_and_leaves_nothing_when_the_session_is_cancelled() -> None:
    async with servers("ab") as swarm, swarm.client(POLICY) as (router, _):
        async with router.open_session(64, Codec.RAW) as session:
            spare = [node for node in swarm.nodes.values() if node.peer not in {hop.peer for hop in session.route}]
            for node in spare:
                node.worker.gate = trio.Event()  # every server hangs that checks
            began_s = trio.current_time()
            dialogue = Dialogue(session, random.Random(1), policy=POLICY)
            await dialogue.step(8)
            first_s = trio.current_time() - began_s
            for _ in range(5):
                await dialogue.step(1)
            assert trio.current_time() - began_s < 7 * first_s
            assert any(node.worker.reserved for node in spare), "a check is under way"
            await dialogue.go_back(5)
            await dialogue.step(1)
            with trio.move_on_after(0.001):
                await session.step(bytes(ROW))
        for node in spare:
            assert node.worker.gate is not None
            node.worker.gate.set()
            node.worker.gate = None
        await kv_is_free(swarm)


@simulated
async def test_servers_are_told_that_nobody_waits_for_a_check() -> None:
    async with servers("ab") as swarm, swarm.session(POLICY) as (session, _):
        await speak(session, 5)
        used = {hop.peer for hop in session.route}
        of_sessions = [node.worker.priorities for node in swarm.nodes.values() if node.peer in used]
        of_checks = [each for node in swarm.nodes.values() if node.peer not in used for each in node.worker.priorities]
        assert of_sessions == [[Priority.INTERACTIVE]] * len(used)
        assert set(of_checks) == {Priority.BATCH}


@simulated
async def test_who_refuses_or_fails_as_checker_is_no_offender() -> None:
    async with (
        servers("ab") as swarm,
        swarm.client(POLICY) as (router, _),
        router.open_session(64, Codec.RAW) as session,
    ):
        used = {hop.peer for hop in session.route}
        spare = [node for node in swarm.nodes.values() if node.peer not in used]
        spare[0].worker.executor.occupy(spare[0].worker.kv_tokens_free)
        spare[1].worker.executor.fails = 1000
        swarm.kill(spare[2].name)
        await speak(session, 20)
        assert session.spot_checks is not None
        assert session.spot_checks.given_up == 20
        assert not router.finder.failures
        assert not any(router.finder.records.suspicion.is_excluded(node.peer, trio.current_time()) for node in spare)


@simulated
async def test_what_is_far_along_is_not_checked() -> None:
    policy = replace(POLICY, spot_checks=replace(CHECKS, positions=10))
    async with servers("ab") as swarm, swarm.session(policy) as (session, _):
        await speak(session, 30)
        assert session.spot_checks is not None
        assert session.spot_checks.passed == 10


@pytest.mark.parametrize("seed", seeds(25), ids=lambda seed: f"seed-{seed}-")
@simulated
async def test_honest_peers_are_never_accused_whatever_befalls_them(seed: int) -> None:
    rng = random.Random(seed)
    plan = FaultPlan.draw(seed, CAST, Odds(rng.randrange(1, 4), longest_s=12.0, kinds=ALL_KINDS))
    async with pairs_of_servers(seed, rng.choice(WEATHERS)) as swarm, swarm.client(POLICY) as (router, _):
        async with plan.upon(swarm), open_at_last(router) as session:
            await talk(session, rng, POLICY)
            assert session.spot_checks is not None
            assert session.spot_checks.undecided == 0
            print(f"{session.spot_checks.passed} passed, {session.spot_checks.given_up} given up")
        suspicion, now_s = router.finder.records.suspicion, trio.current_time()
        assert not any(suspicion.is_excluded(node.peer, now_s) for node in swarm.nodes.values())
        await kv_is_free(swarm)


# How soon a liar is found


@dataclass(frozen=True, slots=True)
class Odd:
    """The share of a liar's steps that are wrong, and the share of chunks that are checked."""

    wrong: float
    rate: float

    @property
    def per_step(self) -> float:
        """The chance of one step. The liar is one of three hops, and a check looks at one of them."""
        return self.rate * self.wrong / len(SPANS)


async def steps_until_found(seed: int, odd: Odd, most: int) -> int | None:
    rng = random.Random(seed)
    policy = replace(POLICY, spot_checks=replace(CHECKS, share=odd.rate))
    async with servers("abc", seed) as swarm, swarm.session(policy, max_length=200) as (session, _):
        corrupt(swarm, rng.choice(session.route).peer, odd.wrong, rng)
        for step in range(1, most + 1):
            if session.position == 40:
                await session.truncate(0)  # a check is a prefill, which would take ever longer
            try:
                await speak(session, 1)
            except SessionLost:
                return step
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "odd", [Odd(1.0, 0.2), Odd(1.0, 0.05), Odd(1.0, 0.01), Odd(0.2, 0.2)], ids=lambda odd: f"{odd.wrong}-{odd.rate}-"
)
def test_a_liar_is_found_as_soon_as_chance_has_it(odd: Odd) -> None:
    """The law is geometric: it gives the number of sessions in which a liar is found within some steps.

    Sessions that could not change the verdict any more are left out.
    """
    tries = len(seeds(12))
    most = round(1 / odd.per_step)
    expected = 1 - (1 - odd.per_step) ** most
    deviation = (tries * expected * (1 - expected)) ** 0.5

    def is_lawful(caught: int) -> bool:
        return abs(caught - tries * expected) < 4 * deviation

    found: list[int | None] = []
    caught: list[int] = []
    for seed in seeds(12):
        found.append(simulate(lambda seed=seed: steps_until_found(seed, odd, most), seed=seed))  # type: ignore[misc]
        caught = [steps for steps in found if steps is not None]
        if all(map(is_lawful, range(len(caught), len(caught) + tries - len(found) + 1))):
            break
    print(f"wrong {odd.wrong:g}, rate {odd.rate:g}: {len(caught)} of {len(found)} within {most} steps")
    for part in (0.25, 0.5, 1.0):
        within = sum(steps <= part * most for steps in caught)
        of_law = 1 - (1 - odd.per_step) ** (part * most)
        print(f"  {round(part * most)} steps: {within / len(found):.3f} found, {of_law:.3f} expected")
    assert is_lawful(len(caught))
