"""Everything that befalls the servers of a session at random: faults, weathers, policies, and what the session says."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import ClientPolicy, PushPolicy, RecoveryPolicy, RoutePolicy, TrustPolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerError
from llmnode.testing import (
    Cast,
    Conditions,
    FaultPlan,
    Odds,
    check_coverage,
    check_no_banned_peer,
    check_nobody_is_convicted,
)
from llmnode.testing.faults import ALL_KINDS, FailForwards, Freeze, Kill, Stop
from llmnode.wire.payload import Codec
from simulation.world import DELAY_S, SPANS, Dialogue, kv_is_free, pairs_of_servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from llmnode.session.router import Router
    from llmnode.session.session import InferenceSession

MAX_LENGTH = 120
LONGEST_OUTAGE_S = 12.0
POLICY = ClientPolicy(chunk_tokens=8)
POLICIES = [
    POLICY,
    POLICY,
    replace(POLICY, trust=TrustPolicy(strict=True)),
    replace(POLICY, recovery=RecoveryPolicy(upstream_logs=False)),
    replace(POLICY, push=PushPolicy(enabled=False)),
    replace(POLICY, route=RoutePolicy(standbys=False)),
    replace(POLICY, chunks_ahead=1),
]
OTHER_CUTS = [Span(0, 3), Span(3, 6), Span(1, 5), Span(0, 6)]
CAST = Cast(
    nodes=[f"{index}{twin}" for index in range(3) for twin in "ab"],
    spans=[*SPANS, *OTHER_CUTS],
    movable=["0b", "1b", "2b"],
)
KINDS = [*ALL_KINDS, Kill, Stop, Stop, Freeze, FailForwards, FailForwards]  # most of the others cost no server
WEATHERS = [
    Conditions(delay_s=DELAY_S),
    Conditions(delay_s=DELAY_S, jitter_s=0.2),
    Conditions(delay_s=DELAY_S, jitter_s=0.02, duplication=0.2),
    Conditions(delay_s=DELAY_S, bytes_per_s=20_000),
    Conditions(delay_s=DELAY_S, loss=0.02, duplication=0.02),
]


@asynccontextmanager
async def open_at_last(router: Router) -> AsyncIterator[InferenceSession]:
    """All holders of a span may be away at the moment."""
    async with AsyncExitStack() as stack:
        with trio.fail_after(10 * LONGEST_OUTAGE_S):
            while True:
                try:
                    session = await stack.enter_async_context(router.open_session(MAX_LENGTH, Codec.RAW))
                    break
                except (NoRoute, PeerError):
                    await trio.sleep(1)
        yield session


async def talk(session: InferenceSession, rng: random.Random, policy: ClientPolicy, *, steps: int = 25) -> None:
    dialogue = Dialogue(session, rng, policy=policy)
    for _ in range(steps):
        if rng.random() < 0.15:
            await dialogue.go_back(rng.randrange(session.position + 1))
        await dialogue.step(min(rng.choice([1, 1, 1, 2, 20]), MAX_LENGTH - session.position) or 1)
        if session.position == MAX_LENGTH:
            await dialogue.go_back(MAX_LENGTH // 2)
        await trio.sleep(rng.expovariate(1 / 0.3))


async def outlive(seed: int, trace: Callable[[str], None] | None = None) -> None:
    rng = random.Random(seed)
    policy = rng.choice(POLICIES)
    plan = FaultPlan.draw(seed, CAST, Odds(rng.randrange(1, 5), longest_s=LONGEST_OUTAGE_S, kinds=KINDS))
    async with pairs_of_servers(seed, rng.choice(WEATHERS)) as swarm, swarm.client(policy) as (router, _):
        swarm.internet.trace = trace or swarm.internet.trace
        async with plan.upon(swarm), open_at_last(router) as session:
            await talk(session, rng, policy)
            check_nobody_is_convicted(session)
        check_no_banned_peer(router.finder, policy)
        await kv_is_free(swarm)
        if rng.random() < 0.25:
            swarm.kill(rng.choice(CAST.nodes))
        await check_coverage(swarm)
