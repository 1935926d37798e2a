"""The attacks of one stranger (`SECURITY.md`), each small, against one real server, whose other clients go on."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.pb.kademlia_pb2 import Message

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import DialPolicy, ServePolicy, SwarmPolicy
from llmnode.errors import PeerError, PeerRefused, PeerUnreachable
from llmnode.net.addresses import parse_peer
from llmnode.net.circuit_wire import receive, send
from llmnode.net.select import open_unanswered
from llmnode.swarm.peer_connection import open_connection
from llmnode.wire.adapter import make_adapter
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, Opened, Refusal, RefusalCode, Replay, pack, unpack
from llmnode.wire.push_messages import PushLimit
from process.strangers import ANSWER_S, Served, answer, identity, name, refusal, stranger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.ports import Link

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]

POLICY = ServePolicy()
GROWTH_MIB, LONGEST_STEP_S, COLLECTED = 8.0, 0.25, 50_000


async def refusals_until_the_end(link: Link) -> int:
    """The server may answer, and then it ends the link."""
    for number in count():
        try:
            await refusal(link)
        except PeerUnreachable:
            return number
    raise AssertionError("unreachable")


async def until_forwarded(link: Link, session: SessionId, request: Neighbours) -> None:
    """Ask again, as clients do, until the server has reached the next hop."""
    with trio.fail_after(ANSWER_S):
        for step in count():
            await link.send(Frame(FrameType.NEIGHBOURS, session, step=Step(step), meta=pack(request)))
            if (await answer(link)).type is FrameType.FORWARDED:
                return
            request = replace(request, again=True)
            await trio.sleep(0.1)  # another process has no event for us


def test_malformed_frames_cost_the_link_of_their_sender_alone(served: Served) -> None:
    async def check() -> None:
        async with served.bystander() as client, stranger(served) as network:
            link = await network.dial(served.address)
            with suppress(PeerError):
                for number in range(2 * POLICY.malformed_burst):
                    await link.send(Frame(FrameType.OPEN, name(number), meta=b"no fields"))
            assert await refusals_until_the_end(link) <= POLICY.malformed_burst + 1
            await served.check(client)

    trio.run(check)


def test_parts_of_an_adapter_with_other_bytes_count_as_malformed(served: Served) -> None:
    async def check() -> None:
        async with (
            stranger(served, "127.0.7.2") as network,
            open_connection(await network.dial(served.address)) as connection,
        ):
            adapter = make_adapter(served.folder.info.digest, {0: (bytes(8), 2)})
            use, part = pack(AdapterUse(adapter.digest, 0, 1)), pack(AdapterPart(adapter.digest, 0))
            ask = partial(connection.ask_peer, timeout_s=ANSWER_S)
            await ask(FrameType.ADAPTER, FrameType.LACKING, meta=use, payload=adapter.manifest.packed)
            for _ in range(POLICY.malformed_burst + 1):
                with pytest.raises(PeerRefused, match="not the part"):
                    await ask(FrameType.PART, FrameType.HELD, meta=part, payload=bytes(7))
            with pytest.raises(PeerUnreachable):
                await ask(FrameType.PART, FrameType.HELD, meta=part, payload=adapter.parts[0])

    trio.run(check)


def test_steps_that_nobody_asked_for_cost_their_link_and_not_the_session(served: Served) -> None:
    async def check() -> None:
        async with served.bystander() as client, stranger(served) as network, client.session(32) as session:
            link = await network.dial(served.address)
            victim = session._hops.hops[0].session
            await link.send(Frame(FrameType.WANT, victim, meta=pack(PushLimit(1 << 20))))
            rows = bytes(served.folder.info.row_bytes)
            before = bytes(await session.step(rows))
            with suppress(PeerError):
                for _ in range(2 * POLICY.unasked_burst):
                    await link.send(replace(served.step_frame(victim, 1), payload=b"\x01" * len(rows)))
            assert await refusals_until_the_end(link) <= POLICY.unasked_burst + 1, "nothing is granted to it either"
            await session.truncate(0)
            assert bytes(await session.step(rows)) == before, "it goes on as if nothing had been"

    trio.run(check)


def test_a_log_is_not_pushed_to_a_server_that_does_not_want_it(served: Served) -> None:
    """A few bytes, again and again, would have one server send much to another. The other one is ours."""
    heard: list[FrameType] = []

    async def serve(network: Any, task_status: trio.TaskStatus[None]) -> None:
        with suppress(PeerError):
            async with network.accept() as link:
                task_status.started()
                while True:
                    heard.append((frame := await link.receive()).type)
                    if frame.type is FrameType.DESCRIBE:
                        await link.send(Frame(FrameType.DESCRIPTION, step=frame.step, meta=described))

    async def serve_all(network: Any) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await nursery.start(serve, network)

    async def check() -> None:
        nonlocal described
        async with stranger(served, listen=["/ip4/127.0.0.1/tcp/0"]) as network, trio.open_nursery() as nursery:
            link, target = await network.dial(served.address), name(2)
            await link.send(Frame(FrameType.DESCRIBE))
            described = (await answer(link)).meta
            nursery.start_soon(serve_all, network)
            await link.send(served.news((network.peer, network.addresses[0], network.sign)))
            await link.send(served.open_frame(name(1)))
            assert (await answer(link)).type is FrameType.OPENED
            await until_forwarded(link, name(1), Neighbours("", network.peer, target, quiet=False, again=False))
            await link.send(served.step_frame(name(1), 0, 8))
            assert (await answer(link)).type is FrameType.RESULT
            for number in range(2):  # each waits a second for a grant
                replay = pack(Replay(push=True))
                await link.send(Frame(FrameType.REPLAY, name(1), Epoch(0), Step(number), 0, 8, replay))
                assert len((await answer(link)).payload) == 8 * served.folder.info.row_bytes, "it comes to us"
            assert FrameType.WANT in heard and FrameType.STEP not in heard
            nursery.cancel_scope.cancel()

    described = b""
    trio.run(check)


@asynccontextmanager
async def listening(host: str) -> AsyncIterator[tuple[int, list[object]]]:
    """A port of a victim, and the connections to it. It says nothing."""
    listeners = await trio.open_tcp_listeners(0, host=host)
    connections: list[object] = []

    async def note(stream: trio.SocketStream) -> None:
        connections.append(stream)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, note, listeners)
        yield listeners[0].socket.getsockname()[1], connections
        nursery.cancel_scope.cancel()


def test_a_server_tells_nobody_what_is_at_an_address_and_dials_it_a_few_times(served: Served) -> None:
    """40 peers are announced at the address of a victim, and one at a port that is closed."""
    identities = 40

    async def check() -> None:
        async with stranger(served) as network, listening("127.0.8.1") as (port, connections):
            link = await network.dial(served.address)
            await link.send(served.open_frame(name(3)))
            assert (await answer(link)).type is FrameType.OPENED
            baits = [identity() for _ in range(identities + 1)]
            places = ["/ip4/127.0.8.2/tcp/1", *[f"/ip4/127.0.8.1/tcp/{port}"] * identities]
            told = [(peer, f"{place}/p2p/{peer}", sign) for place, (peer, sign) in zip(places, baits, strict=True)]
            for each in told:
                await link.send(served.news(each))
            words = set()
            for number, (peer, _) in enumerate(baits):
                meta = pack(Neighbours("", peer, name(4), quiet=False, again=number > 1))  # the first two wait
                began_s = trio.current_time()
                await link.send(Frame(FrameType.NEIGHBOURS, name(3), step=Step(number), meta=meta))
                refused = await refusal(link)
                words.add((refused.code, refused.message))
                if number < 2:
                    assert trio.current_time() - began_s > 0.9 * POLICY.dial_patience_s, "whatever is there"
            assert words == {(RefusalCode.CANNOT_FORWARD, "no connection to the next hop")}
            assert 1 <= len(connections) <= DialPolicy().place_burst + 2

    trio.run(check)


def test_announced_addresses_in_private_networks_are_not_dialled(served: Served) -> None:
    """One of another address is, so that it is known that they were asked for."""
    hosts = ["10.201.77.1", "172.20.77.1", "192.168.77.1", "100.64.77.1", "169.254.169.254"]
    places = [*(f"/ip4/{each}/tcp/22" for each in hosts), "/ip6/fd77::1/tcp/22", "/ip6/fe80::77/tcp/22"]

    async def check() -> None:
        async with stranger(served, "127.0.10.1") as network, listening("127.0.10.2") as (port, connections):
            link = await network.dial(served.address)
            await link.send(served.open_frame(name(6)))
            assert (await answer(link)).type is FrameType.OPENED
            told = [(*identity(), place) for place in (*places, f"/ip4/127.0.10.2/tcp/{port}")]
            for peer, sign, place in told:
                await link.send(served.news((peer, f"{place}/p2p/{peer}", sign)))
            for number, (peer, _, _) in enumerate(told):
                meta = pack(Neighbours("", peer, name(7), quiet=False, again=False))
                await link.send(Frame(FrameType.NEIGHBOURS, name(6), step=Step(number), meta=meta))
                assert (await refusal(link)).code == RefusalCode.CANNOT_FORWARD
            assert connections
            dialled = served.server.footprint().dialled
            assert "127.0.10.2" in dialled
            assert all(each.startswith("127.") for each in dialled), dialled

    trio.run(check)


def test_records_without_end_cost_a_node_no_memory_and_no_long_step(served: Served) -> None:
    """Each of 16 addresses offers as many as one may at once, and each record is under a key of its own."""
    protocol, peer = TProtocol("/ipfs/kad/1.0.0"), parse_peer(served.address).peer_id
    records = int(SwarmPolicy().dht.requests.burst)

    async def offer(source: str, first: int) -> None:
        async with stranger(served, source) as network:
            stream = await open_unanswered(network.host, peer, protocol)
            own = Message.Peer(
                id=network.host.get_id().to_bytes(), addrs=[parse_peer(served.address).addrs[0].to_bytes()]
            )
            for number in range(first, first + records - 1):
                key = b"\x12\x20" + number.to_bytes(32, "big")
                await send(stream.muxed_stream, Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[own]))
            await send(stream.muxed_stream, Message(type=Message.PING))
            with trio.fail_after(ANSWER_S):
                assert (await receive(stream.muxed_stream, Message())).type == Message.PING, "it has read all"

    async def offer_from_all(first: int) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(offer, f"127.0.{100 + number}.{1 + first}", (16 * first + number) * records)

    async def check() -> None:
        await offer_from_all(0)  # libp2p has loaded all that it needs then
        before = served.server.footprint()
        await offer_from_all(1)
        now = served.server.footprint()
        print(f"{now.memory_mib - before.memory_mib:.1f} MiB more, longest step {1e3 * now.longest_step_s:.1f} ms")
        assert now.memory_mib - before.memory_mib < GROWTH_MIB
        assert now.longest_step_s < LONGEST_STEP_S
        assert now.collected < COLLECTED, "a garbage collection of all that is loaded takes 50 ms"

    trio.run(check)


def test_silent_streams_do_not_close_the_dht(served: Served) -> None:
    protocol, peer = TProtocol("/ipfs/kad/1.0.0"), parse_peer(served.address).peer_id

    async def check() -> None:
        async with stranger(served) as network, stranger(served, "127.0.9.1") as honest:
            for _ in range(12):
                await open_unanswered(network.host, peer, protocol)
            stream = await open_unanswered(honest.host, peer, protocol)
            with trio.fail_after(SwarmPolicy().dht.request_s / 2):
                request = Message(type=Message.FIND_NODE, key=honest.host.get_id().to_bytes())
                await send(stream.muxed_stream, request)
                assert (await receive(stream.muxed_stream, Message())).type == Message.FIND_NODE

    trio.run(check)


def test_a_name_that_is_used_twice_has_another_nonce_under_its_receipts(served: Served) -> None:
    """Else two receipts of an honest server would seem to contradict each other."""

    async def check() -> None:
        async with stranger(served) as network:
            link = await network.dial(served.address)
            nonces = set()
            while len(nonces) < 3:
                await link.send(served.open_frame(name(5)))
                if (opened := await answer(link)).type is FrameType.OPENED:
                    nonce = unpack(Opened, opened.meta).nonce
                    assert nonce not in nonces
                    nonces.add(nonce)
                    await link.send(Frame(FrameType.CLOSE, name(5)))
                else:  # the server still ends the last one
                    assert unpack(Refusal, opened.meta).code == RefusalCode.CONFLICT
            assert b"" not in nonces

    trio.run(check)
