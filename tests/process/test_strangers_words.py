"""The lies of strangers (`SECURITY.md`) to one real server and to its clients, each in several variations."""

from __future__ import annotations

import re
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.utils.varint import encode_uvarint
from multiaddr import Multiaddr

from bench.hostile.servers import answer_links
from llmnode import _native
from llmnode.client.connect import ClientParts, aconnect
from llmnode.client.ends import SharedEnds
from llmnode.client.generate import next_token
from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.policy import ClientPolicy, LinkPolicy, RoutePolicy, StandingPolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerUnreachable
from llmnode.models.load import load_ends
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, own_ips, parse_peer
from llmnode.net.host import open_network
from llmnode.swarm.membership import wall_clock_ms
from llmnode.wire.announcement import pack_news, pack_sequences, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, Result, pack
from llmnode.wire.refusal import refusal_of
from process import forked
from process.small_server import expected_tokens
from process.strangers import ANSWER_S, KV_TOKENS, Served, answer, identity, stranger
from unit.wire.whole_payloads import unpack_news

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from libp2p.abc import INetStream

    from llmnode.ports import Link

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

PROMPT, NEW_TOKENS = [2, 7, 1, 8], 3
POLICY = SwarmPolicy()
EVIL = "\x1b]0;OWNED\x07\x1b[31m\x9b2J\u202e\u2066\nllmnode: ready\r\n2026-01-01 WARNING\x08\u200b\U000e0041"
"""A title, a colour, a cleared screen, text from right to left, two lines that seem ours, and what is invisible."""


async def peers_known(link: Link) -> dict[PeerId, tuple[str, ...]]:
    """The peers that the server tells of, with their addresses."""
    await link.send(Frame(FrameType.VIEW, meta=pack(Clock(wall_clock_ms())), payload=pack_sequences({})))
    while (frame := await answer(link)).type is not FrameType.NEWS:
        pass
    told = [each.announcement for each in unpack_news(frame.payload, POLICY).read() if not isinstance(each, Exception)]
    return {each.peer: each.addresses for each in told}


# Addresses


def test_nobody_can_have_a_server_announce_an_address_by_saying_that_it_is_seen_there(served: Served) -> None:
    """Peers at four addresses say so when they are asked: public, private and local addresses. Nobody may push it."""
    claims = ["/ip4/203.0.113.9/tcp/443", "/ip4/10.0.0.1/tcp/80", "/ip4/127.0.8.1/tcp/22", "/ip6/2001:db8::1/tcp/22"]
    server = parse_peer(served.address).peer_id
    told, all_told = 0, trio.Event()

    async def lie(claim: str, stream: INetStream) -> None:
        nonlocal told
        said = Identify(agent_version=EVIL, observed_addr=Multiaddr(claim).to_bytes())
        said.listen_addrs.append(Multiaddr("/ip4/127.0.8.1/tcp/22").to_bytes())
        said.protocols.append(str(ID_PUSH))
        packed = said.SerializeToString()
        await stream.write(encode_uvarint(len(packed)) + packed)
        await stream.close()
        told += 1
        if told == 2 * len(claims):
            all_told.set()

    async def check() -> None:
        async with AsyncExitStack() as stack:
            for number in range(2 * len(claims)):
                describe = partial(lie, claims[number % len(claims)])
                network = await stack.enter_async_context(stranger(served, f"127.0.{20 + number}.1", describe=describe))
                with pytest.raises(BaseLibp2pError):
                    await network.host.new_stream(server, [ID_PUSH])
            with trio.fail_after(ANSWER_S):
                await all_told.wait()
            link = await network.dial(served.address)
            known = await peers_known(link)
            assert known[PeerId(server.to_base58())] == (served.address,)

    trio.run(check)


def test_a_contact_that_names_addresses_of_loopback_and_private_networks_has_nobody_connect_to_them(
    served: Served,
) -> None:
    """The contact is beyond loopback. A server that it names at its own address is asked, as `llmnode status` does."""
    hosts = [each for each in own_ips() if each.version == 4 and not each.is_loopback and not each.is_link_local]
    if not hosts:
        pytest.skip("this machine has no IPv4 address beyond loopback")
    own, loopback = str(hosts[0]), ("127.0.0.1", "127.0.11.1", "::1")
    connections: Counter[str] = Counter()

    async def tell(network: Any, told: Frame, task_status: trio.TaskStatus[None]) -> None:
        with suppress(PeerError):
            async with network.accept() as link:
                task_status.started()
                while True:
                    if (frame := await link.receive()).type is FrameType.VIEW:
                        await link.send(replace(told, step=frame.step))

    async def count(host: str, stream: trio.SocketStream) -> None:
        connections[host] += 1
        await stream.aclose()

    async def check() -> None:
        async with open_network([f"/ip4/{own}/tcp/0"], LinkPolicy()) as network, trio.open_nursery() as nursery:
            named = []
            for host in (*loopback, own):
                (listener,) = await trio.open_tcp_listeners(0, host=host)
                nursery.start_soon(trio.serve_listeners, partial(count, host), [listener])
                port = listener.socket.getsockname()[1]
                named.append(f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}")
                if host == loopback[0]:  # the same place by other names
                    named += [f"/ip6/::ffff:{host}/tcp/{port}", f"/dns4/localhost/tcp/{port}"]
            peers = [(identity(), each) for each in named]
            told = served.news(*[(peer, f"{place}/p2p/{peer}", sign) for (peer, sign), place in peers])

            async def tell_all() -> None:
                while True:
                    await nursery.start(tell, network, told)

            nursery.start_soon(tell_all)
            status = [sys.executable, "-P", "-m", "llmnode.node", "status", "--peers", *network.addresses]
            shown = await trio.to_thread.run_sync(forked.run, status)
            assert str(peers[0][0][0])[-8:] in shown.stdout, shown.stderr
            assert connections[own], "servers that the contact names are asked"
            assert connections.keys() == {own}
            nursery.cancel_scope.cancel()

    trio.run(check)


# Numbers


def with_last(value: float) -> Callable[[Frame], Frame]:
    """The answer to a step whose output is its input but for the last number."""

    def output(frame: Frame) -> bytes:
        numbers = np.frombuffer(frame.payload, "<f4").copy()
        numbers[-1] = value
        return numbers.tobytes()

    return lambda frame: result(frame, output(frame))


def result(frame: Frame, output: bytes) -> Frame:
    digests = _native.blake3_digest(frame.payload), _native.blake3_digest(output)
    meta = pack(Result(1, 1, *digests, bytes(64), pushed=False, shown_input=b"", shown_signature=b""))
    return Frame(FrameType.RESULT, frame.session, frame.epoch, frame.step, frame.start, frame.length, meta, output)


LIES: dict[str, Callable[[Frame], Frame]] = {
    "one NaN": with_last(float("nan")),
    "one infinity": with_last(float("-inf")),
    "too large for a norm": with_last(3e38),
    "a number short": lambda frame: result(frame, bytes(frame.payload[4:])),
    "a refusal": lambda frame: refusal_of(frame, "bad-message", EVIL),
}


@asynccontextmanager
async def liar(served: Served, host: str, lie: Callable[[Frame], Frame | None]) -> AsyncIterator[PeerId]:
    """A server that says that it is the fastest, takes every session, and answers steps as `lie` says, if at all."""
    async with stranger(served, host, [f"/ip4/{host}/tcp/0"]) as network, trio.open_nursery() as nursery:
        nursery.start_soon(answer_links, network, lie)
        link = await network.dial(served.address)
        await link.send(served.news((network.peer, network.addresses[0], network.sign)))
        while network.peer not in await peers_known(link):
            pass
        yield network.peer
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("what", LIES)
def test_a_server_that_answers_with_no_numbers_costs_an_honest_session_little(served: Served, what: str) -> None:
    async def check() -> None:
        asked = 0

        def lie(frame: Frame) -> Frame:
            nonlocal asked
            asked += 1
            return LIES[what](frame)

        async with liar(served, f"127.0.{60 + [*LIES].index(what)}.1", lie) as peer:
            await check_serves_a_newcomer(served, ClientPolicy(route=only(served, peer)))
            assert asked

    trio.run(check)


def test_a_crowd_that_takes_sessions_and_never_answers_costs_a_newcomer_one_wait(served: Served) -> None:
    """Each at an address of its own. The wait is 8 s, and shorter here."""
    asked: set[str] = set()

    async def check() -> None:
        async with AsyncExitStack() as stack:
            hosts = [f"127.0.{80 + number}.1" for number in range(16)]
            peers = [await stack.enter_async_context(liar(served, host, partial(hang, host))) for host in hosts]
            policy = ClientPolicy(route=only(served, *peers), standing=StandingPolicy(first_patience_s=1.0))
            began_s = trio.current_time()
            await check_serves_a_newcomer(served, policy)
            assert len(asked) > 4, "several are tried at once"
            print(f"served after {trio.current_time() - began_s:.1f} s")

    def hang(host: str, _step: Frame) -> None:
        asked.add(host)

    trio.run(check)


def only(served: Served, *liars: PeerId) -> RoutePolicy:
    return RoutePolicy(allowed=frozenset({*liars, honest_peer(served)}))


def honest_peer(served: Served) -> PeerId:
    return PeerId(parse_peer(served.address).peer_id.to_base58())


async def check_serves_a_newcomer(served: Served, policy: ClientPolicy) -> None:
    """A client that meets liars first gets its tokens, and soon."""
    nobody = SimpleNamespace(token=lambda *_: None)
    parts = ClientParts(served.folder.info, load_ends(served.folder), nobody, None)  # type: ignore[arg-type]
    async with aconnect([served.address], parts=parts, dtype="float32", policy=policy) as client:
        client.router.finder.report(PeerUnreachable("as if it were", peer=honest_peer(served)))  # liars come first
        tokens: list[int] = []
        with trio.fail_after(ANSWER_S):
            async with client.inference_session(16) as session:
                while len(tokens) < NEW_TOKENS:
                    choice, _ = await next_token(session, SharedEnds(parts.ends), tokens[-1:] or PROMPT)
                    tokens.append(choice.id)
    assert tokens == expected_tokens(served.model, PROMPT, NEW_TOKENS)


# Texts


def test_names_that_strangers_choose_steer_no_terminal_and_begin_no_line(served: Served) -> None:
    """The names of a model and of a program, in the tables of `llmnode status` and in a server's log."""

    async def check() -> str:
        async with stranger(served, "127.0.70.1", [LISTEN_ANY_LOOPBACK]) as network:
            link = await network.dial(served.address)
            model, now_ms = served.folder.info, wall_clock_ms()
            profile = replace(model.profile, model_digest=bytes(range(32)))
            offer = Offer(EVIL, profile, 5, Span(0, 5), PeerState.ONLINE, 1, KV_TOKENS, KV_TOKENS)
            announcement = Announcement(network.peer, (), now_ms, now_ms + 40_000, EVIL, offer)
            signed = sign_announcement(announcement, network.sign).signed
            told = Frame(FrameType.NEWS, meta=pack(Clock(now_ms)), payload=pack_news([signed], [], POLICY))
            await link.send(told)
            while network.peer not in await peers_known(link):
                pass
            status = [sys.executable, "-P", "-m", "llmnode.node", "status", "--peers", served.address]
            shown = await trio.to_thread.run_sync(forked.run, status)
            return str(shown.stdout + shown.stderr)

    screen = trio.run(check)
    assert "OWNED" in screen, "it is shown"
    for text in (screen, served.server.errors.read_text()):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\u200b\U000e0041]", text)
        assert not re.search(r"^(2026-01-01|llmnode: ready$)", text, re.MULTILINE)


# Peers, at the end: they stay in the view for 45 s


def test_thousands_of_invented_peers_put_no_honest_one_out_of_the_view(served: Served) -> None:
    """First over one link, and then from sixteen addresses."""
    honest = [identity() for _ in range(20)]
    crowds = [[identity() for _ in range(64)] for _ in range(80)]

    async def check() -> None:
        async with AsyncExitStack() as stack:
            teller = await (await stack.enter_async_context(stranger(served, "127.0.40.1"))).dial(served.address)
            await teller.send(served.news(*[(peer, f"{place(9)}/p2p/{peer}", sign) for peer, sign in honest]))
            links = []
            for number in range(16):
                network = await stack.enter_async_context(stranger(served, f"127.0.{41 + number}.1"))
                links.append(await network.dial(served.address))
            for part, crowd in enumerate(crowds):
                await trio.lowlevel.checkpoint()  # else our links are silent for too long on a busy machine
                told = served.news(*[(peer, f"{place(9)}/p2p/{peer}", sign) for peer, sign in crowd])
                await links[0 if part < 40 else part % len(links)].send(told)
            for link in links:
                await link.send(Frame(FrameType.DESCRIBE))
                while (await answer(link)).type is not FrameType.DESCRIPTION:
                    pass
            known = await peers_known(teller)
            assert {peer for peer, _ in honest} <= known.keys()
            assert PeerId(parse_peer(served.address).peer_id.to_base58()) in known
            assert 0.9 * POLICY.view_peers < len(known) <= POLICY.view_peers

    trio.run(check)


def place(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}"
