"""Long prompts wait for direct connections, and go through a relay as far as the policy allows; steps do not wait."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, PushPolicy, RelayedPolicy, ServePolicy
from llmnode.errors import ConfigError, NoRoute
from llmnode.testing import Conditions, check_coverage, open_world, peer_named
from simulation.test_direct import ME, opened, punch_all, ways
from simulation.world import DELAY_S, ROW, SPANS, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from llmnode.core.span import Span
    from llmnode.session.session import InferenceSession
    from llmnode.testing import Dialogue, World

RELAYED = RelayedPolicy(prefill_bytes=10 * ROW, step_positions=2)
POLICY = ClientPolicy(chunk_tokens=16, relayed=RELAYED)
PROMPT = 11
SOON_S = 1.0


@asynccontextmanager
async def relayed_world(*, direct_to_client: bool = False, limit_bytes: int | None = None) -> AsyncIterator[World]:
    """A server of each span. They reach each other only through relays, and so may the client."""
    policy = ServePolicy(relayed=RELAYED)
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=policy) as swarm:
        swarm.internet.relay_limit_bytes = limit_bytes
        servers = [peer_named(f"{index}") for index in range(len(SPANS))]
        for one, other in combinations(servers if direct_to_client else [ME, *servers], 2):
            swarm.internet.relay(one, other)
        for index, span in enumerate(SPANS):
            await swarm.start(f"{index}", span)
        await check_coverage(swarm)
        yield swarm


@asynccontextmanager
async def relayed_session(
    prefill: str = "wait", *, direct_to_client: bool = False, limit_bytes: int | None = None
) -> AsyncIterator[tuple[World, InferenceSession, Dialogue]]:
    policy = replace(POLICY, relayed=replace(RELAYED, prefill=prefill))
    async with (
        relayed_world(direct_to_client=direct_to_client, limit_bytes=limit_bytes) as swarm,
        opened(swarm, policy) as (session, dialogue),
    ):
        yield swarm, session, dialogue


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began_s = trio.current_time()
    await work()
    return trio.current_time() - began_s


@simulated
async def test_a_long_prompt_waits_for_a_direct_way_and_goes_over_it() -> None:
    async with relayed_session() as (swarm, session, dialogue), trio.open_nursery() as nursery:

        async def punch_later() -> None:
            await trio.sleep(SOON_S)
            punch_all(swarm)

        nursery.start_soon(punch_later)
        assert SOON_S < await timed(lambda: dialogue.step(PROMPT)) < RELAYED.patience_s
        assert ways(session) == {False}
        assert not session.recoveries


@simulated
async def test_without_a_direct_way_it_goes_through_the_relay_after_a_while_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with relayed_session() as (_, session, dialogue):
        with caplog.at_level(logging.WARNING):
            assert RELAYED.patience_s < await timed(lambda: dialogue.step(PROMPT)) < RELAYED.patience_s + SOON_S
            assert await timed(lambda: dialogue.step(PROMPT)) < SOON_S, "they have been waited for"
        assert ways(session) == {True}
        assert ["through a relay" in record.message for record in caplog.records] == [True]


@simulated
async def test_steps_and_short_prompts_do_not_wait() -> None:
    async with relayed_session("refuse") as (_, session, dialogue):
        assert await timed(lambda: dialogue.step(PROMPT - 1)) < SOON_S
        for _ in range(20):
            assert await timed(lambda: dialogue.step(2)) < SOON_S
        assert ways(session) == {True}


@simulated
async def test_who_refuses_relays_is_told_how_to_go_on_and_may() -> None:
    async with relayed_session("refuse") as (swarm, session, dialogue):
        with pytest.raises(ConfigError, match="--relayed-prefill allow"):
            await dialogue.step(PROMPT)
        await dialogue.step(1)
        punch_all(swarm)
        await trio.sleep(SOON_S)
        await dialogue.step(PROMPT)
        assert ways(session) == {False}
        assert not session.recoveries


@pytest.mark.parametrize("prefill", ["wait", "allow"])
@simulated
async def test_a_relay_that_would_cut_it_is_used_only_if_that_is_allowed(prefill: str) -> None:
    async with relayed_session(prefill, limit_bytes=PROMPT * ROW) as (_, _session, dialogue):
        if prefill == "allow":
            assert await timed(lambda: dialogue.step(PROMPT)) < SOON_S
        else:
            with pytest.raises(ConfigError, match="limit"):
                await dialogue.step(PROMPT)


@simulated
async def test_servers_push_steps_through_a_relay_and_long_prompts_by_way_of_a_client_that_is_nearer() -> None:
    async with relayed_session(direct_to_client=True) as (_, session, dialogue):
        assert await timed(lambda: dialogue.step(PROMPT)) < SOON_S
        assert [timing.direct for timing in session.timings] == [False, False, False]
        await dialogue.step(1)
        assert [timing.direct for timing in session.timings] == [False, True, True]


@simulated
async def test_servers_push_long_prompts_through_a_relay_if_the_client_is_behind_one_too() -> None:
    async with relayed_session("allow") as (_, session, dialogue):
        await dialogue.step(PROMPT)
        assert [timing.direct for timing in session.timings] == [False, True, True]


@asynccontextmanager
async def bereaved_session(lost: Span, policy: ClientPolicy) -> AsyncIterator[tuple[World, InferenceSession, Dialogue]]:
    """A session of `PROMPT` positions. The peer with the `lost` span has just died; its only twin is behind a relay."""
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await swarm.start(f"{index}", span)
        async with opened(swarm, policy) as (session, dialogue):
            await dialogue.step(PROMPT)
            for peer in [ME, *(node.peer for node in swarm.nodes.values())]:
                swarm.internet.relay(peer, peer_named("twin"))
            await swarm.start("twin", lost)
            await check_coverage(swarm)
            swarm.kill(f"{SPANS.index(lost)}")
            yield swarm, session, dialogue
            assert [recovery.taken_over_by for recovery in session.recoveries] == [(peer_named("twin"),)]


FIRST_OR_FETCHED = [(SPANS[0], True), (SPANS[1], False), (SPANS[2], False)]
"""Cases in which the client sends the replay: the lost span, and whether servers push."""


@pytest.mark.parametrize(("lost", "push"), FIRST_OR_FETCHED)
@simulated
async def test_a_replay_waits_for_a_direct_way_and_goes_over_it(lost: Span, push: bool) -> None:
    async with bereaved_session(lost, replace(POLICY, push=PushPolicy(push))) as (swarm, session, dialogue):
        async with trio.open_nursery() as nursery:

            async def punch_later() -> None:
                await trio.sleep(SOON_S)
                punch_all(swarm)

            nursery.start_soon(punch_later)
            assert SOON_S < await timed(lambda: dialogue.step(1)) < RELAYED.patience_s
        assert ways(session) == {False}


@pytest.mark.parametrize(("lost", "push"), FIRST_OR_FETCHED)
@simulated
async def test_without_a_direct_way_a_replay_goes_through_the_relay_after_a_while(lost: Span, push: bool) -> None:
    async with bereaved_session(lost, replace(POLICY, push=PushPolicy(push))) as (_, session, dialogue):
        assert RELAYED.patience_s < await timed(lambda: dialogue.step(1)) < RELAYED.patience_s + 2 * SOON_S
        assert ways(session) == {True, False}


@simulated
async def test_a_replay_that_may_not_go_through_a_relay_waits_for_others_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = replace(POLICY, relayed=replace(RELAYED, prefill="refuse"))
    async with bereaved_session(SPANS[0], policy) as (swarm, session, dialogue):
        with pytest.raises(NoRoute):
            await session.step(bytes(ROW))
        assert any("--relayed-prefill allow" in record.message for record in caplog.records)
        punch_all(swarm)
        await dialogue.step(1)
        assert ways(session) == {False}
