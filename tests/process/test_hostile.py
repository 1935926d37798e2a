"""A live server whose clients hold what they do not use, or ask for what they cannot get: others are served."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
from multiaddr import Multiaddr

from llmnode.core.ids import SESSION_ID_BYTES, Epoch, SessionId
from llmnode.core.policy import AdmissionPolicy, BudgetPolicy, LinkPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, SessionLost
from llmnode.net.host import open_network
from llmnode.node.serve.admission import MOVED
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, OpenRequest, Refusal, RefusalCode, pack, unpack
from llmnode.wire.payload import Codec
from process.attacked import (
    ANSWER_S,
    CONTEXT,
    KV_TOKENS,
    NEW_TOKENS,
    PROMPTS,
    Served,
    describe,
    kv_is_free,
    serve_alone,
    until,
)
from process.small_server import SmallClient, connected, expected_tokens
from reference.small import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from llmnode.ports import Link

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

NEWCOMER_S = 10.0
IDLE_CONNECTIONS = 1000
IDLE_GROWTH_MIB = 32.0
HOG_SESSIONS = 4
HOGGED_S = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_alone(tmp_path_factory) as served:
        yield served


# Slow peers


@contextmanager
def files_allowed(count: int) -> Iterator[None]:
    """Sets the limit of this process, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count), hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_idle_connections_do_not_keep_a_newcomer_out(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    """They come from few addresses, and say nothing, not even their peer id."""
    address = Multiaddr(served.address)
    place = (address.value_for_protocol("ip4"), int(address.value_for_protocol("tcp")))
    limits = BudgetPolicy()
    hosts = limits.connections // limits.connections_per_host - 1  # with one more all slots would be taken

    async def check() -> None:
        await until(lambda: kv_is_free(served.address), "all KV is free")
        before = served.server.footprint()
        with ExitStack() as stack:
            stack.enter_context(files_allowed(IDLE_CONNECTIONS + 200))
            for number in range(IDLE_CONNECTIONS):
                source = (f"127.0.1.{1 + number % hosts}", 0)
                stack.enter_context(socket.create_connection(place, timeout=ANSWER_S, source_address=source))

            async def holds_what_it_may() -> bool:
                return served.server.footprint().files >= before.files + hosts * limits.half_open_per_host

            await until(holds_what_it_may, "as many as one address may have half-open are accepted from each")
            with trio.fail_after(NEWCOMER_S):
                await served.check_serves_exactly()
            now = served.server.footprint()
            assert now.files < before.files + limits.connections
            growth_mib = now.memory_mib - before.memory_mib
            record_property("growth_mib", growth_mib)
            print(f"the server grew by {growth_mib:.1f} MiB")
            assert growth_mib < IDLE_GROWTH_MIB

        async def is_back() -> bool:
            return served.server.footprint().files <= before.files

        await until(is_back, "the server let go of connections that ended")

    trio.run(check)


# KV that is held and not used


def test_an_honest_client_gets_its_tokens_while_another_one_holds_all_kv(served: Served) -> None:
    """It is told when to come again, and then it is let in. Those whose KV it got are told so."""
    positions = KV_TOKENS // HOG_SESSIONS

    async def hog(link: Link, target: Description, *, task_status: trio.TaskStatus[None]) -> None:
        span = target.span_start, target.span_end
        request = OpenRequest(
            target.model_digest, *span, positions, target.dtype, Codec.RAW, "interactive", keep_outputs=True
        )
        names = [SessionId(bytes([number + 1]) * SESSION_ID_BYTES) for number in range(HOG_SESSIONS)]
        for name in names:
            await link.send(Frame(FrameType.OPEN, name, meta=pack(request)))
            assert (await link.receive()).type is FrameType.OPENED
        task_status.started()
        refused = await link.receive()
        assert refused.type is FrameType.REFUSAL and refused.session in names
        refusal = unpack(Refusal, refused.meta)
        assert refusal.code == RefusalCode.UNKNOWN_SESSION and refusal.message == MOVED

    async def check() -> None:
        await until(lambda: kv_is_free(served.address), "all KV is free")
        async with connected([served.address], served.folder) as client, open_network([], LinkPolicy()) as network:
            link = await network.dial(served.address)
            began_s = trio.current_time()
            with trio.fail_after(HOGGED_S):
                async with trio.open_nursery() as nursery:
                    await nursery.start(hog, link, await describe(served.address))
                    assert (await describe(served.address)).kv_tokens_free == 0
                    chosen, waits_s = None, list[float]()
                    while chosen is None:
                        try:
                            chosen = await client.generate(PROMPTS[:1], NEW_TOKENS)
                        except* PeerRefused as group:
                            (refusal,) = group.exceptions
                            assert isinstance(refusal, PeerRefused) and refusal.code == RefusalCode.NO_ROOM
                            assert refusal.retry_after_s is not None
                            waits_s.append(refusal.retry_after_s)
                            await trio.sleep(refusal.retry_after_s)
            assert chosen == [expected_tokens(served.model, PROMPTS[0], NEW_TOKENS)]
            assert len(waits_s) <= 2, "it came when it was told to"
            assert sum(waits_s) < AdmissionPolicy().idle_s
            print(f"let in after {trio.current_time() - began_s:.1f} s, told to wait for {waits_s}")
            assert await client.generate([PROMPTS[1]], NEW_TOKENS), "there is still space for it"
            await link.end("done")
        await until(lambda: kv_is_free(served.address), "all KV is free")

    trio.run(check)


# Refusals, seen by an honest client


async def opens(client: SmallClient) -> None:
    async with client.session(8):
        raise AssertionError("it opened")


async def asks_for_more_than_the_server_has(client: SmallClient) -> None:
    async with client.session(KV_TOKENS + 1):
        raise AssertionError("it opened")


async def asks_for_more_than_is_left(client: SmallClient) -> None:
    async with client.session(KV_TOKENS // 2), client.session(KV_TOKENS // 2), client.session(1):
        raise AssertionError("all opened")


async def asks_for_more_than_the_model_can(client: SmallClient) -> None:
    async with client.session(CONTEXT + 1):
        raise AssertionError("it opened")


async def has_another_model(client: SmallClient) -> None:
    await opens(replace(client, model=replace(client.model, digest=bytes(32))))


async def asks_for_blocks_that_are_not_held(client: SmallClient) -> None:
    await opens(replace(client, route=(Hop(client.route[0].peer, Span(1, BLOCKS + 1)),)))


async def goes_on_at_a_wrong_position(client: SmallClient) -> None:
    async with client.session(8) as session:
        await session.step(bytes(client.model.row_bytes))
        session._hops.state.position += 1
        await session.step(bytes(client.model.row_bytes))


async def cuts_back_under_an_epoch_that_is_not_new(client: SmallClient) -> None:
    async with client.session(8) as session:
        await session.step(bytes(client.model.row_bytes))
        session._hops.state.epoch = Epoch(-1)  # the next one is the session's first again
        await session.truncate(0)


REFUSED = [
    (asks_for_more_than_the_server_has, RefusalCode.NO_ROOM),
    (asks_for_more_than_is_left, RefusalCode.NO_ROOM),
    (asks_for_more_than_the_model_can, RefusalCode.NO_ROOM),
    (has_another_model, RefusalCode.WRONG_MODEL),
    (asks_for_blocks_that_are_not_held, RefusalCode.SPAN_NOT_HELD),
    (goes_on_at_a_wrong_position, RefusalCode.WRONG_POSITION),
    (cuts_back_under_an_epoch_that_is_not_new, RefusalCode.STALE_EPOCH),
]


@pytest.mark.parametrize(("client_that", "code"), REFUSED, ids=[each.__name__ for each, _ in REFUSED])
def test_a_client_is_told_why_it_is_refused(
    served: Served, client_that: Callable[[SmallClient], Awaitable[None]], code: RefusalCode
) -> None:
    async def check() -> None:
        await until(lambda: kv_is_free(served.address), "all KV is free")
        async with connected([served.address], served.folder) as client:
            refused: PeerError | None = None
            try:
                await client_that(client)
            except SessionLost as error:
                (refused,) = error.causes
            except PeerRefused as error:
                refused = error
            assert isinstance(refused, PeerRefused)
            assert (refused.code, refused.peer) == (code, client.route[0].peer)
            assert await client.generate([[1, 2, 3]], 2), "the link lives on"

    trio.run(check)
