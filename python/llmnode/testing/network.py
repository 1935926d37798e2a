"""The `Network` port in memory: links with a delay, peers that die, and pairs that cannot hear each other."""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import PeerId
from llmnode.core.policy import LinkPolicy
from llmnode.errors import ConfigError, PeerError, PeerUnreachable
from llmnode.wire.frame import Frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ACCEPT_QUEUE = 16


@asynccontextmanager
async def open_internet(policy: LinkPolicy | None = None, *, delay_s: float = 0.01) -> AsyncIterator[MemoryInternet]:
    """Networks that reach each other, `delay_s` one way, for as long as the context lasts."""
    async with trio.open_nursery() as nursery:
        yield MemoryInternet(nursery, policy or LinkPolicy(), delay_s)
        nursery.cancel_scope.cancel()


class MemoryInternet:
    """What connects the networks, and breaks them. Made by `open_internet`."""

    def __init__(self, nursery: trio.Nursery, policy: LinkPolicy, delay_s: float) -> None:
        self.nursery = nursery
        self.policy = policy
        self.delay_s = delay_s
        self._networks: dict[PeerId, MemoryNetwork] = {}
        self._cut: dict[frozenset[PeerId], trio.Event] = {}

    def network(self, name: str) -> MemoryNetwork:
        """A new peer with its network; a name that was used before is its next life, under the same id."""
        network = MemoryNetwork(self, PeerId(f"peer-{name}"))
        self._networks[network.peer] = network
        return network

    def kill(self, peer: PeerId) -> None:
        """As SIGKILL does: its system closes its connections, and others notice at once."""
        for link in list(self._networks.pop(peer).links):
            link.fail(PeerUnreachable("connection lost"))

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Nothing that they send arrives until it is mended; their links end when the silence lasts."""
        self._cut.setdefault(frozenset((one, other)), trio.Event())
        for link in self._networks[one].links + self._networks[other].links:
            if link.peer in (one, other):
                self.nursery.start_soon(link.watch_silence)

    def mend(self, one: PeerId, other: PeerId) -> None:
        if (event := self._cut.pop(frozenset((one, other)), None)) is not None:
            event.set()

    async def until_mended(self, one: PeerId, other: PeerId) -> None:
        pair = frozenset((one, other))
        while pair in self._cut:
            await self._cut[pair].wait()

    def find(self, address: str) -> MemoryNetwork | None:
        """Whoever listens at `address`."""
        if not address.startswith("/memory/"):
            raise ConfigError(f"{address!r} is no address in memory")
        return self._networks.get(PeerId(address.rpartition("/p2p/")[2]))


class MemoryNetwork:
    """The `Network` port of one peer. Made by `MemoryInternet.network`."""

    def __init__(self, internet: MemoryInternet, peer: PeerId) -> None:
        self.peer = peer
        self.links: list[MemoryLink] = []
        self._internet = internet
        self._opened, self._accepted = trio.open_memory_channel[MemoryLink](ACCEPT_QUEUE)

    @property
    def addresses(self) -> list[str]:
        return [f"/memory/p2p/{self.peer}"]

    async def dial(self, address: str) -> MemoryLink:
        internet = self._internet
        other = internet.find(address)
        reached = False
        with trio.move_on_after(internet.policy.dial_timeout_s):
            await trio.sleep(3 * internet.delay_s)
            if other is not None:
                await internet.until_mended(self.peer, other.peer)
                reached = internet.find(address) is other
        if other is None or not reached:
            raise PeerUnreachable(f"no answer from {address}", peer=PeerId(address.rpartition("/p2p/")[2]))
        ours, theirs = MemoryLink(internet, self.peer, other.peer), MemoryLink(internet, other.peer, self.peer)
        ours.far, theirs.far = theirs, ours
        try:
            other.take(theirs)
        except trio.WouldBlock:
            raise PeerUnreachable("takes no more links", peer=other.peer) from None
        self._run(ours)
        return ours

    @asynccontextmanager
    async def accept(self) -> AsyncIterator[MemoryLink]:
        link = await self._accepted.receive()
        try:
            yield link
        finally:
            await link.end("no longer served")

    def sign(self, message: bytes) -> bytes:
        return _signature(self.peer, message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return _signature(peer, message) == signature

    def take(self, link: MemoryLink) -> None:
        """Raises trio.WouldBlock if too many wait already."""
        self._opened.send_nowait(link)
        self._run(link)

    def _run(self, link: MemoryLink) -> None:
        self.links.append(link)
        self._internet.nursery.start_soon(link.run, lambda: self.links.remove(link))


class MemoryLink:
    """The `Link` port between two networks in memory."""

    far: MemoryLink

    def __init__(self, internet: MemoryInternet, own: PeerId, peer: PeerId) -> None:
        self.peer = peer
        self._internet = internet
        self._own = own
        frames = internet.policy.queue_frames
        self._outgoing, self._under_way = trio.open_memory_channel[tuple[float, Frame]](frames)
        self._delivered, self._incoming = trio.open_memory_channel[Frame](frames)
        self._error: PeerError | None = None
        self._ended = trio.Event()

    async def send(self, frame: Frame) -> None:
        try:
            await self._outgoing.send((trio.current_time() + self._internet.delay_s, frame))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise self._reason() from None

    async def receive(self) -> Frame:
        try:
            return await self._incoming.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise self._reason() from None

    async def end(self, reason: str) -> None:
        self.fail(PeerUnreachable(f"link closed: {reason}"))
        await trio.lowlevel.checkpoint()

    def fail(self, error: PeerError) -> None:
        """End this side now, and the far one when it hears of it."""
        if self._error is None:
            self._error = error.blame(self.peer)
            self._ended.set()
            self._outgoing.close()
            self._delivered.close()

    async def run(self, on_end: Callable[[], None]) -> None:
        """Deliver what is sent, until this side ends; then tell the far one."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliver)
            await self._ended.wait()
            nursery.cancel_scope.deadline = trio.current_time() + self._internet.policy.farewell_s
        on_end()
        await self._internet.until_mended(self._own, self.peer)
        self.far.fail(PeerUnreachable("closed the stream"))

    async def watch_silence(self) -> None:
        """End the link unless its peers hear each other again in time."""
        with trio.move_on_after(self._internet.policy.silence_s) as patience:
            await self._internet.until_mended(self._own, self.peer)
        if patience.cancelled_caught:
            self.fail(PeerUnreachable(f"silent for {self._internet.policy.silence_s:g} s"))

    async def _deliver(self) -> None:
        async for due, frame in self._under_way:
            await trio.sleep_until(due)
            await self._internet.until_mended(self._own, self.peer)
            try:
                self.far._delivered.send_nowait(frame)
            except trio.WouldBlock:
                self.far.fail(PeerUnreachable("sent more than a link may hold ahead of our reading"))
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return

    def _reason(self) -> PeerError:
        assert self._error is not None
        return type(self._error)(self._error.message, peer=self._error.peer)


def _signature(peer: PeerId, message: bytes) -> bytes:
    """No secret is in it: enough to tell that bytes were changed, and whose they are."""
    return hashlib.blake2b(message, key=peer.encode()[:64], digest_size=64).digest()
