"""Hosts of our transport and of py-libp2p's own, and bare connections between two ends of our Noise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import create_new_key_pair as create_new_rsa_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as StockNoise
from multiaddr import Multiaddr

from llmnode.net.secure import NoiseConnection, NoiseTransport, noise_transport
from llmnode.net.upgrade import use_our_transport

ECHO: Any = "/echo/1"
LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
MIB = 1 << 20


async def read_exactly(stream: Any, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        data += await stream.read(count - len(data))
    return bytes(data)


async def echo(stream: Any) -> None:
    with suppress(Exception):
        while data := await stream.read(MIB):
            await stream.write(data)


def host(kind: str, timeout_s: float = 10) -> Any:
    keys = create_new_rsa_key_pair() if kind == "stock with RSA" else create_new_key_pair()
    if kind == "ours":
        noise = noise_transport(keys)
        made = new_host(key_pair=keys, sec_opt={NOISE: noise}, listen_addrs=[LOOPBACK])
        use_our_transport(made, noise, timeout_s)
        return made
    stock = StockNoise(keys, noise_privkey=create_noise_key_pair().private_key)
    return new_host(key_pair=keys, sec_opt={NOISE: stock}, listen_addrs=[LOOPBACK])


@asynccontextmanager
async def hosts(dialler: str, listener: str) -> AsyncIterator[tuple[Any, Any]]:
    """Connected, and the listener echoes."""
    ours, theirs = host(dialler), host(listener)
    async with ours.run(listen_addrs=[]), theirs.run(listen_addrs=[LOOPBACK]):
        theirs.set_stream_handler(ECHO, echo)
        await ours.connect(info_from_p2p_addr(theirs.get_addrs()[0]))
        yield ours, theirs


@asynccontextmanager
async def tcp_pair() -> AsyncIterator[tuple[RawConnection, RawConnection]]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        dialled = await trio.open_tcp_stream(*listener.socket.getsockname())
        accepted = await listener.accept()
    async with dialled, accepted:
        yield RawConnection(TrioTCPStream(dialled), True), RawConnection(TrioTCPStream(accepted), False)


async def secured(
    raw: tuple[RawConnection, RawConnection], dialler: NoiseTransport, listener: NoiseTransport, expected: ID
) -> tuple[NoiseConnection, NoiseConnection]:
    made: dict[str, NoiseConnection] = {}

    async def accept() -> None:
        made["accepted"] = await listener.secure_inbound(raw[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        made["dialled"] = await dialler.secure_outbound(raw[0], expected)
    return made["dialled"], made["accepted"]


def new_transport() -> tuple[NoiseTransport, ID]:
    keys = create_new_key_pair()
    return noise_transport(keys), ID.from_pubkey(keys.public_key)
