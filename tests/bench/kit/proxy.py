"""TCP proxies on loopback between the nodes of a benchmark. They make links long, narrow or silent, without root.

They run in a process of their own, so that the measuring process does not wait for their delays. `open_proxies` starts
and steers it. Bytes keep their order whatever changes. They do not imitate TCP itself: a proxy accepts and acknowledges
bytes as soon as it has space. So nothing is lost, nothing starts slowly, and a dial takes no round trip.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import trio

from bench.kit.child import as_program
from bench.kit.cpu import cpu_s
from bench.kit.precise_clock import PreciseClock
from llmnode.node.processes import ServerDied

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Address = tuple[str, int]

CHUNK_BYTES = 1 << 16
CHUNKS = 256
"""The most chunks on their way in one direction of a connection: 16 MiB. More bytes stay with their sender."""

QUEUE_S = 0.02
"""The longest queue in front of a narrow link, in seconds of that link, as in a router."""
NARROW_BUFFER_BYTES = 1 << 16
"""The bytes that the kernel takes for us beyond that."""


@dataclass(slots=True)
class Lateness:
    """The proxy's own error: chunks that have left it, and for how long after they were due, in seconds."""

    chunks: int = 0
    sum_s: float = 0.0
    most_s: float = 0.0

    def note(self, late_s: float) -> None:
        self.chunks += 1
        self.sum_s += late_s
        self.most_s = max(self.most_s, late_s)

    def __add__(self, other: Lateness) -> Lateness:
        return Lateness(self.chunks + other.chunks, self.sum_s + other.sum_s, max(self.most_s, other.most_s))


class Shape:
    """The delay and bandwidth of a proxy's connections. A change holds for all bytes that come after it."""

    def __init__(
        self, one_way_s: float = 0.0, bytes_per_s: float = math.inf, back_bytes_per_s: float | None = None
    ) -> None:
        self.one_way_s = one_way_s
        self.bytes_per_s = bytes_per_s
        """The bandwidth of each connection, towards the target of the proxy."""
        self.back_bytes_per_s = back_bytes_per_s
        """That in the other direction; None if it is the same."""
        self.lateness = Lateness()
        self._open = trio.Event()
        self._open.set()

    def rate(self, *, back: bool) -> float:
        """The bandwidth of one direction, in bytes/s."""
        return self.back_bytes_per_s if back and self.back_bytes_per_s is not None else self.bytes_per_s

    def cut(self) -> None:
        """Nothing arrives any more, and neither end is told."""
        if self._open.is_set():
            self._open = trio.Event()

    def heal(self) -> None:
        """All bytes that were sent meanwhile arrive now."""
        self._open.set()

    async def until_open(self) -> None:
        while not self._open.is_set():
            await self._open.wait()


async def join(near: trio.abc.HalfCloseableStream, far: trio.abc.HalfCloseableStream, shape: Shape) -> bool:
    """Pass bytes between two streams until both have ended. False if one breaks. It closes neither."""
    async with trio.open_nursery() as nursery:

        async def carry(source: trio.abc.ReceiveStream, sink: trio.abc.HalfCloseableStream, back: bool) -> None:
            if not await _carry(source, sink, shape, back=back):
                nursery.cancel_scope.cancel()

        nursery.start_soon(carry, near, far, False)
        nursery.start_soon(carry, far, near, True)
    return not nursery.cancel_scope.cancel_called


async def _carry(
    source: trio.abc.ReceiveStream, sink: trio.abc.HalfCloseableStream, shape: Shape, *, back: bool
) -> bool:
    """Pass bytes until `source` ends, and tell `sink`. False if it breaks instead, which the other end would notice."""
    entrance, exit_ = trio.open_memory_channel[tuple[float, "bytes | None"]](CHUNKS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_take_in, source, entrance, shape, back)
        async for due_s, data in exit_:
            await trio.sleep_until(due_s)
            shape.lateness.note(trio.current_time() - due_s)
            await shape.until_open()
            if data is None:
                return False
            with contextlib.suppress(trio.BrokenResourceError):  # then the other direction breaks as well
                await (sink.send_all(data) if data else sink.send_eof())
    return True


async def _take_in(
    source: trio.abc.ReceiveStream,
    entrance: trio.MemorySendChannel[tuple[float, bytes | None]],
    shape: Shape,
    back: bool,
) -> None:
    """The end of the stream comes in as an empty chunk, and a break as None."""
    sent_s = -math.inf  # the moment at which a link of this bandwidth has sent all chunks before
    data: bytes | None = b"first"
    async with entrance:
        while data:
            try:
                await trio.sleep_until(sent_s - QUEUE_S)
                data = bytes(await source.receive_some(_chunk_bytes(shape.rate(back=back))))
            except trio.BrokenResourceError:
                data = None
            sent_s = max(sent_s, trio.current_time()) + len(data or b"") / shape.rate(back=back)
            await entrance.send((sent_s + shape.one_way_s, data))


def _chunk_bytes(bytes_per_s: float) -> int:
    """The bytes to read at once. From a narrow link it is little, or they would all arrive late."""
    return int(min(CHUNK_BYTES, max(1024, bytes_per_s * QUEUE_S / 8)))


class ShapingProxy:
    """One port, and its connections. They wait until it is aimed: servers may dial it as soon as it is announced."""

    def __init__(self) -> None:
        self.shape = Shape()
        self.shapes: dict[str, Shape] = {}
        """The shapes of connections from some hosts, by their address: `shape` is for all others."""
        self._target: Address | None = None
        self._aimed = trio.Event()
        self._connections: set[trio.CancelScope] = set()
        self._hosts: set[str] = set()
        """Those of all connections until now."""

    async def run(self, task_status: trio.TaskStatus[int]) -> None:
        """Serve until cancelled. It reports its port when it is started."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            task_status.started(listener.socket.getsockname()[1])
            await trio.serve_listeners(self._serve, [listener], handler_nursery=nursery)

    def aim(self, target: Address) -> None:
        """From now on connections go there."""
        self._target = target
        self._aimed.set()

    def shape_of(self, host: str) -> Shape:
        """The shape of connections from this `host`, of which there are none yet if it has no shape of its own.

        A connection keeps its shape for life.
        """
        assert host in self.shapes or host not in self._hosts, "shape the links from a host before there are any"
        return self.shapes.setdefault(host, Shape())

    def reset(self) -> int:
        """Break every connection, so that both ends notice. Returns their number."""
        for scope in self._connections:
            scope.cancel()
        return len(self._connections)

    async def _serve(self, near: trio.SocketStream) -> None:
        with trio.CancelScope() as scope, _broken_unless_ended(near) as near_end:
            self._connections.add(scope)
            host = near.socket.getpeername()[0]
            self._hosts.add(host)
            shape = self.shapes.get(host, self.shape)
            try:
                await shape.until_open()
                if math.isfinite(shape.bytes_per_s):
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BUFFER_BYTES)
                await self._aimed.wait()
                assert self._target is not None
                far = await trio.open_tcp_stream(*self._target)
                with _broken_unless_ended(far) as far_end:
                    near_end.whole = far_end.whole = await join(near, far, shape)
            except OSError:  # no server listens there
                pass
            finally:
                self._connections.remove(scope)


@dataclass(slots=True)
class _End:
    whole: bool = False


@contextlib.contextmanager
def _broken_unless_ended(stream: trio.SocketStream) -> Iterator[_End]:
    """Close the stream with the context: as a broken connection (RST), unless it came to a `whole` end."""
    end = _End()
    try:
        yield end
    finally:
        if not end.whole:
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()


# The process, and its side in the benchmark


class Proxies:
    """The proxies of `open_proxies`, in their own process, which obeys orders at once."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.addresses: Sequence[Address] = [("127.0.0.1", port) for port in self._answer()["ports"]]

    @property
    def cpu_s(self) -> float:
        """The CPU time that they have taken."""
        return cpu_s(self._process.pid)

    def aim(self, index: int, target: Address) -> None:
        """From now on the proxy's connections go to `target`."""
        self._order(index, target=target)

    def shape(self, *, one_way_s: float, bytes_per_s: float = math.inf, only: int | None = None) -> None:
        """Set the delay and bandwidth of all proxies, or of one."""
        for index in range(len(self.addresses)) if only is None else (only,):
            self._order(index, one_way_s=one_way_s, bytes_per_s=bytes_per_s)

    def lateness(self) -> Lateness:
        """That of all proxies together, since it was last asked for."""
        each = (Lateness(**self._order(index, forget=True)["lateness"]) for index in range(len(self.addresses)))
        return sum(each, Lateness())

    def shape_from(
        self, host: str, index: int, *, one_way_s: float, bytes_per_s: float, back_bytes_per_s: float
    ) -> None:
        """The same for connections of one proxy from `host`. The first call comes before there are any."""
        rates = {"bytes_per_s": bytes_per_s, "back_bytes_per_s": back_bytes_per_s}
        self._order(index, host=host, one_way_s=one_way_s, **rates)

    def cut(self, index: int) -> None:
        """See `Shape`."""
        self._order(index, cut=True)

    def heal(self, index: int) -> None:
        """See `Shape`."""
        self._order(index, cut=False)

    def reset(self, index: int) -> int:
        """Break all connections of a proxy. Returns their number."""
        return int(self._order(index, reset=True)["broken"])

    def _order(self, index: int, **order: object) -> dict[str, Any]:  # Any: JSON
        """Returns when the order is done. Raises ServerDied."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"proxy": index, **order}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerDied("the process of the proxies ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def open_proxies(count: int) -> Iterator[Proxies]:
    """Proxies on loopback, without delays or targets yet. They end with the context, or with this process."""
    with subprocess.Popen(
        [sys.executable, "-P", *as_program(__name__), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C in the terminal does not reach it
    ) as process:
        try:
            yield Proxies(process)
        finally:
            process.kill()


async def _main(count: int, clock: PreciseClock) -> None:
    """The child process: reads orders, prints answers."""
    proxies = [ShapingProxy() for _ in range(count)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clock.keep_waking)
        ports = [await nursery.start(proxy.run) for proxy in proxies]
        print(json.dumps({"ports": ports}), flush=True)
        rest = b""
        async for data in trio.lowlevel.FdStream(sys.stdin.fileno()):
            *orders, rest = (rest + data).split(b"\n")
            for order in map(json.loads, orders):
                print(json.dumps(_obey(proxies[order["proxy"]], order)), flush=True)
        nursery.cancel_scope.cancel()


def _obey(proxy: ShapingProxy, order: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    if "target" in order:
        proxy.aim(tuple(order["target"]))
    shape = proxy.shape_of(order["host"]) if "host" in order else proxy.shape
    for value in ("one_way_s", "bytes_per_s", "back_bytes_per_s"):
        setattr(shape, value, order.get(value, getattr(shape, value)))
    if "cut" in order:
        (proxy.shape.cut if order["cut"] else proxy.shape.heal)()
    lateness = asdict(proxy.shape.lateness)
    if order.get("forget"):
        proxy.shape.lateness = Lateness()
    return {"broken": proxy.reset() if order.get("reset") else 0, "lateness": lateness}


if __name__ == "__main__":
    precise = PreciseClock()
    trio.run(_main, int(sys.argv[1]), precise, clock=precise)
