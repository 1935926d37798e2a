"""Requests of strangers take turns: they cost a server a bounded time, and honest clients hardly wait for them."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import SessionId, Step
from llmnode.core.policy import ServePolicy, TurnPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerError, single_error
from llmnode.node.serve import conduct
from llmnode.node.serve.push_inlet import LinkGrants
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import Dialogue, check_coverage, open_world, simulated, simulated_ms
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, pack
from llmnode.wire.payload import Codec
from llmnode.wire.push_messages import PushLimit
from simulation.pushes import neighbours, open_frame

if TYPE_CHECKING:
    from llmnode.ports import Link

BLOCKS = Span(0, 6)
SECONDS, FRAMES_PER_S = 2, 150
THERE = SessionId(b"t" * 16)
WANTS = {
    "WANT": Frame(FrameType.WANT, SessionId(b"w" * 16), step=Step(1), meta=pack(PushLimit(0))),
    "WANT for a session that is there": Frame(FrameType.WANT, THERE, step=Step(1), meta=pack(PushLimit(0))),
}
KINDS = {
    "questions": Frame(FrameType.DESCRIBE),
    "steps of no session": Frame(
        FrameType.STEP, session=SessionId(bytes(range(16))), length=1, payload=bytes(16), value_bytes=4
    ),
    **WANTS,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 16])
@simulated
async def test_floods_are_answered_at_a_bounded_rate_and_an_honest_client_soon(
    kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers most WANTs: those that are looked at count."""
    requests, answered, note = ServePolicy().requests, 0, LinkGrants.note

    def noted(grants: LinkGrants, frame: Frame, limit_bytes: int) -> None:
        nonlocal answered
        answered += 1
        note(grants, frame, limit_bytes)

    monkeypatch.setattr(LinkGrants, "note", noted)
    async with open_world(serve_policy=ServePolicy(wants=requests)) as world:
        address = (await world.start("0a", BLOCKS)).network.addresses[0]
        client = await world.internet.network("client", "7.7.7.7").dial(address)
        await client.send(open_frame(THERE, 0))
        await client.send(neighbours(THERE, 1, sender="rude 0"))

        async def read(link: Link) -> None:
            nonlocal answered
            while True:
                frame = await link.receive()
                answered += frame.type in (FrameType.DESCRIPTION, FrameType.REFUSAL)

        async def flood(number: int) -> None:
            network = world.internet.network(f"rude {number}", f"9.9.{number % groups}.9")
            while True:
                with suppress(PeerError), single_error():  # a link ends that sends more than is taken
                    link = await network.dial(address)
                    async with trio.open_nursery() as beside:
                        beside.start_soon(read, link)
                        while True:
                            for _ in range(FRAMES_PER_S // 10):
                                await link.send(KINDS[kind])
                            await trio.sleep(0.1)
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(flood, number)
            await trio.sleep(SECONDS)
            allowed = groups * (requests.burst + requests.per_s * SECONDS) + requests.shared_per_s * SECONDS
            assert answered <= allowed + groups + 2 < 16 * SECONDS * FRAMES_PER_S
            assert answered >= groups * requests.burst
            polite = await world.internet.network("polite", "8.8.8.8").dial(address)
            async with open_connection(polite) as connection:
                for _ in range(int(requests.burst) + 20):
                    began_s = trio.current_time()
                    await connection.describe(5)
                    assert trio.current_time() - began_s < 1
            nursery.cancel_scope.cancel()


@simulated
async def test_the_bytes_of_answers_about_a_view_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is the empty map: one byte. In a large swarm the answer has two megabytes."""
    part_bytes, requests = 64, ServePolicy().requests
    monkeypatch.setattr(conduct, "ANSWERED_BYTES", part_bytes)
    question = Frame(FrameType.VIEW, meta=pack(Clock(simulated_ms())), payload=b"\x80")
    async with open_world() as world:
        for name, span in (("0a", Span(0, 3)), ("1a", Span(3, 6))):
            await world.start(name, span)
        await check_coverage(world)
        rude = await world.internet.network("rude", "9.9.9.9").dial(world.nodes["0a"].network.addresses[0])
        sizes: list[int] = []
        with trio.move_on_after(SECONDS):
            while True:
                await rude.send(question)
                sizes.append((await rude.receive()).size_bytes)
    allowed = requests.burst + (requests.per_s + requests.shared_per_s) * SECONDS
    of_one = 1 + sizes[0] / part_bytes
    assert of_one > 4
    assert requests.burst / of_one - 1 < len(sizes) <= allowed / of_one + 2


@simulated
async def test_each_push_that_is_used_pays_for_a_question_before_a_push() -> None:
    """A server asks for each session of the clients that it serves."""
    few = ServePolicy(wants=TurnPolicy(burst=4, per_s=1e-6, shared_per_s=1e-6))
    async with open_world(serve_policy=few) as world:
        for name, span in (("0a", Span(0, 3)), ("1a", Span(3, 6))):
            await world.start(name, span)
        await check_coverage(world)
        async with world.client() as client:
            for _ in range(20):
                async with client.router.open_session(64, Codec.RAW) as session:
                    dialogue = Dialogue(session, random.Random(0))
                    for _ in range(3):
                        await dialogue.step(1)
        assert world.nodes["1a"].server.tally.given_directly >= 40


@simulated
async def test_a_client_whose_steps_are_computed_need_not_wait() -> None:
    """Each of its sessions computes two positions, and asks for three other things."""
    async with open_world() as world:
        await world.start("0a", BLOCKS)
        took_s = []
        async with world.client() as client:
            for _ in range(int(ServePolicy().requests.burst)):
                began_s = trio.current_time()
                async with client.router.open_session(64, Codec.RAW) as session:
                    dialogue = Dialogue(session, random.Random(0))
                    await dialogue.step(1)
                    await dialogue.step(1)
                took_s.append(trio.current_time() - began_s)
            assert max(took_s[1:]) == pytest.approx(took_s[1])


@simulated
async def test_a_request_that_waits_when_its_link_ends_is_forgotten() -> None:
    async with open_world() as world:
        node = await world.start("0a", BLOCKS)
        rude = await world.internet.network("rude", "9.9.9.9").dial(node.network.addresses[0])
        for _ in range(int(ServePolicy().requests.burst) + 50):
            await rude.send(Frame(FrameType.DESCRIBE))
        await rude.end("enough")
        await trio.sleep(1)
        polite = await world.internet.network("polite", "9.9.9.9").dial(node.network.addresses[0])
        async with open_connection(polite) as connection:
            with trio.fail_after(1):
                await connection.describe(5)
        with pytest.raises(PeerError):
            await rude.receive()


@simulated
async def test_a_frame_that_claims_a_lot_keeps_no_other_group_waiting() -> None:
    """Its length is a claim. Its turn takes a second at most."""
    requests = ServePolicy().requests
    async with open_world() as world:
        address = (await world.start("0a", BLOCKS)).network.addresses[0]
        rude = await world.internet.network("rude", "9.9.9.9").dial(address)
        for _ in range(int(requests.burst) + 10):
            await rude.send(Frame(FrameType.DESCRIBE))
        await rude.send(Frame(FrameType.REPLAY, session=SessionId(bytes(range(16))), length=2**32 - 1))
        await trio.sleep(5)  # it has had its turn
        polite = await world.internet.network("polite", "8.8.8.8").dial(address)
        async with open_connection(polite) as connection:
            for _ in range(int(requests.burst) + 20):
                began_s = trio.current_time()
                await connection.describe(5)
                assert trio.current_time() - began_s < 1.5
