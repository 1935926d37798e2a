"""One honest route beside servers that say that they are the fastest: a client that knows nobody finds it soon."""

from __future__ import annotations

import random

import pytest
import trio

from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, Dialogue, open_world, peer_named, seeds, simulated
from llmnode.testing.hostile import (
    Evictor,
    HostilePlan,
    HostileRole,
    NanServer,
    Refuser,
    Silent,
    SpeedLiar,
    check_no_wrong_ban,
)
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec

ALL_BLOCKS = Span(0, 6)
HONEST = {"0a": Span(0, 3), "1a": Span(3, 6)}
STEPS = 24
WITHIN_S = 18.0
"""The session ends within this time. A server that never answers is given up after 8 s, or 10 s if it is to open a
session (`StandingPolicy.first_patience_s`, `ClientPolicy.open_timeout_s`)."""


def role(kind: str, peers: int, groups: int) -> HostileRole:
    every = peers, groups, ALL_BLOCKS, 1
    match kind:
        case "refuses steps":
            return Refuser(*every, RefusalCode.BAD_MESSAGE)
        case "refuses sessions":
            return Refuser(*every, RefusalCode.WRONG_MODEL, refuses=FrameType.OPENED)
        case "evicts sessions":
            return Evictor(*every, honest_steps=4)
        case "computes no numbers":
            return NanServer(*every)
        case "is slow":
            return SpeedLiar(*every, forward_s=3.0)
        case _:
            return Silent(*every, FrameType[kind.rpartition(" ")[2]])


KINDS = [
    "refuses steps",
    "refuses sessions",
    "evicts sessions",
    "computes no numbers",
    "is slow",
    "withholds RESULT",
    "withholds OPENED",
    "withholds FORWARDED",
]


CROWDS = [
    *((kind, 16, groups) for kind in KINDS for groups in (1, 16)),
    ("is slow", 40, 40),
    ("withholds RESULT", 40, 40),
]


@pytest.mark.parametrize(("kind", "peers", "groups"), CROWDS)
@pytest.mark.parametrize("seed", seeds(1))
@simulated
async def test_a_new_client_is_served_soon_beside_servers_that(kind: str, peers: int, groups: int, seed: int) -> None:
    plan = HostilePlan((role(kind, peers, groups),))
    async with open_world(seed, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        for name, span in HONEST.items():
            await world.start(name, span)
        async with plan.upon(world), world.client() as client:
            with trio.fail_after(WITHIN_S):
                async with client.router.open_session(64, Codec.RAW) as session:
                    dialogue = Dialogue(session, random.Random(seed))
                    await dialogue.step(9)
                    for _ in range(STEPS):
                        await dialogue.step(1)
            check_no_wrong_ban(client.router.finder, [peer_named(name) for name in HONEST])  # type: ignore[arg-type]


@pytest.mark.parametrize("honest_steps", [1, 4, 20])
@pytest.mark.parametrize("seed", seeds(1))
@simulated
async def test_each_of_sixteen_servers_that_evict_sessions_has_few_a_second_time(seed: int, honest_steps: int) -> None:
    """An eviction is no fault, but counts. When it did not, two sessions were evicted 27 times each."""
    plan = HostilePlan((Evictor(16, 16, ALL_BLOCKS, 1, honest_steps),))
    async with open_world(seed, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        for name, span in HONEST.items():
            await world.start(name, span)
        async with plan.upon(world), world.client() as client:
            evictions = list[int]()
            for _ in range(4):
                async with client.router.open_session(64, Codec.RAW) as session:
                    dialogue = Dialogue(session, random.Random(seed))
                    for positions in (9, *[1] * STEPS):
                        await dialogue.step(positions)
                    evictions.append(len(session.recoveries))
            assert 1 <= sum(evictions) <= 20
            check_no_wrong_ban(client.router.finder, [peer_named(name) for name in HONEST])  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_servers_that_compute_in_their_trials_and_then_hang_cost_little_more_than_three_seconds_each(
    seed: int,
) -> None:
    """Three groups. The first has no trial, and serves one step. A round trip and a forward take 0.05 s here."""
    plan, policy = HostilePlan((Silent(3, 3, ALL_BLOCKS, 1, honest_steps=1),)), ClientPolicy()
    async with open_world(seed, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        for name, span in HONEST.items():
            await world.start(name, span)
        async with plan.upon(world), world.client() as client:
            began_s = trio.current_time()
            async with client.router.open_session(64, Codec.RAW) as session:
                dialogue = Dialogue(session, random.Random(seed))
                for positions in (9, *[1] * STEPS):
                    await dialogue.step(positions)
            hung = len(client.router.finder.banned)
            assert hung > 1, "some are believed after their trials"
            first_s = policy.step_patience_s + policy.step_patience_times * 0.05
            tried_s = policy.standing.tried_patience_s + policy.standing.tried_patience_times * 0.05
            assert trio.current_time() - began_s < first_s + (hung - 1) * (tried_s + 0.1) + 4
            check_no_wrong_ban(client.router.finder, [peer_named(name) for name in HONEST])  # type: ignore[arg-type]
