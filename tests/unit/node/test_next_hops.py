"""Next hops that a server is asked to push to: what they announce of themselves may be anything."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.policy import BudgetPolicy, DialPolicy, LinkPolicy, ServePolicy
from llmnode.errors import ConfigError, PeerError, PeerRefused
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.dialling import SHARE_OF_STRANGERS
from llmnode.net.host import open_network
from llmnode.node.serve.next_hops import NextHops
from llmnode.swarm.pool import open_pool
from llmnode.testing import open_internet, peer_named, simulated
from llmnode.testing.network import MemoryInternet, MemoryNetwork
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, RefusalCode, pack
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool

DESCRIPTION = Description(
    **dict.fromkeys(Description.__dataclass_fields__, 1)
    | {"software": "llmnode/1", "model": "m", "model_digest": bytes(32), "dtype": "float32", "span_start": 0}
    | {"adapter": None, "extensions": None, "required": None}
)
LIAR = PeerId("12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo")


@asynccontextmanager
async def a_closed_port() -> AsyncIterator[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}/p2p/{LIAR}"
    yield [address]


@asynccontextmanager
async def an_open_port_that_says_nothing() -> AsyncIterator[list[str]]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield [f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{LIAR}"]


@asynccontextmanager
async def a_peer_that_takes_no_links() -> AsyncIterator[list[str]]:
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as mute:
        yield [each.replace(mute.peer, LIAR) for each in mute.addresses]


@asynccontextmanager
async def garbage() -> AsyncIterator[list[str]]:
    yield [f"garbage/p2p/{LIAR}"]


@asynccontextmanager
async def a_private_network() -> AsyncIterator[list[str]]:
    yield [f"/ip4/192.168.77.77/tcp/22/p2p/{LIAR}"]


@asynccontextmanager
async def no_announcement() -> AsyncIterator[None]:
    yield None


CAUSES = [
    a_closed_port,
    an_open_port_that_says_nothing,
    a_peer_that_takes_no_links,
    garbage,
    a_private_network,
    no_announcement,
]


@pytest.mark.parametrize("cause", CAUSES)
@in_trio
async def test_no_next_hop_is_one_answer_at_one_time_whatever_the_cause(
    cause: Callable[[], AbstractAsyncContextManager[list[str] | None]],
) -> None:
    """Else a peer that announces an address learns about our machine, and the network behind our NAT."""
    policy = ServePolicy(connect_timeout_s=0.6, dial_patience_s=0.2)
    async with cause() as addresses, open_network([], LinkPolicy()) as network, open_pool(network) as pool:
        for each in addresses or []:
            with suppress(ConfigError):
                network.vouch([each])
        hops = NextHops(pool, lambda _peer: addresses, policy)
        said = []
        began_s = trio.current_time()
        for again in (False, True):
            said.append(await refused(hops, began_s, again=again))
        assert trio.current_time() - began_s == pytest.approx(0.2, abs=0.1)
        await hops._asking[LIAR].wait()
        assert trio.current_time() - began_s == pytest.approx(0.6, abs=0.15)
        for again in (False, True):
            said.append(await refused(hops, began_s, again=again))
        assert said == [("no connection to the next hop", None)] * 4
        assert LIAR not in hops._asking, "it is left alone for a while"


@in_trio
async def test_a_server_looks_for_few_next_hops_of_one_address_group_and_for_those_of_others() -> None:
    """The answers are the same, whether it looks or not."""
    policy = ServePolicy(connect_timeout_s=0.6, dial_patience_s=0.01, hops_sought_burst=2, hops_sought_per_s=1e-6)
    async with open_network([], LinkPolicy()) as network, open_pool(network) as pool:
        hops = NextHops(pool, lambda _peer: None, policy)
        for number, group in enumerate(("one", "one", "one", "other")):
            with pytest.raises(PeerRefused, match="no connection to the next hop"):
                await hops.find(PeerId(f"hole {number}"), group, 0.0, again=True)
        assert [*hops._asking] == ["hole 0", "hole 1", "hole 3"]


@in_trio
async def test_what_is_given_back_at_one_next_hop_counts_for_no_other_one() -> None:
    one, other = PeerId("one"), PeerId("other")
    hops = NextHops(None, lambda _peer: None, ServePolicy(rights_burst=2, rights_per_s=1e-6))
    assert hops.may_ask("group", one, 2)
    assert not hops.may_ask("group", one, 1)
    hops.returned["group", other] += 2
    assert not hops.may_ask("group", one, 1)
    assert hops.may_ask("group", other, 1)
    assert not hops.returned
    hops.returned["group", one] += 1
    assert hops.may_ask("group", one, 1)


def test_one_address_group_has_no_more_than_a_part_of_the_dials_and_of_the_questions_before_pushes() -> None:
    serve, dials, budget = ServePolicy(), DialPolicy(), BudgetPolicy()
    under_way = serve.hops_sought_burst + serve.hops_sought_per_s * serve.connect_timeout_s
    assert under_way <= 0.6 * SHARE_OF_STRANGERS * budget.dials
    assert serve.hops_sought_burst <= dials.burst / 4
    assert serve.hops_sought_per_s <= dials.per_s / 4
    assert serve.rights_burst <= serve.wants.burst / 2
    assert serve.rights_per_s <= serve.wants.per_s / 2


@asynccontextmanager
async def next_hops_that_answer(number: int, policy: ServePolicy) -> AsyncIterator[tuple[NextHops, ConnectionPool]]:
    """Peers "hop 0" and so on, which say what they serve."""
    async with open_internet() as internet, trio.open_nursery() as nursery:
        networks = [internet.network(f"hop {each}") for each in range(number)]
        addresses = {each.peer: each.addresses for each in networks}

        async def answer(network: MemoryNetwork) -> None:
            while True:
                async with network.accept() as link:
                    with suppress(PeerError):
                        while True:
                            asked = await link.receive()
                            await link.send(Frame(FrameType.DESCRIPTION, step=asked.step, meta=pack(DESCRIPTION)))

        for each in networks:
            nursery.start_soon(answer, each)
        async with open_pool(internet.network("server")) as pool:
            yield NextHops(pool, addresses.get, policy), pool
        nursery.cancel_scope.cancel()


async def push(hops: NextHops, hop: int, group: str) -> PeerConnection:
    """A session of a client in this group begins to push to the hop. Raises PeerRefused."""
    connection = await hops.find(peer_named(f"hop {hop}"), group, trio.current_time(), again=False)
    connection.listen(SessionId(bytes(16)), lambda _frame: None, lambda: None)
    return connection


@simulated
async def test_next_hops_that_one_address_group_names_leave_places_to_others() -> None:
    """A connection that the server has opened makes way for no other one. So these are few."""
    policy = ServePolicy(hops_kept=4)
    async with next_hops_that_answer(12, policy) as (hops, pool):
        for number in range(4):
            await push(hops, number, "stranger")
        with pytest.raises(PeerRefused, match="no connection to the next hop"):
            await push(hops, 4, "stranger")
        assert len(pool.living()) == 4
        honest = await push(hops, 11, "honest")
        await trio.sleep(1)
        assert len(pool.living()) == 4
        for number in range(10):
            with suppress(PeerRefused):
                await push(hops, number, "stranger")
        assert not honest.has_ended
        assert len(pool.living()) == 4


@simulated
async def test_a_next_hop_to_which_no_session_pushes_any_more_makes_way_first() -> None:
    policy = ServePolicy(hops_kept=4)
    async with next_hops_that_answer(12, policy) as (hops, pool):
        pushing = [await push(hops, number, "group") for number in range(4)]
        pushing[1].mute(SessionId(bytes(16)), pushing[1]._listeners[SessionId(bytes(16))][0])
        await push(hops, 4, "group")
        await trio.sleep(1)
        assert [each.has_ended for each in pushing] == [False, True, False, False]
        assert len(pool.living()) == 4


@simulated
async def test_a_next_hop_counts_over_a_relay_too_when_its_direct_connection_has_ended() -> None:
    """It is counted until nothing is connected to it, and then nothing goes on that made way."""
    policy = ServePolicy(hops_kept=4)
    async with next_hops_that_answer(12, policy) as (hops, pool):
        for number in range(4):
            server, hop = pool.network.peer, peer_named(f"hop {number}")
            hops_internet(pool).relay(server, hop)
            relayed = await push(hops, number, "stranger")
            assert relayed.relayed
            hops_internet(pool).punch(server, hop)
            await relayed.wait_better()
            hops_internet(pool).relay(server, hop)
        await pool.living()[0].end()
        await pool.living()[0].wait_ended()
        for number in range(4, 8):
            with pytest.raises(PeerRefused, match="no connection to the next hop"):
                await push(hops, number, "stranger")
        honest = await push(hops, 11, "honest")
        await trio.sleep(1)
        assert len(pool.living()) == 4
        assert not honest.has_ended
        assert {each.peer for each in pool.all_open()} == {each.peer for each in pool.living()}


def hops_internet(pool: ConnectionPool) -> MemoryInternet:
    network = pool.network
    assert isinstance(network, MemoryNetwork)
    return network._internet


def test_next_hops_leave_most_connections_to_others() -> None:
    assert ServePolicy().hops_kept <= BudgetPolicy().connections / 4


async def refused(hops: NextHops, since_s: float, *, again: bool) -> tuple[str, float | None]:
    with pytest.raises(PeerRefused) as caught:
        await hops.find(LIAR, "group", since_s, again=again)
    assert caught.value.code == RefusalCode.CANNOT_FORWARD
    return caught.value.reason, caught.value.retry_after_s
