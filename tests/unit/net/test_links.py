"""Links and connections to a server over real libp2p hosts in one process, cancelled anywhere, and to their end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p import new_host
from multiaddr import Multiaddr

from llmnode.core.policy import ServePolicy
from llmnode.errors import PeerUnreachable, SessionClosed, SessionLost
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import LINK_PROTOCOL, open_network
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.testing import exact_output
from llmnode.wire.frame import FrameType, encode
from llmnode.wire.messages import RefusalCode
from unit.in_trio import DEADLINE_S, in_trio
from unit.links import (
    ALL_BLOCKS,
    DESCRIBE,
    IMPATIENT,
    POLICY,
    ROW,
    answer_to,
    answer_to_ones,
    connected,
    frames_until,
    open_frame,
    opened,
    raw_streams,
    read_to_end,
    refusal_to,
    served,
    session_id,
    step_frame,
)

# Working links


@in_trio
async def test_a_link_knows_the_address_group_of_its_peer_whatever_its_identity(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as one, open_network([], POLICY) as other:
        links = [await one.dial(swarm.address), await other.dial(swarm.address)]
        assert [link.group for link in links] == ["127.0.0.1"] * 2
        await links[0].end("done")
        assert links[0].group == "127.0.0.1", "it is asked for while news of the link is read"


@in_trio
async def test_a_session_answers_exactly_and_frees_its_kv(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection:
            assert connection.peer == swarm.network.peer
            description = await connection.describe(5.0)
            assert (description.span_start, description.span_end, description.kv_tokens_free) == (0, 4, 64)
            async with opened(connection) as session:
                first = await session.step(bytes([1] * 2 * ROW))
                second = await session.step(bytes([1] * ROW))
                await session.truncate(1)
                again = await session.step(bytes([2] * ROW))
        assert bytes(first) + bytes(second) == answer_to_ones(3)
        assert bytes(again) == exact_output(bytes([1] * ROW + [2] * ROW), ALL_BLOCKS)[ROW:]
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_sessions_share_a_connection_without_mixing_answers(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection, trio.open_nursery() as nursery:

            async def use(byte: int) -> None:
                async with opened(connection, max_length=8) as session:
                    outputs = [bytes(await session.step(bytes([byte] * ROW))) for _ in range(8)]
                    assert b"".join(outputs) == exact_output(bytes([byte] * ROW * 8), ALL_BLOCKS)

            for byte in range(1, 9):
                nursery.start_soon(use, byte)
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_peer_can_be_dialled_again_the_moment_its_link_ended(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        for _ in range(5):
            link = await network.dial(swarm.address)
            assert (await answer_to(link, DESCRIBE)).type is FrameType.DESCRIPTION
            await link.end("dialled again")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_links_over_one_connection_end_one_by_one(exact_worker: Any) -> None:
    async with (
        served(exact_worker) as swarm,
        open_network([], POLICY) as network,
        connected(network, swarm.address) as first,
        opened(first) as session,
    ):
        for _ in range(3):
            async with connected(network, swarm.address) as second:
                await second.describe(DEADLINE_S)
        assert bytes(await session.step(bytes([1] * ROW))) == answer_to_ones(1)
        assert len(network.host.get_live_peers()) == 1


# Cancellation


@in_trio
async def test_a_peer_that_was_away_can_be_dialled_as_soon_as_it_is_back(tmp_path: Path) -> None:
    identity = tmp_path / "node.key"
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY, identity) as server:
        address = server.addresses[0]
    async with open_network([], POLICY) as client:
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                await client.dial(address)
        async with open_network([address.partition("/p2p/")[0]], POLICY, identity):
            link = await client.dial(address)
            await link.end("done")


@in_trio
async def test_cancelled_questions_never_harm_the_link(exact_worker: Any) -> None:
    chance = random.Random(0)  # seeded: the same moments in every run, as far as the machine allows
    async with (
        served(exact_worker) as swarm,
        open_network([], POLICY) as network,
        connected(network, swarm.address) as connection,
        opened(connection) as session,
    ):
        for _ in range(300):
            with trio.move_on_after(chance.uniform(0.0, 0.003)):
                await connection.describe(5.0)
        assert bytes(await session.step(bytes([1] * ROW))) == answer_to_ones(1)


@in_trio
async def test_cancelled_receives_lose_no_frame(exact_worker: Any) -> None:
    chance = random.Random(1)
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        for _ in range(200):
            await link.send(DESCRIBE)
            answer = None
            while answer is None:
                with trio.move_on_after(chance.uniform(0.0, 0.002)):
                    answer = await link.receive()
            assert answer.type is FrameType.DESCRIPTION


@in_trio
async def test_a_cancelled_step_ends_its_session_instead_of_answering_the_next_one(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection, opened(connection) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.step, bytes([1] * ROW))
                await exact_worker.executor.forward_began.wait()
                nursery.cancel_scope.cancel()
            exact_worker.gate.set()
            with pytest.raises(SessionClosed, match="cancelled"):
                await session.step(bytes([7] * ROW))
            with pytest.raises(SessionClosed, match="cancelled"):
                await session.truncate(0)
            async with opened(connection) as other:  # the connection is as good as before
                assert bytes(await other.step(bytes([1] * ROW))) == answer_to_ones(1)
        await swarm.check_serves_and_is_empty()


# The end of a link


@in_trio
async def test_the_end_of_a_link_fails_every_waiter_with_a_typed_error(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    errors: list[Exception] = []

    async def use(connection: PeerConnection) -> None:
        with pytest.raises(SessionLost) as caught:
            async with opened(connection, max_length=8) as session:
                await session.step(bytes(ROW))
        errors.append(caught.value)

    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(use, connection)
                await exact_worker.executor.forward_began.wait()
                for link in list(swarm.network._links):
                    await link.end("the test says so")
            assert len(errors) == 3
            with pytest.raises(PeerUnreachable):
                await connection.describe(5.0)
        exact_worker.gate.set()
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_questions_to_a_closed_connection_fail_at_once(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection:
            pass
        with pytest.raises(PeerUnreachable):
            await connection.describe(5.0)


@pytest.mark.parametrize("computing", [False, True])
@in_trio
async def test_a_vanished_client_leaves_no_session_and_no_kv(exact_worker: Any, computing: bool) -> None:
    async with served(exact_worker) as swarm:
        async with open_network([], POLICY) as network:
            link = await network.dial(swarm.address)
            for _ in range(3):
                session = session_id()
                assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
            assert exact_worker.kv_tokens_free == 64 - 3 * 16
            if computing:
                exact_worker.gate = trio.Event()
                await link.send(step_frame(session, 0, 0))
                await exact_worker.executor.forward_began.wait()
        if computing:
            exact_worker.gate.set()
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_silent_peer_is_noticed_and_its_sessions_freed(exact_worker: Any) -> None:
    async with served(exact_worker, link=IMPATIENT) as swarm, raw_streams(swarm.address) as new_stream:
        stream = await new_stream()
        await stream.write(encode(open_frame(session_id()), POLICY))
        await frames_until(stream, FrameType.OPENED)
        began = trio.current_time()
        await read_to_end(stream)  # from here on we say nothing, though we read its heartbeats
        assert trio.current_time() - began < 20 * IMPATIENT.silence_s
        await exact_worker.until_empty()


@in_trio
async def test_an_idle_link_lives_by_its_heartbeats(exact_worker: Any) -> None:
    async with served(exact_worker, link=IMPATIENT) as swarm, open_network([], IMPATIENT) as network:
        link = await network.dial(swarm.address)
        with trio.move_on_after(4 * IMPATIENT.silence_s) as patience:
            await link.receive()  # nothing comes, and the link does not end either
        assert patience.cancelled_caught
        assert (await answer_to(link, DESCRIBE)).type is FrameType.DESCRIPTION


def test_who_stood_still_blames_no_peer_for_silence(exact_worker: Any) -> None:
    """This is like a machine that was suspended: for everybody here it is suddenly later."""
    clock = trio.testing.MockClock(rate=1.0)

    async def main() -> None:
        async with served(exact_worker, link=IMPATIENT) as swarm, open_network([], IMPATIENT) as network:
            link = await network.dial(swarm.address)
            clock.jump(2 * IMPATIENT.silence_s)
            assert (await answer_to(link, DESCRIBE)).type is FrameType.DESCRIPTION

    trio.run(main, clock=clock)


@in_trio
async def test_a_forgotten_session_frees_its_kv_and_its_link_lives(exact_worker: Any) -> None:
    impatient = ServePolicy(session_idle_s=0.1)
    async with served(exact_worker, serve=impatient) as swarm, open_network([], POLICY) as network:
        link, session = await network.dial(swarm.address), session_id()
        assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
        exact_worker.forward_s = 2 * impatient.session_idle_s
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT, "nobody idles meanwhile"
        await exact_worker.until_empty()
        assert (await refusal_to(link, step_frame(session, 1, 1))).code == RefusalCode.UNKNOWN_SESSION


@in_trio
async def test_a_silent_server_is_noticed() -> None:
    async def ignore(stream: Any) -> None:
        await read_to_end(stream)

    mute = new_host()
    async with mute.run(listen_addrs=[Multiaddr(LISTEN_ANY_LOOPBACK)]), open_network([], IMPATIENT) as network:
        mute.set_stream_handler(LINK_PROTOCOL, ignore)
        link = await network.dial(str(mute.get_addrs()[0]))
        with pytest.raises(PeerUnreachable, match="silent"):
            await link.receive()
