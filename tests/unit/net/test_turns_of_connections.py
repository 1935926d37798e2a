"""Connections that begin take turns: those of an address beyond its rate are closed unread; silent ones take none."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import BudgetPolicy, TurnPolicy
from llmnode.errors import PeerError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, host_and_port, parse_peer
from llmnode.net.admission import ConnectionAdmission
from llmnode.net.host import Libp2pNetwork, open_network
from unit.in_trio import in_trio
from unit.links import POLICY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FEW = BudgetPolicy(accepted_burst=3, accepted_per_s=1e-6)
ONE = TurnPolicy(burst=1, per_s=1e-6, shared_per_s=1e-6)


@asynccontextmanager
async def listening(budget: BudgetPolicy) -> AsyncIterator[Libp2pNetwork]:
    async with open_network([LISTEN_ANY_LOOPBACK], replace(POLICY, budget=budget)) as network:
        yield network


async def silent(stack: AsyncExitStack, server: Libp2pNetwork, source: str) -> trio.SocketStream:
    place = host_and_port(parse_peer(server.addresses[0]).addrs[0])
    assert place is not None
    sock = trio.socket.socket()
    await sock.bind((source, 0))
    await sock.connect(place)
    return await stack.enter_async_context(trio.SocketStream(sock))


async def is_closed(stream: trio.SocketStream) -> bool:
    try:
        return not await stream.receive_some(1)
    except trio.BrokenResourceError:
        return True


async def is_open(stream: trio.SocketStream) -> bool:
    with trio.move_on_after(0.1):
        return not await is_closed(stream)
    return True


async def linked(stack: AsyncExitStack, server: Libp2pNetwork) -> None:
    """Raises PeerError, or TooSlowError after two seconds. The dial comes from 127.0.0.1."""
    network = await stack.enter_async_context(open_network([], POLICY))
    with trio.fail_after(2):
        link = await network.dial(server.addresses[0])
        await link.wait_version()


@in_trio
async def test_connections_beyond_the_rate_of_an_address_are_closed_and_another_address_comes_in() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(FEW))
        first = await silent(stack, server, "127.0.0.2")  # trio's own accept takes it: it waited before ours began
        taken = [await silent(stack, server, "127.0.0.2") for _ in range(3)]
        for _ in range(5):
            assert await is_closed(await silent(stack, server, "127.0.0.2"))
        for each in (first, *taken):
            assert await is_open(each)
        assert await is_open(await silent(stack, server, "127.0.0.3"))


@in_trio
async def test_the_addresses_of_one_group_have_a_rate_together_and_another_group_comes_in() -> None:
    admission, policy = ConnectionAdmission(POLICY), BudgetPolicy()
    accepted = sum(admission.accepts(f"8.8.8.{number % 256}") for number in range(256 * policy.accepted_burst))
    assert accepted <= policy.group_accepted_burst + 1
    assert accepted >= policy.group_share * policy.connections
    assert admission.accepts("9.9.9.9")


@in_trio
async def test_the_oldest_of_too_many_half_open_connections_of_an_address_makes_way() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(BudgetPolicy(half_open_per_host=2)))
        first, *others = [await silent(stack, server, "127.0.0.2") for _ in range(3)]
        assert await is_closed(first)
        for each in (*others, await silent(stack, server, "127.0.0.3")):
            assert await is_open(each)


@in_trio
async def test_silent_connections_take_no_turn_of_those_that_speak() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(BudgetPolicy(handshakes=ONE)))
        for _ in range(5):
            await silent(stack, server, "127.0.0.1")
        await linked(stack, server)


@in_trio
async def test_handshakes_of_an_address_beyond_its_turns_wait_and_those_of_another_do_not() -> None:
    async with AsyncExitStack() as stack:
        budget = BudgetPolicy(handshakes=replace(ONE, shared_per_s=2))
        server = await stack.enter_async_context(listening(budget))
        crowd = [await silent(stack, server, "127.0.0.2") for _ in range(5)]
        for each in crowd:
            await each.send_all(b"\x13/multistream/1.0.0\n")
        answered = 0
        with trio.move_on_after(0.3):
            for each in crowd:
                assert await each.receive_some(1)
                answered += 1
        assert 1 <= answered <= 3
        await linked(stack, server)


@in_trio
async def test_a_connection_that_says_nothing_is_given_up() -> None:
    async with AsyncExitStack() as stack:
        policy = replace(POLICY, dial_timeout_s=0.2)
        server = await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], policy))
        assert await is_closed(await silent(stack, server, "127.0.0.2"))


@in_trio
async def test_without_a_turn_in_time_a_peer_is_refused() -> None:
    async with AsyncExitStack() as stack:
        budget = BudgetPolicy(handshakes=ONE)
        policy = replace(POLICY, budget=budget, dial_timeout_s=0.3)
        server = await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], policy))
        for _ in range(3):  # its burst, and two turns that were free until now
            await linked(stack, server)
        with pytest.raises(PeerError):
            await linked(stack, server)
