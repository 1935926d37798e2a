"""A peer for `tests/bench/run transport` and the interop tests, with our transport, py-libp2p's own, or bare TCP.

It behaves as the program in `tests/interop/go`: it prints where it listens, and then obeys orders on stdin. Orders and
answers are a JSON object a line. It ends with its stdin. `steered.py` steers it.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, cast

import trio
from libp2p import create_yamux_muxer_option, new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.peer.peerstore import PeerStoreError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr

from llmnode.core.policy import LinkPolicy
from llmnode.net.admission import ConnectionAdmission
from llmnode.net.libp2p_host import open_host
from llmnode.net.select import open_unanswered
from llmnode.net.yamux_stream import YamuxStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from libp2p.abc import IHost, INetStream
    from libp2p.network.stream.net_stream import NetStream

ECHO = "/llmnode-test/echo/1"  # takes a length of 4 bytes and those bytes: answers with the same
SINK = "/llmnode-test/sink/1"  # takes a length of 8 bytes and those bytes: answers with one byte
DIGEST = "/llmnode-test/digest/1"  # takes the same as sink: answers with their SHA-256
SOURCE = "/llmnode-test/source/1"  # takes a length of 8 bytes: answers with that number of bytes
PROTOCOLS = (ECHO, SINK, DIGEST, SOURCE)
BLOCK_BYTES = 1 << 20
LISTEN = Multiaddr("/ip4/127.0.0.1/tcp/0")
PATIENCE_S = 300.0
LOOK_EVERY_S = 0.01


class Stream(Protocol):
    async def read(self, n: int) -> bytes:
        """Up to `n` bytes. At the end it raises, or returns no bytes."""

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class Node(Protocol):
    address: str
    peer: str

    async def connect(self, address: str) -> None: ...

    async def disconnect(self, peer: str) -> None: ...

    async def open(self, peer: str, protocol: str) -> Stream: ...


# The protocols that it serves


async def _exactly(stream: Stream, count: int) -> bytes:
    data = await stream.read(count)
    if len(data) == count:
        return data
    whole = bytearray(data)
    while len(whole) < count:
        data = await stream.read(count - len(whole))
        if not data:
            raise EOFError
        whole += data
    return bytes(whole)


async def _take(stream: Stream, sink: Callable[[bytes], object]) -> None:
    (left,) = struct.unpack("!Q", await _exactly(stream, 8))
    while left:
        data = await stream.read(min(left, BLOCK_BYTES))
        if not data:
            raise EOFError
        sink(data)
        left -= len(data)


async def _give(stream: Stream, count: int, beside: Callable[[bytes], object]) -> None:
    block = os.urandom(BLOCK_BYTES)
    while count:
        part = block[:count]
        await stream.write(part)
        beside(part)
        count -= len(part)


async def _serve_once(stream: Stream, protocol: str) -> None:
    if protocol == ECHO:
        size = await _exactly(stream, 4)
        await stream.write(size + await _exactly(stream, struct.unpack("!I", size)[0]))
    elif protocol == SINK:
        await _take(stream, lambda _data: None)
        await stream.write(b"\1")
    elif protocol == DIGEST:
        digest = sha256()
        await _take(stream, digest.update)
        await stream.write(digest.digest())
    else:
        (count,) = struct.unpack("!Q", await _exactly(stream, 8))
        await _give(stream, count, lambda _data: None)


async def _serve(stream: Stream, protocol: str) -> None:
    with suppress(StreamError, MuxedStreamError, EOFError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            await _serve_once(stream, protocol)
    with suppress(StreamError, MuxedStreamError, OSError):
        await stream.close()


class OurStream:
    """A stream as links use it: without py-libp2p's wrapper, whose lock switches tasks at each call."""

    def __init__(self, stream: NetStream, muxed: YamuxStream) -> None:
        self.read, self.write, self.close = muxed.read, muxed.write, stream.close


def _as_used(stream: INetStream) -> Stream:
    whole = cast("NetStream", stream)
    ours = isinstance(whole.muxed_stream, YamuxStream)
    return cast("Stream", OurStream(whole, cast("YamuxStream", whole.muxed_stream)) if ours else whole)


class Libp2pNode:
    """A peer over a running host."""

    def __init__(
        self,
        host: IHost,
        open_stream: Callable[[IHost, ID, TProtocol], Awaitable[INetStream]] = open_unanswered,
        vouch: Callable[[Multiaddr], None] = lambda _address: None,
    ) -> None:
        self._vouch = vouch
        self.peer = str(host.get_id())
        self._open_stream = open_stream
        self.address = next(map(str, host.get_addrs()), "")
        self._host = host
        for protocol in PROTOCOLS:
            host.set_stream_handler(TProtocol(protocol), self._handler(protocol))

    async def connect(self, address: str) -> None:
        info = info_from_p2p_addr(Multiaddr(address))
        self._vouch(info.addrs[0])
        await self._host.connect(info)

    async def disconnect(self, peer: str) -> None:
        await self._host.disconnect(ID.from_string(peer))
        # Else it would dial an address that it has heard of since, and not the given one.
        self._host.get_peerstore().clear_addrs(ID.from_string(peer))

    async def open(self, peer: str, protocol: str) -> Stream:
        return _as_used(await self._open_stream(self._host, ID.from_string(peer), TProtocol(protocol)))

    async def ping_s(self, peer: str) -> float:
        began = time.perf_counter()
        await PingService(self._host).ping(ID.from_string(peer), ping_amt=1)
        return time.perf_counter() - began

    async def protocols(self, peer: str) -> list[str]:
        """The protocols of `peer`, once it has told them."""
        store = self._host.get_peerstore()
        while True:
            with suppress(PeerStoreError):
                if protocols := store.get_protocols(ID.from_string(peer)):
                    return [str(each) for each in protocols]
            await trio.sleep(LOOK_EVERY_S)

    @staticmethod
    def _handler(protocol: str) -> Callable[[INetStream], Awaitable[None]]:
        async def handle(stream: INetStream) -> None:
            await _serve(_as_used(stream), protocol)

        return handle


class TcpStream:
    def __init__(self, stream: trio.SocketStream) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream

    async def read(self, n: int) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


class TcpNode:
    """A TCP connection for each stream, neither encrypted nor shared. Its first byte names the protocol."""

    def __init__(self, port: int) -> None:
        self.address = self.peer = f"127.0.0.1:{port}"
        self._other = ""

    async def connect(self, address: str) -> None:
        self._other = address
        stream = await self._dial(address)
        await stream.aclose()

    async def disconnect(self, peer: str) -> None:
        pass

    async def open(self, peer: str, protocol: str) -> Stream:
        stream = TcpStream(await self._dial(self._other))
        await stream.write(bytes([PROTOCOLS.index(protocol)]))
        return stream

    @staticmethod
    async def _dial(address: str) -> trio.SocketStream:
        host, _, port = address.rpartition(":")
        return await trio.open_tcp_stream(host, int(port))


@asynccontextmanager
async def _open(kind: str) -> AsyncIterator[Node]:
    async with AsyncExitStack() as stack:
        if kind == "tcp":
            nursery = await stack.enter_async_context(trio.open_nursery())
            listener, *_ = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), _serve_tcp, 0)
            yield TcpNode(listener.socket.getsockname()[1])
            nursery.cancel_scope.cancel()
        elif kind == "llmnode":
            admission = ConnectionAdmission(LinkPolicy())
            opened = open_host(create_new_key_pair(), [LISTEN], LinkPolicy(), admission=admission)
            yield Libp2pNode(await stack.enter_async_context(opened), vouch=admission.gate.vouch)
        else:
            keys = create_new_key_pair()
            noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
            host = new_host(key_pair=keys, sec_opt={NOISE: noise}, muxer_opt=create_yamux_muxer_option())
            await stack.enter_async_context(host.run(listen_addrs=[LISTEN]))
            yield Libp2pNode(host, lambda host, peer, protocol: host.new_stream(peer, [protocol]))


async def _serve_tcp(raw: trio.SocketStream) -> None:
    stream = TcpStream(raw)
    if first := await stream.read(1):
        await _serve(stream, PROTOCOLS[first[0]])


# The orders that it obeys


async def _obey(node: Node, told: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    peer, size = told.get("peer", ""), told.get("bytes", 0)
    match told["do"]:
        case "connect":
            return await _timed(lambda: node.connect(told["address"]))
        case "disconnect":
            await node.disconnect(peer)
            return {}
        case "identify":
            return {"protocols": await cast("Libp2pNode", node).protocols(peer)}
        case "ping":
            return {"seconds": await cast("Libp2pNode", node).ping_s(peer)}
        case "open":
            return await _repeated(told["repeats"], lambda: _open_and_echo(node, peer, size))
        case "echo":
            stream = await node.open(peer, ECHO)
            try:
                return await _repeated(told["repeats"], lambda: _echo(stream, size))
            finally:
                await stream.close()
        case "send":
            protocol = DIGEST if told.get("check") else SINK
            streams = [await _open_served(node, peer, protocol) for _ in range(told["streams"])]
            return await _timed(lambda: _send_all(streams, size, protocol))
        case "receive":
            return await _timed(lambda: _receive(node, peer, size))
        case "beside":
            return await _beside(node, told)
        case "cpu":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return {"seconds": usage.ru_utime + usage.ru_stime}
    raise ValueError(f"unknown order {told['do']!r}")


async def _timed(once: Callable[[], Awaitable[object]]) -> dict[str, Any]:  # Any: JSON
    began = time.perf_counter()
    await once()
    return {"seconds": time.perf_counter() - began}


async def _repeated(times: int, once: Callable[[], Awaitable[object]]) -> dict[str, Any]:  # Any: JSON
    return {"seconds": [(await _timed(once))["seconds"] for _ in range(times)]}


async def _beside(node: Node, told: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Small echoes while one stream sends."""
    stream = await node.open(told["peer"], ECHO)
    took: list[float] = []
    async with trio.open_nursery() as nursery:

        async def echo() -> None:
            while True:
                took.append((await _timed(lambda: _echo(stream, told["small"])))["seconds"])

        nursery.start_soon(echo)
        bulk = await _open_served(node, told["peer"], SINK)
        sent = await _timed(lambda: _send_all([bulk], told["bytes"], SINK))
        nursery.cancel_scope.cancel()
    return {"seconds": took, "bulk_seconds": sent["seconds"]}


async def _open_and_echo(node: Node, peer: str, size: int) -> None:
    stream = await node.open(peer, ECHO)
    await _echo(stream, size)
    await stream.close()


async def _echo(stream: Stream, size: int) -> None:
    await stream.write(struct.pack("!I", size) + bytes(size))
    await _exactly(stream, 4 + size)


async def _open_served(node: Node, peer: str, protocol: str) -> Stream:
    """A stream to send over, which the other side has accepted. rust-libp2p drops some of several that come at once."""
    stream = await node.open(peer, protocol)
    await _send(stream, 0, protocol)
    return stream


async def _send_all(streams: Sequence[Stream], count: int, protocol: str) -> None:
    """Send `count` bytes over each stream, all at once."""
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(_send, stream, count, protocol)
    for stream in streams:
        await stream.close()


async def _send(stream: Stream, count: int, protocol: str) -> None:
    digest, checked = sha256(), protocol == DIGEST
    await stream.write(struct.pack("!Q", count))
    await _give(stream, count, digest.update if checked else lambda _data: None)
    theirs = await _exactly(stream, digest.digest_size if checked else 1)
    if checked and theirs != digest.digest():
        raise ValueError(f"sent {digest.hexdigest()}, they got {theirs.hex()}")


async def _receive(node: Node, peer: str, count: int) -> None:
    stream = await node.open(peer, SOURCE)
    await stream.write(struct.pack("!Q", count))
    while count:
        data = await stream.read(min(count, BLOCK_BYTES))
        if not data:
            raise EOFError
        count -= len(data)
    await stream.close()


async def _main(kind: str) -> None:
    async with _open(kind) as node:
        print(json.dumps({"address": node.address, "peer": node.peer}), flush=True)
        rest = b""
        async for data in trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    with trio.fail_after(PATIENCE_S):
                        answer = await _obey(node, json.loads(line))
                except Exception as error:  # noqa: BLE001 - whatever it is, who asked is told
                    answer = {"error": repr(error)}
                print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    trio.run(_main, sys.argv[1])
