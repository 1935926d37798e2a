"""Spot checks of passes: a server that lies about outputs or gradients is found, and what is kept is right."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.operations import DeepPrompts
from llmnode.core.policy import ClientPolicy, RecoveryPolicy, SpotCheckPolicy
from llmnode.core.span import Span
from llmnode.session.pass_checks import _AWAY_S, _SILENT_S, _TIMES_ALL
from llmnode.session.passes import SwarmPasses
from llmnode.testing import Cast, FaultPlan, Odds, seeds
from llmnode.testing.faults import FailForwards, Freeze, Kill, Stop
from llmnode.testing.hostile import PassLiar
from llmnode.testing.network import peer_named
from llmnode.wire.payload import Codec
from simulation.adapters import drawn, drawn_adapter, there_and_back
from simulation.world import ALL_BLOCKS, SPANS, simulated, world

if TYPE_CHECKING:
    from llmnode.session.router import Router
    from llmnode.testing import World

LENGTHS = [5, 1, 12]
CHECKS = SpotCheckPolicy(share=1.0, tolerance=0.0)
POLICY = ClientPolicy(spot_checks=CHECKS)


async def start(swarm: World, name: str, span: Span, host: str, liar: PassLiar | None = None) -> None:
    """A server at an address. It says that it is fast if it lies, so that it is chosen."""
    swarm.internet.locate(peer_named(name), host)
    node = await swarm.start(name, span, said_us=1000 if liar is None else 1)
    if liar is not None:
        liar.corrupt(node)


def liar_about(place: str) -> PassLiar:
    """It lies about outputs, or about gradients at one of `PassLiar.PLACES`."""
    if place == "outputs":
        return PassLiar(1, 1, gradients=False)
    return PassLiar(1, 1, outputs=False, place=place)


def excluded(swarm: World, router: Router) -> set[str]:
    """The servers that the client does not use any more."""
    suspicion, now_s = router.finder.records.suspicion, trio.current_time()
    return {name for name in swarm.nodes if suspicion.is_excluded(peer_named(name), now_s)}


def suspected(swarm: World, router: Router) -> set[str]:
    suspicion, now_s = router.finder.records.suspicion, trio.current_time()
    return {name for name in swarm.nodes if suspicion.penalty(peer_named(name), now_s) > 1}


@pytest.mark.parametrize(
    ("about", "has_adapter"),
    [("outputs", False), ("outputs", True), ("rows", False), ("rows", True), ("adapter", True), ("prompts", False)],
)
@simulated
async def test_a_liar_is_found_at_its_first_lie_and_what_is_kept_is_right(about: str, has_adapter: bool) -> None:
    """About outputs, or about gradients for rows, for the numbers of an adapter alone, or for those of prompts."""
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            for number, twin in enumerate("ab"):
                await start(swarm, f"{index}{twin}", span, f"9.{number}.{index}.1")
        await start(swarm, "liar", SPANS[1], "9.9.0.1", liar_about(about))
        async with swarm.client(POLICY) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            adapter = drawn_adapter(random.Random(1)) if has_adapter else None
            for seed in range(4):
                await there_and_back(client, seed, LENGTHS, adapter)  # right to the bit
            assert client.checks.found == [peer_named("liar")]
            assert excluded(swarm, router) == {"liar"}
            assert not suspected(swarm, router)
            assert client.checks.passed >= 4 * len(SPANS)
            assert client.checks.given_up == client.checks.undecided == 0


@simulated
async def test_a_liar_that_checks_others_is_found_too() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            for number, twin in enumerate("ab"):
                await start(swarm, f"{index}{twin}", span, f"9.{number}.{index}.1")
        await start(swarm, "liar", SPANS[1], "9.9.0.1")
        swarm.nodes["liar"].worker.slower_by_s = 1.0  # it is seldom chosen for the pass itself
        PassLiar(1, 1).corrupt(swarm.nodes["liar"])
        async with swarm.client(POLICY) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            for seed in range(8):
                await there_and_back(client, seed, LENGTHS, None)
            assert client.checks.found == [peer_named("liar")]
            assert excluded(swarm, router) == {"liar"}


@simulated
async def test_without_a_third_server_both_are_suspected_and_nobody_is_banned() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await start(swarm, f"{index}", span, f"9.1.{index}.1")
        await start(swarm, "liar", SPANS[1], "9.9.0.1", PassLiar(1, 1))
        async with swarm.client(POLICY) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert client.checks.undecided == 1
            assert client.checks.given_up == 2  # nobody else has the other spans
            assert suspected(swarm, router) == {"1", "liar"}
            assert not excluded(swarm, router)


@simulated
async def test_a_third_server_that_restarts_is_waited_for_and_decides() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await start(swarm, f"{index}", span, f"9.1.{index}.1")
        await start(swarm, "third", SPANS[1], "9.2.1.1")
        await start(swarm, "liar", SPANS[1], "9.9.0.1", PassLiar(1, 1))
        async with swarm.client(POLICY) as (router, _), trio.open_nursery() as nursery:
            client = SwarmPasses(router.finder, Codec.RAW)
            swarm.kill("third")

            async def restart() -> None:
                await trio.sleep(3)
                await start(swarm, "third", SPANS[1], "9.2.1.1")

            nursery.start_soon(restart)
            await there_and_back(client, 0, LENGTHS, None)
            assert client.checks.found == [peer_named("liar")]
            assert not suspected(swarm, router)
            assert not client.checks.undecided


@simulated
async def test_one_that_never_comes_back_is_waited_for_in_vain_for_some_seconds() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await start(swarm, f"{index}", span, f"9.1.{index}.1")
        await start(swarm, "third", SPANS[1], "9.2.1.1")
        await start(swarm, "liar", SPANS[1], "9.9.0.1", PassLiar(1, 1))
        async with swarm.client(POLICY) as (router, _):
            client, began_s = SwarmPasses(router.finder, Codec.RAW), trio.current_time()
            swarm.kill("third")
            await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert client.checks.undecided == 1
            assert trio.current_time() - began_s < _AWAY_S + 5


@simulated
async def test_two_liars_of_one_group_that_lie_alike_convict_nobody() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await start(swarm, f"{index}", span, f"9.1.{index}.1")
        lie = PassLiar(2, 1, flipped=1)
        for number, name in enumerate(lie.names):
            await start(swarm, name, SPANS[1], lie.host(number), lie)
        async with swarm.client(POLICY) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            for _ in range(6):
                await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert not excluded(swarm, router)
            assert client.checks.undecided
            assert suspected(swarm, router) == {"1", *lie.names}


RARE = ClientPolicy(spot_checks=SpotCheckPolicy(share=0.2, tolerance=0.0))


@simulated
async def test_checks_are_made_at_the_rate_that_is_asked_for_and_find_a_liar_in_time() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            for number, twin in enumerate("abc"):
                await start(swarm, f"{index}{twin}", span, f"9.{number}.{index}.1")
        async with swarm.client(RARE) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            for _ in range(100):
                await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert 35 <= client.checks.passed <= 85  # of 300
            await start(swarm, "liar", SPANS[1], "9.9.0.1", PassLiar(1, 1))
            await trio.sleep(10)
            for _ in range(60):
                await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert client.checks.found == [peer_named("liar")]
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert not client.checks.passed + client.checks.given_up + client.checks.undecided


@simulated
async def test_backwards_are_checked_at_that_rate_too_and_a_liar_about_gradients_is_found_in_time() -> None:
    span, adapter = SPANS[1], drawn_adapter(random.Random(1))
    prompts = DeepPrompts(len(span), 1, 1, drawn(2, len(span)))
    async with world() as swarm:
        for number, twin in enumerate("abc"):
            await start(swarm, twin, span, f"9.{number}.0.1")
        async with swarm.client(RARE) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            _, crossed = await client.outputs(span, [3], drawn(1, 3), adapter, prompts)
            checks, before = client.checks, client.checks.passed
            for _ in range(100):
                await client.gradients(crossed, drawn(3, 3))
            assert 8 <= checks.passed - before <= 34  # of 100
            await start(swarm, "liar", span, "9.9.0.1", PassLiar(1, 1, outputs=False))
            await trio.sleep(10)
            for _ in range(40):
                await client.gradients(crossed, drawn(3, 3))
            assert checks.found == [peer_named("liar")]


@simulated
async def test_servers_that_are_silent_when_they_check_hold_up_training_once() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await start(swarm, f"{index}", span, f"9.1.{index}.1")
        silent = [f"silent {number}" for number in range(6)]
        for name in silent:
            node = await swarm.start(name, SPANS[1], said_us=10**6)  # it is not chosen for the pass itself
            node.worker.gate = trio.Event()
        async with swarm.client(POLICY) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            took_s = []
            for _ in range(6):
                began_s = trio.current_time()
                await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
                took_s.append(trio.current_time() - began_s)
            assert max(took_s) < _TIMES_ALL * CHECKS.timeout_s + 5
            assert sum(took_s) < len(silent) * CHECKS.timeout_s + 5, "each is asked once"
            assert took_s[-1] < 5
            assert not client.checks.passed and not excluded(swarm, router)
            for name in silent:
                swarm.nodes[name].worker.open_gate()
            await trio.sleep(_SILENT_S)
            await client.outputs(ALL_BLOCKS, [3], bytes(3 * router.finder.model.row_bytes))
            assert client.checks.passed == 1


@pytest.mark.parametrize("seed", [*seeds(6), 29])  # the other two servers are away when a lie is checked
@simulated
async def test_whatever_fails_and_lies_no_honest_server_is_banned_and_what_is_kept_is_right(seed: int) -> None:
    """Three honest servers of each span, and liars that do not agree with each other."""
    rng = random.Random(seed)
    cast = Cast(nodes=[f"{index}{twin}" for index in range(3) for twin in "abc"], spans=[*SPANS], movable=[])
    plan = FaultPlan.draw(seed, cast, Odds(rng.randrange(3), longest_s=5.0, kinds=[Kill, Stop, Freeze, FailForwards]))
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=60.0), spot_checks=CHECKS)
    async with world(seed) as swarm:
        for index, span in enumerate(SPANS):
            for number, twin in enumerate("abc"):
                await start(swarm, f"{index}{twin}", span, f"9.{number}.{index}.1")
        lies = [PassLiar.draw(rng) for _ in range(rng.randint(1, 2))]
        liars = [f"liar {number}" for number in range(len(lies))]
        for number, (name, lie) in enumerate(zip(liars, lies, strict=True)):
            await start(swarm, name, rng.choice(SPANS), f"9.9{number}.0.1", lie)
        async with swarm.client(policy) as (router, _), plan.upon(swarm):
            client = SwarmPasses(router.finder, Codec.RAW)
            for step in range(5):
                adapter = drawn_adapter(rng) if rng.random() < 0.5 else None
                await there_and_back(client, step, LENGTHS, adapter)
                await trio.sleep(rng.choice([0, 1, 4]))
            assert excluded(swarm, router) <= set(liars)
            assert {str(peer) for peer in client.checks.found} <= {f"peer-{name}" for name in liars}
