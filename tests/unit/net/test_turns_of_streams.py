"""Streams are handled in turns of address groups, whatever their protocol; pings of libp2p too."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.ping import PING_LENGTH
from libp2p.identity.identify.identify import ID as IDENTIFY

from llmnode.core.budget import Kind, Resource
from llmnode.core.policy import BudgetPolicy, TurnPolicy
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.connections import open_stream
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.pings import PING
from unit.in_trio import in_trio
from unit.links import POLICY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm

    from llmnode.net.yamux import YamuxConnection

NEVER = 1e-6
FEW = BudgetPolicy(
    stream_turns=TurnPolicy(burst=6, per_s=NEVER, shared_per_s=NEVER),
    stream_patience_s=0.1,
    refused_streams_burst=3,
    refused_streams_per_s=NEVER,
)
PATIENT = replace(FEW, stream_patience_s=1000)
MOST = 6 + 1
"""Beyond the burst, one more has the first turn of all groups."""


@asynccontextmanager
async def connected(budget: BudgetPolicy = FEW) -> AsyncIterator[Any]:
    """A host, and what connects to it from an address."""
    async with (
        open_network([LISTEN_ANY_LOOPBACK], replace(POLICY, budget=budget)) as server,
        AsyncExitStack() as stack,
    ):

        async def connect(source: str, network: Libp2pNetwork | None = None) -> SwarmConn:
            network = network or await stack.enter_async_context(open_network([], POLICY))
            network.vouch(server.addresses)
            info = parse_peer(server.addresses[0])
            swarm = cast("Swarm", network.host.get_network())
            await swarm.dial_addr(info.addrs[0], info.peer_id, (source, 0))
            return swarm.get_connections(info.peer_id)[0]

        yield server, connect


async def is_identified(connection: SwarmConn) -> bool:
    try:
        stream = await open_stream(connection, IDENTIFY, 5)
        return bool(await stream.read(1))
    except BaseLibp2pError:
        return False


async def is_reset_at_once(connection: SwarmConn) -> bool:
    """One that asks for no protocol."""
    try:
        stream = await connection.new_stream()
        await stream.reset()
    except BaseLibp2pError:
        return False
    return True


async def is_answered(stream: NetStream) -> bool:
    """One more ping."""
    got = b""
    try:
        await stream.write(bytes(PING_LENGTH))
        while len(got) < PING_LENGTH:
            got += await stream.read(PING_LENGTH - len(got))
    except BaseLibp2pError:
        return False
    return True


@in_trio
@pytest.mark.parametrize("cycle", [is_identified, is_reset_at_once])
async def test_streams_without_end_are_not_handled_and_cost_the_connection(cycle: Any) -> None:
    async with connected() as (server, connect):
        rude = await connect("127.0.0.2")
        handled = 0
        while await cycle(rude) and handled < 1000:
            handled += 1
        while not rude.is_closed:
            await cycle(rude)
            await trio.sleep(0.01)
        assert not [each for each in cast("Swarm", server.host.get_network()).get_connections() if not each.is_closed]
        if cycle is is_identified:
            assert 0 < handled <= MOST
        assert await is_identified(await connect("127.0.0.3")), "other address groups have turns of their own"


@in_trio
async def test_streams_that_are_reset_while_they_wait_cost_the_connection_at_once_also_one_that_is_used() -> None:
    async with connected(PATIENT) as (server, connect):
        rude = await connect("127.0.0.2")
        (theirs,) = cast("Any", server.host.get_network()).get_connections()
        theirs.muxed_conn.scope.open(Kind.SESSION, "its session")
        opened = 0
        while not rude.is_closed:
            opened += await is_reset_at_once(rude)
            await trio.sleep(0.01)
        assert opened < 100


@in_trio
async def test_streams_that_are_reset_before_they_are_accepted_cost_the_connection() -> None:
    async with connected(PATIENT) as (server, connect):
        rude = await connect("127.0.0.2")
        muxed = cast("YamuxConnection", rude.muxed_conn)
        for _ in range(FEW.refused_streams_burst + 1):
            muxed.machine.reset_stream(cast("int", muxed.machine.open_stream()))
        muxed.sender.flush()
        await until(lambda: muxed.has_ended)
        assert await is_identified(await connect("127.0.0.3")), "other peers go on"
        assert not server.budget.process.held[Resource.STREAMS] > MOST


@in_trio
async def test_streams_that_are_reset_while_they_wait_leave_nothing_behind() -> None:
    async with connected(replace(PATIENT, refused_streams_burst=1000)) as (server, connect):
        rude = await connect("127.0.0.2")
        while server.budget.process.held[Resource.STREAMS] <= MOST:
            await (await rude.new_stream()).write(b"x")  # the first ones have their turn, and wait for a protocol
            await trio.sleep(0.01)
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(10):
            streams = [await rude.new_stream() for _ in range(10)]
            for stream in streams:
                await stream.write(b"x")
            await until(lambda: server.budget.process.held[Resource.STREAMS] > MOST + 1 + 9)
            for stream in streams:
                await stream.reset()
            await until(lambda: server.budget.process.held[Resource.STREAMS] == MOST + 1)
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not is_so():  # noqa: ASYNC110  there is no event for it
            await trio.sleep(0.01)


@in_trio
async def test_identities_of_one_address_share_its_turns() -> None:
    async with connected() as (_, connect):
        handled = [await is_identified(await connect("127.0.0.2")) for _ in range(2 * MOST)]
        assert 0 < sum(handled) <= MOST
        assert not handled[-1]
        assert await is_identified(await connect("127.0.0.3"))


@in_trio
async def test_streams_of_peers_that_we_have_connected_to_have_turns_of_their_own() -> None:
    """A relay opens streams to us, and all peers behind it are at its address."""
    async with open_network(["/ip4/127.0.0.2/tcp/0"], POLICY) as relay, connected() as (server, connect):
        await server.dial(relay.addresses[0])
        while await is_identified(await connect("127.0.0.2")):
            pass
        (ours,) = cast("Swarm", relay.host.get_network()).get_connections()
        assert await is_identified(ours)


@in_trio
async def test_pings_have_turns() -> None:
    few = replace(FEW, pings_per_stream=4, free_pings_burst=2, free_pings_per_s=NEVER)
    async with connected(few) as (_, connect):
        rude, answered = await connect("127.0.0.2"), 0
        stream = await open_stream(rude, PING, 5)
        while await is_answered(stream) and answered < 1000:
            answered += 1
        assert 4 < answered <= 2 + 4 * MOST
        assert await is_identified(await connect("127.0.0.3"))


@in_trio
async def test_a_slow_ping_needs_no_turn() -> None:
    """Neighbours behind a NAT have taken all of them. Its other side would give the connection up."""
    async with connected() as (_, connect):
        stream = await open_stream(await connect("127.0.0.2"), PING, 5)
        while await is_identified(await connect("127.0.0.2")):
            pass
        assert await is_answered(stream)


@in_trio
async def test_waiting_behind_one_s_own_nat_costs_no_connection_that_is_used() -> None:
    async with connected() as (server, connect):
        polite = await connect("127.0.0.2")
        (theirs,) = cast("Any", server.host.get_network()).get_connections()
        session = theirs.muxed_conn.scope.open(Kind.SESSION, "its session")
        while await is_identified(await connect("127.0.0.2")):
            pass
        for _ in range(3 * FEW.refused_streams_burst):
            assert not await is_identified(polite)
        assert not polite.is_closed and not theirs.is_closed
        session.close()
        while not polite.is_closed:
            await is_identified(polite)
            await trio.sleep(0.01)


@in_trio
async def test_streams_beyond_the_limits_cost_also_a_connection_that_is_used() -> None:
    async with connected(replace(FEW, streams_per_peer=4)) as (server, connect):
        rude = await connect("127.0.0.2")
        (theirs,) = cast("Any", server.host.get_network()).get_connections()
        theirs.muxed_conn.scope.open(Kind.SESSION, "its session")
        while not rude.is_closed:
            with suppress(BaseLibp2pError):
                await rude.new_stream()
            await trio.sleep(0.01)


@in_trio
async def test_a_ping_is_answered_with_its_bytes_and_a_stream_may_end() -> None:
    async with connected(BudgetPolicy()) as (_, connect):
        stream = await open_stream(await connect("127.0.0.2"), PING, 5)
        for number in range(20):
            sent = bytes([number]) * PING_LENGTH
            await stream.write(sent[:5])
            await stream.write(sent[5:])
            assert await stream.read(PING_LENGTH) == sent
        await stream.close_write()
        with pytest.raises(BaseLibp2pError):
            await stream.read(1)
