"""Sessions with deep prompts are right to the bit, through rollbacks, copies and lost servers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.operations import DeepPrompts
from llmnode.core.policy import ClientPolicy, ServePolicy, SpotCheckPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerRefused
from llmnode.testing import exact_output, open_world
from llmnode.testing.exact_blocks import exact_input, exact_prompts
from llmnode.wire import deep_prompts
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import OpenRequest, RefusalCode, pack
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields
from llmnode.wire.refusal import refusal_of
from simulation.world import ALL_BLOCKS, MODEL, ROW, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.session.router import Router
    from llmnode.session.session import InferenceSession

POSITIONS = 4


def drawn(seed: int, positions: int = POSITIONS) -> DeepPrompts:
    return DeepPrompts(MODEL.blocks, 1, positions, exact_input(random.Random(seed), MODEL.blocks * positions))


def expected(given: bytes, prompts: DeepPrompts) -> bytes:
    return exact_output(given, ALL_BLOCKS, prompts=[each[: len(given)] for each in exact_prompts(prompts, 1)[0]])


async def check_step(session: InferenceSession, before: bytes, hidden: bytes, prompts: DeepPrompts) -> bytes:
    """Returns all that the session was given."""
    given = before + hidden
    assert bytes(await session.step(hidden)) == expected(given, prompts)[len(before) :]
    return given


@simulated
async def test_prompts_are_added_through_rollbacks_copies_and_lost_servers() -> None:
    rng, prompts = random.Random(1), drawn(2)
    hidden = [exact_input(rng, length) for length in (2, 5, 1, 3)]
    async with (
        pairs_of_servers() as swarm,
        swarm.client() as (router, _),
        router.open_session(64, Codec.RAW, prompts=prompts) as session,
    ):
        given = await check_step(session, b"", hidden[0], prompts)
        given = await check_step(session, given, hidden[1], prompts)
        await session.truncate(3)  # amid the prompts
        given = await check_step(session, given[: 3 * ROW], hidden[2], prompts)
        for index in range(3):
            (used,) = {hop.peer for hop in session.route if hop.span.start == 2 * index}
            (name,) = [name for name, node in swarm.nodes.items() if node.peer == used]
            swarm.kill(name)
            given = await check_step(session, given, hidden[0], prompts)
        async with router.open_session(64, Codec.RAW, session, prompts=prompts) as other:
            await session.fork([other])
            await check_step(other, given, hidden[3], prompts)
        await check_step(session, given, hidden[1], prompts)
        with pytest.raises(ConfigError, match="deep prompts cannot be saved"):
            await session.export(Path("/nowhere/at/all"))


@simulated
async def test_sessions_with_different_prompts_and_none_are_computed_together() -> None:
    async with world() as swarm:
        await swarm.start("whole", ALL_BLOCKS)

        async def talk(seed: int, prompts: DeepPrompts | None) -> None:
            rng, given = random.Random(seed), b""
            own = {} if prompts is None else {"prompts": prompts}
            async with swarm.client() as (router, _), router.open_session(64, Codec.RAW, **own) as session:
                for length in (1, 1, 6, 1):
                    hidden = exact_input(rng, length)
                    output, given = bytes(await session.step(hidden)), given + hidden
                    whole = exact_output(given, ALL_BLOCKS) if prompts is None else expected(given, prompts)
                    assert output == whole[-len(hidden) :]

        async with trio.open_nursery() as nursery:
            for seed in range(6):
                nursery.start_soon(talk, seed, drawn(seed) if seed % 3 else None)


@simulated
async def test_prompts_that_are_too_large_or_of_another_form_are_refused() -> None:
    async with open_world(serve_policy=ServePolicy(session_prompt_bytes=6 * 2 * ROW)) as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            with pytest.raises(PeerRefused, match="at most"):
                await _open(router, drawn(1))
            await _open(router, drawn(1, 2))
            with pytest.raises(ConfigError, match="not finite"):
                await _open(router, DeepPrompts(6, 1, 1, b"\xff" * 6 * ROW))
            _, connections = await router.finder.find(ALL_BLOCKS, 0, (), hurry=False)
            (connection,) = connections.values()
            for asked, payload in (([1, 1], b""), ([1, 1], b"\xff" * 6 * ROW), ([2, 1], bytes(12 * ROW)), (None, b"x")):
                message = OpenRequest(
                    **profile_fields(MODEL.profile),
                    span_start=0,
                    span_end=6,
                    max_length=8,
                    codec="raw",
                    priority="interactive",
                    keep_outputs=False,
                    extensions=None if asked is None else {"prompts": asked},
                )
                frame = Frame(FrameType.OPEN, router.finder.rng.randbytes(16), meta=pack(message), payload=payload)
                with pytest.raises(PeerRefused) as refused:
                    await connection.ask(frame, FrameType.OPENED, 5.0)
                assert refused.value.code == RefusalCode.BAD_MESSAGE


@simulated
async def test_prompts_that_are_too_large_for_all_blocks_together_fit_several_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deep_prompts, "MOST_SESSION_BYTES", 6 * ROW)
    monkeypatch.setattr(deep_prompts, "MOST_PASS_BYTES", 4 * ROW)
    prompts, halves = drawn(1, 2), [Span(0, 3), Span(3, 6)]
    async with world() as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            with pytest.raises(PeerRefused, match="servers of fewer blocks"):
                await _open(router, prompts)
            for half in halves:
                await swarm.start(str(half), half)
            await trio.sleep(5)  # they are heard of
            async with router.open_session(16, Codec.RAW, prompts=prompts) as session:
                await check_step(session, b"", exact_input(random.Random(3), 5), prompts)
                assert [hop.span for hop in session.route] == halves
            with pytest.raises(ConfigError, match="servers take 4"):
                await _open(router, drawn(1, 5))


@simulated
async def test_a_server_of_before_deep_prompts_is_sent_none_again() -> None:
    refused: list[Frame] = []

    def of_before(_peer: PeerId, frame: Frame) -> list[Frame]:
        if frame.type is not FrameType.OPENED:
            return [frame]
        refused.append(refusal_of(frame, RefusalCode.UNKNOWN_EXTENSION, "prompts"))
        return refused[-1:]

    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        async with router.open_session(16, Codec.RAW) as session:  # a client keeps to the same of equal servers
            chosen = [swarm.node(hop.peer) for hop in session.route]
        for node in chosen:
            node.network.tamper = of_before
        for _ in range(8):
            await _open(router, drawn(1))
        assert 0 < len(refused) <= 3
        for node in chosen:
            node.network.tamper = None
        used = set()
        for _ in range(8):
            async with router.open_session(16, Codec.RAW) as session:
                used |= {hop.peer for hop in session.route}
        assert used & {node.peer for node in chosen}, "without prompts they are asked"


async def _open(router: Router, prompts: DeepPrompts) -> None:
    async with router.open_session(16, Codec.RAW, prompts=prompts):
        pass


@simulated
async def test_what_is_computed_again_has_the_prompts_too() -> None:
    """Each chunk, by another peer: honest ones agree."""
    rng, prompts, given = random.Random(5), drawn(6), b""
    policy = ClientPolicy(spot_checks=SpotCheckPolicy(1.0))
    async with pairs_of_servers() as swarm, swarm.client(policy) as (router, _):
        forwards = sum(node.worker.executor.forwards for node in swarm.nodes.values())
        async with router.open_session(64, Codec.RAW, prompts=prompts) as session:
            for length in (5, 1, 2, 1):
                given = await check_step(session, given, exact_input(rng, length), prompts)
                await trio.sleep(5)
        assert sum(node.worker.executor.forwards for node in swarm.nodes.values()) > forwards + 4 * 3
