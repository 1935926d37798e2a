"""Connections and links of strangers: those that hold nothing end, nobody takes all, and their memory is bounded."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamError

from llmnode.core.budget import Kind, Resource, Worth
from llmnode.core.policy import BudgetPolicy, LinkPolicy
from llmnode.errors import PeerError, PeerFull, PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.host import LINK_PROTOCOL, Libp2pNetwork, open_network
from llmnode.net.select import open_unanswered
from llmnode.swarm.peer_connection import open_connection
from llmnode.wire.frame import HEADER_BYTES, Frame, FrameType, encode
from unit.in_trio import in_trio
from unit.links import DESCRIBE, POLICY, session_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from libp2p.network.swarm import Swarm

MIB = 1 << 20


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  it watches from outside
        await trio.sleep(0.01)


@asynccontextmanager
async def listening(budget: BudgetPolicy, link: LinkPolicy = POLICY) -> AsyncIterator[Libp2pNetwork]:
    """It answers DESCRIBE over every link."""
    async with (
        open_network([LISTEN_ANY_LOOPBACK], replace(link, budget=budget)) as network,
        trio.open_nursery() as nursery,
    ):

        async def serve(task_status: trio.TaskStatus[None]) -> None:
            async with network.accept() as link:
                task_status.started()
                with suppress(PeerError):
                    while True:
                        frame = await link.receive()
                        await link.send(Frame(FrameType.DESCRIPTION, step=frame.step))

        async def serve_all() -> None:
            while True:
                await nursery.start(serve)

        nursery.start_soon(serve_all)
        yield network
        nursery.cancel_scope.cancel()


class Strangers:
    """Each has an identity of its own. They are at addresses of 127.0.0.0/8."""

    def __init__(self, stack: AsyncExitStack, server: Libp2pNetwork) -> None:
        self._stack = stack
        self._server = server
        self._info = parse_peer(server.addresses[0])

    async def connect(self, source: str) -> Libp2pNetwork:
        """Connected, and silent. Raises an error of libp2p."""
        network = await self._stack.enter_async_context(open_network([], POLICY))
        network.vouch(self._server.addresses)
        swarm = cast("Swarm", network.host.get_network())
        await swarm.dial_addr(self._info.addrs[0], self._info.peer_id, (source, 0))
        return network

    async def listen(self, address: str) -> Libp2pNetwork:
        """Others may dial it."""
        return await self._stack.enter_async_context(open_network([f"/ip4/{address}/tcp/0"], POLICY))

    async def link(self, source: str) -> Any:
        """A bare stream of our protocol, over which the server has answered."""
        network = await self.connect(source)
        stream = await open_unanswered(network.host, self._info.peer_id, LINK_PROTOCOL)
        await stream.write(encode(DESCRIBE, POLICY))
        with trio.fail_after(5):
            assert await stream.read(HEADER_BYTES)
        return stream

    async def link_at_last(self, source: str) -> Any:
        """A newcomer for which there is no memory at the moment is refused, and asks again."""
        while True:
            with suppress(BaseLibp2pError, StreamError):
                return await self.link(source)

    async def can_link(self, source: str) -> bool:
        with suppress(BaseLibp2pError, PeerError, trio.TooSlowError):
            await self.link(source)
            return True
        return False


@asynccontextmanager
async def crowd(budget: BudgetPolicy, link: LinkPolicy = POLICY) -> AsyncIterator[tuple[Libp2pNetwork, Strangers]]:
    async with listening(budget, link) as server, AsyncExitStack() as stack:
        yield server, Strangers(stack, server)


@in_trio
async def test_a_connection_that_nothing_uses_ends() -> None:
    async with crowd(BudgetPolicy(idle_s=0.3)) as (server, strangers):
        linked = await strangers.link("127.0.0.1")
        await strangers.connect("127.0.0.1")
        assert server.count_open().connections == 2
        await until(lambda: server.count_open().connections == 1)
        await trio.sleep(0.6)
        await linked.write(encode(DESCRIBE, POLICY))
        assert await linked.read(HEADER_BYTES), "a link keeps its connection"


@in_trio
async def test_in_a_crowd_an_unused_connection_ends_sooner() -> None:
    few = BudgetPolicy(connections=8, connections_per_host=4, crowded_share=0.5, crowded_idle_s=0.2)
    async with crowd(few) as (server, strangers):
        for number in range(5):
            await strangers.connect(f"127.0.0.{2 + number % 2}")
        await until(lambda: server.count_open().connections < 5)


async def repeat(frame: Frame, stream: Any) -> None:
    with suppress(BaseLibp2pError, StreamError):
        while True:
            await stream.write(encode(frame, POLICY))
            await trio.sleep(0.05)


def _few() -> BudgetPolicy:
    """With five connections it is crowded, until four are left."""
    return BudgetPolicy(connections=8, crowded_share=0.5, crowded_idle_s=0.2, idle_s=0.2, idle_link_s=0.3)


@in_trio
async def test_in_a_crowd_links_that_bring_only_heartbeats_end() -> None:
    async with trio.open_nursery() as nursery, crowd(_few()) as (server, strangers):
        await strangers.link("127.0.0.2")
        (with_session,) = server._links
        with_session.scope.open(Kind.SESSION, "a session")
        nursery.start_soon(repeat, DESCRIBE, await strangers.link("127.0.0.3"))
        asking = list(server._links)[1]
        for number in range(4):
            nursery.start_soon(repeat, Frame(FrameType.HEARTBEAT), await strangers.link(f"127.0.0.{4 + number}"))
        await until(lambda: server.count_open().links == 4)
        await trio.sleep(0.5)
        assert server.count_open().links == 4, "it is no crowd any more"
        assert not with_session.has_ended and not asking.has_ended


@in_trio
async def test_an_address_that_has_few_places_left_keeps_no_links_that_bring_only_heartbeats() -> None:
    """All circuits through one relay have one address: theirs are full while the node has places enough."""
    few = BudgetPolicy(connections_per_host=4, crowded_share=0.5, idle_s=0.2, idle_link_s=0.3)
    async with trio.open_nursery() as nursery, crowd(few) as (server, strangers):
        for _ in range(4):
            nursery.start_soon(repeat, Frame(FrameType.HEARTBEAT), await strangers.link("127.0.0.2"))
        other = await strangers.link("127.0.0.3")
        nursery.start_soon(repeat, Frame(FrameType.HEARTBEAT), other)
        await until(lambda: server.count_open().links == 3)
        for _ in range(2):
            assert await strangers.can_link("127.0.0.2")
        held = {each.name: each.held[Resource.LINKS] for each in server.budget.process.within(Kind.HOST)}
        assert held["127.0.0.3"] == 1


@in_trio
async def test_a_link_for_each_of_many_addresses_does_not_keep_a_newcomer_out() -> None:
    """No group has more than another, but what they hold is of no use."""
    patient = LinkPolicy(silence_s=60)
    async with crowd(BudgetPolicy(connections=6, idle_link_s=0.3), patient) as (server, strangers):
        for number in range(6):
            await strangers.link(f"127.0.0.{2 + number}")
        await strangers.link_at_last("127.0.0.1")
        assert server.budget.process.held[Resource.CONNECTIONS] == 6


@in_trio
@pytest.mark.parametrize("have_links", [False, True])
async def test_two_addresses_that_hold_all_connections_do_not_keep_a_newcomer_out(have_links: bool) -> None:
    few = BudgetPolicy(connections=8, connections_per_host=4)
    async with crowd(few) as (server, strangers):
        for number in range(8):
            connect = strangers.link if have_links else strangers.connect
            await connect(f"127.0.0.{2 + number % 2}")
        assert server.budget.process.held[Resource.CONNECTIONS] == few.connections
        assert await strangers.can_link("127.0.0.1")
        assert server.budget.process.held[Resource.CONNECTIONS] <= few.connections


@in_trio
async def test_many_identities_at_one_address_do_not_hold_all_links() -> None:
    few = BudgetPolicy(links=8)
    async with crowd(few) as (server, strangers):
        for _ in range(12):
            await strangers.can_link("127.0.0.2")
        assert server.count_open().links == few.links // 2
        for number in range(few.links // 2):
            assert await strangers.can_link(f"127.0.0.{3 + number}")
        assert server.budget.process.held[Resource.LINKS] == few.links
        assert await strangers.can_link("127.0.0.1"), "the group that has most of them gives way"


@in_trio
async def test_what_a_connection_held_is_given_back() -> None:
    async with crowd(BudgetPolicy(idle_s=0.1)) as (server, strangers):
        before = +server.budget.process.held
        for number in range(6):
            stream = await strangers.link(f"127.0.0.{2 + number % 3}")
            await stream.reset()
        await until(lambda: +server.budget.process.held == before)
        assert not list(server.budget.process.within(Kind.GROUP))


@in_trio
async def test_one_that_says_nothing_during_the_handshake_makes_way() -> None:
    few = BudgetPolicy(connections=4, connections_per_host=4)
    async with crowd(few) as (server, strangers):
        place = server.listening[0].split("/")
        async with AsyncExitStack() as stack:
            for number in range(8):
                source = f"127.0.0.{2 + number % 2}"
                opened = await trio.open_tcp_stream(place[2], int(place[4]), local_address=source)
                await stack.enter_async_context(opened)
            await until(lambda: server.budget.process.held[Resource.CONNECTIONS] == few.connections)
            assert await strangers.can_link("127.0.0.1")


def _part_of_a_frame(size_bytes: int) -> list[bytes]:
    """The beginning of the largest frame, in pieces."""
    whole = encode(Frame(FrameType.STEP, session_id(), length=1, payload=bytes(POLICY.max_payload_bytes)), POLICY)
    piece = POLICY.piece_bytes
    parts = [whole[at : at + piece] for at in range(0, size_bytes, piece)]
    return [encode(Frame(FrameType.PIECE, payload=part), POLICY) for part in parts]


@in_trio
async def test_unfinished_frames_hold_no_more_than_the_budget() -> None:
    """Many links of many identities, at one address and at several."""
    small = BudgetPolicy(memory_bytes=32 * MIB)
    parts = _part_of_a_frame(6 * MIB)
    most = 0
    async with crowd(small, LinkPolicy(memory_patience_s=0.2)) as (server, strangers):

        async def send(stream: Any) -> None:
            nonlocal most
            with suppress(BaseLibp2pError, StreamError):
                for part in parts:
                    await stream.write(part)
                    most = max(most, server.budget.process.held[Resource.MEMORY])
                    groups = [each.held[Resource.MEMORY] for each in server.budget.process.within(Kind.GROUP)]
                    assert max(groups, default=0) <= small.memory_bytes // 2

        for addresses in (1, 4):
            streams = [await strangers.link_at_last(f"127.0.0.{2 + number % addresses}") for number in range(8)]
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(send, stream)
            assert await strangers.can_link("127.0.0.1"), "memory is left for others"
        assert small.memory_bytes // 2 < most <= small.memory_bytes
        held = sum(link._decoder.held_bytes for link in server._links if not link.scope.is_closed)
        assert held <= server.budget.process.held[Resource.MEMORY], "no byte that is held was not reserved"


@in_trio
async def test_an_unfinished_frame_has_a_pace_to_keep() -> None:
    """Heartbeats between its pieces do not count."""
    async with crowd(BudgetPolicy(), LinkPolicy(pace_grace_s=0.3, heartbeat_s=0.1)) as (server, strangers):
        stream = await strangers.link("127.0.0.1")
        for part in _part_of_a_frame(POLICY.piece_bytes // 8):
            await stream.write(part[: HEADER_BYTES + 100])
        await until(lambda: not server._links)


@in_trio
async def test_a_frame_in_pieces_has_a_pace_to_keep() -> None:
    patient = LinkPolicy(pace_grace_s=0.3, heartbeat_s=0.1, pace_bytes_per_s=1 << 20)
    async with crowd(BudgetPolicy(), patient) as (server, strangers):
        stream = await strangers.link("127.0.0.1")
        (piece,) = _part_of_a_frame(1)
        await stream.write(piece)
        with suppress(BaseLibp2pError, StreamError):
            while True:
                await stream.write(encode(Frame(FrameType.HEARTBEAT), POLICY))
                await trio.sleep(0.05)
        await until(lambda: not server._links)


@in_trio
async def test_a_burst_buys_no_time() -> None:
    """Its average is still a multiple of the pace when the link ends."""
    patient = LinkPolicy(pace_grace_s=0.3, heartbeat_s=0.1, pace_bytes_per_s=1 << 17)
    async with crowd(BudgetPolicy(), patient) as (server, strangers):
        stream = await strangers.link("127.0.0.1")
        for part in _part_of_a_frame(4 * MIB):
            await stream.write(part)
        began_s = trio.current_time()
        with suppress(BaseLibp2pError, StreamError):
            while True:
                await stream.write(encode(Frame(FrameType.HEARTBEAT), POLICY))
                await trio.sleep(0.05)
        await until(lambda: not server._links)
        assert trio.current_time() - began_s < 4 * MIB / patient.pace_bytes_per_s / 4


@in_trio
async def test_a_frame_that_keeps_its_pace_may_take_as_long_as_it_needs() -> None:
    patient = LinkPolicy(pace_grace_s=0.2, heartbeat_s=0.1, pace_bytes_per_s=POLICY.piece_bytes)
    async with crowd(BudgetPolicy(), patient) as (server, strangers):
        stream = await strangers.link("127.0.0.1")
        for part in _part_of_a_frame(8 * POLICY.piece_bytes):
            await stream.write(part)
            await trio.sleep(0.1)
        assert len(server._links) == 1


@in_trio
async def test_a_reader_that_stops_is_left_and_holds_no_more_than_its_share() -> None:
    small = BudgetPolicy(memory_bytes=32 * MIB)
    async with crowd(small, LinkPolicy(pace_grace_s=0.5, heartbeat_s=0.1, silence_s=1.5)) as (server, strangers):
        await strangers.link("127.0.0.2")
        (link,) = server._links
        result = Frame(FrameType.RESULT, session_id(), length=1, payload=bytes(2 * MIB))
        with suppress(PeerUnreachable):
            while True:
                await link.send(result)
                held = server.budget.process.held[Resource.MEMORY]
                assert link._outbox.size_bytes <= held <= small.memory_bytes // 4
        await link.wait_closed()


@in_trio
async def test_peers_that_we_have_dialled_do_not_keep_all_memory() -> None:
    """A stranger has only to be named to a server that looks around, and is dialled."""
    parts = _part_of_a_frame(4 * MIB)

    async def hold(stream: Any) -> None:
        for part in parts:
            await stream.write(part)
        await trio.sleep_forever()

    async with crowd(BudgetPolicy(memory_bytes=32 * MIB)) as (server, strangers):
        for address in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
            hostile = await strangers.listen(address)
            hostile.host.set_stream_handler(LINK_PROTOCOL, hold)
            await server.dial(hostile.addresses[0])
        dialled, process = list(server._links), server.budget.process
        await until(lambda: sum(link._decoder.held_bytes for link in dialled) > 11 * MIB)
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY])
        assert await strangers.can_link("127.0.0.1")
        assert sum(link.scope.is_closed for link in dialled) == 1, "one of the group that holds most"


@in_trio
async def test_a_client_s_servers_at_one_address_wait_for_each_other_s_memory() -> None:
    """Before, the one that held less ended the other's link, with all that went over it."""
    frame = Frame(FrameType.RESULT, session_id(), length=1, payload=bytes(2 * MIB))
    async with (
        open_network([], LinkPolicy(memory_patience_s=30)) as client,
        listening(BudgetPolicy()) as one,
        listening(BudgetPolicy()) as other,
        trio.open_nursery() as nursery,
    ):
        busy, asking = [await client.dial(each.addresses[0]) for each in (one, other)]
        passes = busy.scope.open(Kind.SESSION, "passes that are on their way")
        assert passes.reserve(Resource.MEMORY, 64 * MIB) is None
        group = asking.scope.of_kind(Kind.GROUP)
        assert group is not None
        group.set_limit(Resource.MEMORY, group.held[Resource.MEMORY] + MIB)
        nursery.start_soon(asking.send, frame)
        await trio.testing.wait_all_tasks_blocked()
        assert not busy.scope.is_closed and not asking.has_ended
        passes.close()
        for link in (asking, busy):
            await link.send(DESCRIBE)
            assert (await link.receive()).type is FrameType.DESCRIPTION


@in_trio
async def test_a_peer_whose_connection_makes_way_for_another_s_hears_that() -> None:
    async with crowd(BudgetPolicy()) as (server, _), open_network([], POLICY) as client:
        async with open_connection(await client.dial(server.addresses[0])) as connection:
            await connection.ask_peer(FrameType.DESCRIBE, FrameType.DESCRIPTION, 5)
            (theirs,) = server.budget.process.within(Kind.CONNECTION)
            theirs.evict()
            with trio.fail_after(5):
                await connection.wait_ended()
            assert isinstance(connection.error, PeerFull)
        async with open_connection(await client.dial(server.addresses[0])) as connection:
            await connection.ask_peer(FrameType.DESCRIBE, FrameType.DESCRIPTION, 5)
            (own,) = client.budget.process.within(Kind.CONNECTION)
            own.evict()
            await connection.wait_ended()
            assert not isinstance(connection.error, PeerFull), "the server is not full"


@in_trio
async def test_a_peer_for_whose_frames_no_memory_is_left_hears_that() -> None:
    async with (
        crowd(BudgetPolicy(), LinkPolicy(memory_patience_s=0.2)) as (server, _),
        open_network([], POLICY) as client,
        open_connection(await client.dial(server.addresses[0])) as connection,
    ):
        await connection.ask_peer(FrameType.DESCRIBE, FrameType.DESCRIPTION, 5)
        process = server.budget.process
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY])
        await connection.tell(Frame(FrameType.STEP, session_id(), length=1, payload=bytes(2 * MIB)))
        with trio.fail_after(5):
            await connection.wait_ended()
        assert isinstance(connection.error, PeerFull)


@in_trio
async def test_connections_that_we_have_opened_are_ours() -> None:
    async with crowd(BudgetPolicy()) as (server, _), open_network([], POLICY) as client:
        await client.dial(server.addresses[0])
        (own,) = client.budget.process.within(Kind.CONNECTION)
        assert own.worth is Worth.OURS
        await until(lambda: server.count_open().links == 1)
        (theirs,) = server.budget.process.within(Kind.CONNECTION)
        assert theirs.worth is Worth.LINK
