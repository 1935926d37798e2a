"""Dialling and listening: every failure says why."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr

from llmnode.core.policy import BudgetPolicy
from llmnode.errors import ConfigError, PeerUnreachable, SessionClosed
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.explain import explain_failure, name_stranger
from llmnode.net.host import open_network
from llmnode.swarm.pool import open_pool
from unit.in_trio import DEADLINE_S, in_trio
from unit.links import POLICY, served


class _Liar:
    """A private key that claims another's public key. Plaintext asks for no proof."""

    def __init__(self, own: Any, claimed: Any) -> None:
        self._own, self._claimed = own, claimed

    def get_public_key(self) -> Any:
        return self._claimed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.mark.parametrize("lies", [True, False])
@in_trio
async def test_plaintext_is_refused(exact_worker: Any, lies: bool) -> None:
    own, victim = create_new_key_pair(), create_new_key_pair()
    claimed = KeyPair(_Liar(own.private_key, victim.public_key), victim.public_key) if lies else own
    attacker = new_host(key_pair=own, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(claimed)})
    async with served(exact_worker) as swarm, attacker.run(listen_addrs=[]):
        with pytest.raises((BaseLibp2pError, StreamError)):
            await attacker.connect(info_from_p2p_addr(Multiaddr(swarm.address)))
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_dialling_in_vain_says_why(exact_worker: Any) -> None:
    someone = ID.from_pubkey(create_new_key_pair().public_key).to_base58()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        place, _, peer = swarm.address.partition("/p2p/")
        for address in (
            "",
            "/",
            "nonsense",
            place,
            f"{place}/p2p/",
            f"{place}/p2p/Qm",
            f"/ip4/1.2.3.4/tcp/-1/p2p/{peer}",
            f"/p2p/{peer}",
        ):
            with pytest.raises(ConfigError, match="is not the address of a peer"):
                await network.dial(address)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # and does not listen
            nobody = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"
            for address in (f"{place}/p2p/{someone}", f"{nobody}/p2p/{someone}"):
                with pytest.raises(PeerUnreachable) as caught:
                    await network.dial(address)
                assert caught.value.peer == someone
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_dial_that_nobody_answers_ends_at_its_deadline() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        someone = ID.from_pubkey(create_new_key_pair().public_key).to_base58()
        async with open_network([], replace(POLICY, dial_timeout_s=0.3)) as network:
            with pytest.raises(PeerUnreachable, match="no answer"):
                await network.dial(f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{someone}")
            accepted, _ = mute.accept()
            with accepted:
                accepted.settimeout(DEADLINE_S)
                while accepted.recv(1 << 16):
                    pass  # until we have closed our end


@in_trio
async def test_connections_that_ended_hold_no_task() -> None:
    """libp2p would keep one of each, and take no more connections after some hundreds."""
    few = BudgetPolicy(connections=4)
    async with (
        open_network([LISTEN_ANY_LOOPBACK], replace(POLICY, budget=few)) as server,
        trio.open_nursery() as nursery,
    ):

        async def serve() -> None:
            while True:
                async with server.accept() as link:
                    with suppress(PeerUnreachable):
                        await link.receive()

        nursery.start_soon(serve)
        for _ in range(4 * few.connections):
            async with open_network([], POLICY) as visitor:
                with trio.fail_after(DEADLINE_S):
                    await (await visitor.dial(server.addresses[0])).end("done")
        nursery.cancel_scope.cancel()


@in_trio
async def test_listening_in_vain_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address in ("", "nonsense", "/ip4/127.0.0.1/udp/1", f"/ip4/127.0.0.1/tcp/{port}", "/ip4/203.0.113.7/tcp/0"):
            with pytest.raises(ConfigError, match="listen"):
                async with open_network([address], POLICY):
                    pass


@in_trio
async def test_an_address_that_is_named_twice_is_listened_at_once_and_left_when_the_node_ends() -> None:
    def listening() -> set[int]:
        every = psutil.Process().net_connections("tcp")
        return {each.laddr.port for each in every if each.status == psutil.CONN_LISTEN and each.laddr}

    before = listening()
    async with open_network([LISTEN_ANY_LOOPBACK] * 3, POLICY) as network:
        assert len(listening() - before) == len(network.listening) == 1
    assert listening() == before


@in_trio
async def test_a_port_of_another_server_is_not_shared() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as first:
        place = first.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ConfigError, match="in use"):
            async with open_network([place], POLICY):
                pass


@in_trio
async def test_an_address_that_accepts_and_says_nothing_does_not_keep_a_peer_from_being_reached(
    exact_worker: Any,
) -> None:
    (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with silent, served(exact_worker) as server, open_network([], POLICY) as network, open_pool(network) as pool:
        port = silent.socket.getsockname()[1]
        dead = f"/ip4/127.0.0.1/tcp/{port}/p2p/{server.network.peer}"
        network.vouch([dead, server.address])
        with trio.fail_after(POLICY.dial_timeout_s / 2):
            connection = await pool.connect([dead, server.address])
            await connection.describe(POLICY.dial_timeout_s)
            async with await silent.accept() as left:
                while await left.receive_some():
                    pass  # until it is closed
        assert network.count_open().connections == 1


@in_trio
async def test_many_that_dial_a_peer_at_once_share_a_connection(exact_worker: Any) -> None:
    async with served(exact_worker) as server, open_network([], POLICY) as network, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(network.dial, server.address)
        with trio.fail_after(POLICY.dial_timeout_s):
            while network.count_open().links < 5:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert network.count_open().connections == 1


PEER = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"


@pytest.mark.parametrize(
    ("address", "fault", "form"),
    [
        ("127.0.0.1:4001", "it is no multiaddr", "/ip4/127.0.0.1/tcp/4001/p2p/PEER_ID"),
        ("http://node.example:4001/", "it is no multiaddr", "/dns/node.example/tcp/4001/p2p/PEER_ID"),
        ("[2001:db8::1]:4001", "it is no multiaddr", "/ip6/2001:db8::1/tcp/4001/p2p/PEER_ID"),
        (PEER, "it is no multiaddr", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        ("/ip4/127.0.0.1/tcp/4001", "it ends without /p2p/PEER_ID", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWHat", "Invalid CID", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/ip4/300.0.0.1/tcp/4001/p2p/{PEER}", "is not IPv4", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/p2p/{PEER}", "it does not say where the peer is", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", "port 0 means any port", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{PEER}", "by TCP alone", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/ip4/127.0.0.1/tcp/4001/ws/p2p/{PEER}", "by TCP alone", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/dnsaddr/bootstrap.example/p2p/{PEER}", "by TCP alone", "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"),
        (f"/ip4/127.0.0.1/udp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "by TCP alone", "/ip4/ADDRESS/tcp/PORT"),
    ],
)
def test_what_is_wrong_with_an_address_is_told_and_what_to_write(address: str, fault: str, form: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_peer(address)
    text = str(caught.value)
    assert text.startswith(f"{address!r} is not the address of a peer (")
    assert fault in text
    assert f"write {form}" in text
    assert text.count(address) == 1


@in_trio
async def test_what_keeps_a_dial_from_its_peer_is_told_and_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server, open_network([], POLICY) as network:
            place = server.addresses[0].partition("/p2p/")[0]
            for address, words in {
                f"{place}/p2p/{PEER}": f"{server.peer} answers, not {PEER}): copy its address anew",
                f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}": "nothing listens there): 127.0.0.1 is this machine itself",
                f"/dns4/localhost/tcp/{port}/p2p/{PEER}": "nothing listens there): see that the node runs",
                f"/dns4/nowhere.invalid/tcp/{port}/p2p/{PEER}": "no such name",
            }.items():
                with pytest.raises(PeerUnreachable) as caught:
                    await network.dial(address)
                assert f"cannot connect to {address} (" in caught.value.message
                assert words in caught.value.message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENETUNREACH, "no way there from this machine; this machine may have no IPv6"),
        (errno.EPERM, "not permitted"),
    ],
)
def test_what_the_system_says_is_told_in_its_words(code: int, words: str) -> None:
    wrapped = RuntimeError("all dials failed")
    wrapped.__cause__ = ExceptionGroup("dials", [OSError(code, os.strerror(code))])
    assert words in explain_failure(wrapped, Multiaddr("/ip6/2001:db8::1/tcp/1"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "it answers by HTTP"),
        (b"\x15\x03\x01\x00\x02\x02F", "it answers by TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "it answers by SSH"),
        (b"-ERR unknown command\r\n", "it is no node of libp2p"),
        (b"\x13/multistream/1.0.0\n\x03na\n", "it is a node of libp2p that has other ways to encrypt"),
    ],
)
def test_another_program_on_the_port_is_named(answer: bytes, words: str) -> None:
    assert words in name_stranger(answer)


@in_trio
async def test_a_pool_that_has_ended_says_so_to_tasks_that_still_use_it() -> None:
    someone = f"/ip4/127.0.0.1/tcp/1/p2p/{ID.from_pubkey(create_new_key_pair().public_key).to_base58()}"
    async with open_network([], POLICY) as network:
        async with open_pool(network) as pool:
            pass
        with pytest.raises(SessionClosed):
            pool.start_soon(trio.sleep_forever)
        with pytest.raises(SessionClosed):
            pool.warm([someone])
        with pytest.raises(SessionClosed):
            await pool.connect([someone])
