"""The `Link` port in memory: what is under way from one end to the other, when it arrives, and when the link dies."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio

from llmnode.core.account import Account
from llmnode.core.address_groups import address_groups
from llmnode.core.budget import Kind, Resource, Worth
from llmnode.core.ids import NO_SESSION
from llmnode.core.links.send_rates import SendRates
from llmnode.core.traffic import TrafficMeter
from llmnode.errors import PeerError, PeerUnreachable
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.refusal import farewell_of_full

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmnode.core.budget import Budget
    from llmnode.core.ids import PeerId
    from llmnode.core.traffic import Traffic
    from llmnode.testing.medium import Medium

    Tamper: TypeAlias = Callable[[PeerId, Frame], Iterable[Frame]]
    """Takes the receiver and a frame for it. Returns the frames that are sent instead."""

LOOK_EVERY_S = 0.05
"""How often a link that waits for memory looks whether there is some."""
ASKED_ONCE = {FrameType.OPEN, FrameType.TRUNCATE, FrameType.NEIGHBOURS, FrameType.FORK}
"""Frames of these kinds may not arrive twice, and over a stream never do: they change the state of a session. Steps
may: clients give again what they take for lost on the way from server to server."""


class Endpoint:
    """A peer as its links know it: where it is, whether it is frozen, and what it holds."""

    def __init__(self, peer: PeerId, host: str, budget: Budget) -> None:
        self.peer = peer
        self.host = host
        self.budget = budget
        self.links: list[MemoryLink] = []
        self.frozen = False
        self.meter = TrafficMeter()
        self.send_rates = SendRates()
        self.tamper: Tamper | None = None
        """Replaces each frame that the peer sends. None: they are sent as they are."""

    @property
    def traffic(self) -> Traffic:
        return self.meter.total


def is_held_back(medium: Medium, sender: Endpoint, receiver: Endpoint) -> bool:
    """Whether what is due has to wait."""
    return receiver.frozen or (sender.peer, receiver.peer) in medium.cuts


def is_heard(medium: Medium, sender: Endpoint, receiver: Endpoint) -> bool:
    """Whether anything new can arrive now."""
    return not (sender.frozen or is_held_back(medium, sender, receiver))


class MemoryLink:
    """The `Link` port between two networks in memory: one end of it, with what that end has sent."""

    far: MemoryLink

    def __init__(self, medium: Medium, own: Endpoint, other: Endpoint) -> None:
        self.own = own
        self.other = other
        self.peer = other.peer
        self.group = address_groups(other.host)[0]
        self.connection = own.budget.connection(other.host, other.peer)
        """It stands for the connection below the link, in the budget of this side."""
        self.connection.on_evict = self._evict
        self.scope = self.connection.open(Kind.LINK, other.peer)
        self._memory = Account(self.scope, Resource.MEMORY)
        self.relayed = medium.is_relayed(own.peer, other.peer)
        self.relay_limit_bytes = medium.relay_limit_bytes if self.relayed else None
        self._medium = medium
        self._frames = medium.policy.queue_frames
        self._delivered, self._incoming = trio.open_memory_channel[Frame](self._frames)
        self._error: PeerError | None = None
        self._unsent: list[Frame | None] = []  # while frozen; None ends the stream
        self._under_way: deque[tuple[float, Frame | None, int]] = deque()
        """With the time at which the sending of each began, and the memory that was taken for it."""
        self._unwritten: deque[Frame] = deque()
        """The frames that wait for an uplink that links share."""
        self._has_written = trio.lowlevel.ParkingLot()
        self._due = 0  # of those under way
        self._busy_until_s = 0.0
        self._last_due_s = 0.0
        self._space = trio.Event()
        self._silent_since_s: float | None = None
        self._keeps_alive = False
        self._wrote = False

    @property
    def version(self) -> int:
        return self._medium.version_between(self.own.peer, self.peer)

    async def wait_version(self) -> int:
        await trio.lowlevel.checkpoint()
        return self.version

    async def wait_direct(self) -> None:
        await self._medium.until_direct(self.own.peer, self.peer)

    @property
    def is_full(self) -> bool:
        return len(self._under_way) + len(self._unsent) >= self._frames

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._error is None and self.is_full:
            self._space = trio.Event()
            await self._space.wait()
        if self._error is None and not self._hold(frame.size_bytes):
            await self._wait_for_memory(frame.size_bytes)
        if self._error is not None:
            raise self._reason()
        size_bytes = frame.size_bytes
        for each in [frame] if self.own.tamper is None else self.own.tamper(self.peer, frame):
            self._send(each, size_bytes)
            size_bytes = 0
        self._hold(-size_bytes)  # it was not sent
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_written(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        last, until_s = (self._unwritten[-1] if self._unwritten else None), self._busy_until_s
        self._medium.call_at(until_s, self._note_written)
        while self._error is None and (self._unsent or last in self._unwritten or trio.current_time() < until_s):
            await self._has_written.park()
        if self._error is not None:
            raise self._reason()

    def _note_written(self) -> None:
        self._has_written.unpark_all()

    async def receive(self) -> Frame:
        try:
            frame = await self._incoming.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise self._reason() from None
        self._hold(-frame.size_bytes)
        return frame

    @property
    def held_bytes(self) -> int:
        """The bytes of all frames that wait at this end, counted one by one."""
        waiting = [frame for _, frame, _ in self._under_way if frame is not None]
        return sum(frame.size_bytes for frame in [*waiting, *self._incoming._state.data])

    async def end(self, reason: str) -> None:
        self.fail(PeerUnreachable(f"link closed: {reason}"))
        await trio.lowlevel.checkpoint()

    def fail(self, error: PeerError) -> None:
        """End this side now, and the far one when it hears of it."""
        if self._error is None:
            self._error = error.blame(self.peer)
            self._medium.note(f"end {self.own.peer} -> {self.peer}: {error.message}")
            self.connection.close()
            self._delivered.close()
            self._space.set()
            self._has_written.unpark_all()
            if not self.own.frozen:
                self.own.links.remove(self)
            if (uplink := self._medium.uplinks.get(self.own.peer)) is not None:
                uplink.drop(self)
                self._unwritten.clear()
            last_s = trio.current_time() + self._medium.policy.farewell_s
            self._under_way = deque(
                (began, frame if began <= last_s else None, 0) for began, frame, _ in self._under_way
            )
            self._send(None)

    def _evict(self) -> None:
        self._say_full()
        self.fail(PeerUnreachable("others have taken its place"))

    def _say_full(self) -> None:
        """Tell the far side, if it has opened the link, as a real link does."""
        if self._error is None and self.connection.worth is not Worth.OURS:
            self._send(farewell_of_full())

    def _hold(self, more_bytes: int, *, has_waited: bool = False) -> bool:
        """Whether there is memory for that."""
        return self.scope.is_closed or self._memory.resize(self._memory.amount + more_bytes, has_waited=has_waited)

    async def _wait_for_memory(self, more_bytes: int) -> None:
        """The link ends if there is none in time, as a real one does."""
        with trio.move_on_after(self._medium.policy.memory_patience_s):
            while self._error is None:
                await trio.sleep(LOOK_EVERY_S)
                if self._hold(more_bytes):
                    return
        if self._error is None and not self._hold(more_bytes, has_waited=True):
            self._say_full()
            self.fail(PeerUnreachable("no memory is left for what goes over this link"))

    def die(self) -> None:
        """The process is gone: what it had not sent is lost, and its system closes the connection."""
        self._unsent.clear()
        if self._error is None:
            self.fail(PeerUnreachable("connection lost"))
        else:  # while it was frozen
            self.own.links.remove(self)
            self._send(None)

    # On the way to the far side

    def _send(self, frame: Frame | None, held_bytes: int = 0) -> None:
        """`held_bytes` of memory are taken until it has arrived."""
        if self.own.frozen:
            self._hold(-held_bytes)
            self._unsent.append(frame)
            return
        medium = self._medium
        uplink = medium.uplinks.get(self.own.peer)
        if frame is not None and uplink is not None and not uplink.passes(self, frame):
            self._unwritten.append(frame)
            uplink.add(self, frame, partial(self._leave, frame, held_bytes))
            return
        self._set_off(frame, held_bytes)

    def _leave(self, frame: Frame, held_bytes: int) -> None:
        """It has been sent, over an uplink that links share."""
        self._unwritten.popleft()
        self._has_written.unpark_all()
        self._set_off(frame, held_bytes)

    def _set_off(self, frame: Frame | None, held_bytes: int) -> None:
        medium = self._medium
        conditions = medium.between(self.own.peer, self.peer)
        now_s = trio.current_time()
        began_s = sent_s = max(now_s, self._busy_until_s)
        if frame is not None:
            self._wrote = True
            if frame.session != NO_SESSION:
                self.own.meter.note_sent(len(frame.payload), len(frame.payload))
            sent_s = self._busy_until_s = began_s + frame.size_bytes / conditions.bytes_per_s
            if sent_s - began_s > (timeout_s := medium.policy.write_timeout_s):
                error = PeerUnreachable(f"took no data for {timeout_s:g} s")
                medium.call_at(began_s + timeout_s, lambda: self.fail(error))
        patience_s = medium.policy.silence_s
        took_s = conditions.travel_s(medium.rng, patience_s)
        if took_s > patience_s:
            error = PeerUnreachable(f"silent for {patience_s:g} s")
            medium.call_at(now_s + patience_s, lambda: self.far.fail(error))
        self._last_due_s = max(self._last_due_s, sent_s + took_s)
        self._under_way.append((began_s, frame, held_bytes))
        medium.call_at(self._last_due_s, self._arrive)

    def _arrive(self) -> None:
        self._due += 1
        self.flush()

    def flush(self) -> None:
        """Hand over what is due, unless it has to wait."""
        while self._due and not is_held_back(self._medium, self.own, self.other):
            self._due -= 1
            _, frame, held_bytes = self._under_way.popleft()
            self._hold(-held_bytes)
            self.far._take(frame)
            self._space.set()

    def wake(self) -> None:
        """Thawed: take what has arrived, find out whether the far side was silent for too long, send what was held."""
        if self._error is not None:  # while frozen
            self.own.links.remove(self)
        self.far.flush()
        since_s, patience_s = self._silent_since_s, self._medium.policy.silence_s
        if self._error is None and since_s is not None and trio.current_time() - since_s >= patience_s:
            return self._fall_silent(since_s)
        unsent, self._unsent = self._unsent, []
        for frame in unsent:
            self._send(frame)
        self._has_written.unpark_all()
        return None

    # On the near side

    def _take(self, frame: Frame | None) -> None:
        if frame is None:
            return self.fail(PeerUnreachable("closed the stream"))
        if frame.type is FrameType.HEARTBEAT or self._error is not None:
            return None
        if frame.session != NO_SESSION:
            self.own.meter.note_received(len(frame.payload), len(frame.payload))
        medium = self._medium
        duplication = medium.between(self.peer, self.own.peer).duplication
        again = duplication and frame.type not in ASKED_ONCE and medium.rng.random() < duplication
        if medium.trace is not None:
            twice = " twice" if again else ""
            medium.note(f"{self.peer} -> {self.own.peer} {medium.describe(frame)}{twice}")
        for _ in range(1 + bool(again)):
            if not self._hold(frame.size_bytes):
                self._say_full()
                return self.fail(PeerUnreachable("no memory is left for what goes over this link"))
            try:
                self._delivered.send_nowait(frame)
            except trio.WouldBlock:
                return self.fail(PeerUnreachable("what came was not taken in time"))
        return None

    def notice_silence(self) -> None:
        """Call when it may have begun or ended: the link ends if it lasts."""
        if is_heard(self._medium, self.other, self.own):
            self._silent_since_s = None
        elif self._silent_since_s is None:
            since_s = self._silent_since_s = trio.current_time()
            self._medium.call_at(since_s + self._medium.policy.silence_s, lambda: self._fall_silent(since_s))

    def _fall_silent(self, since_s: float) -> None:
        if self._silent_since_s == since_s and not self.own.frozen:
            self.fail(PeerUnreachable(f"silent for {self._medium.policy.silence_s:g} s"))

    def keep_alive(self) -> None:
        """Where frames get lost, idle links have heartbeats, so that one that loses too much dies; others need none."""
        if not self._keeps_alive and self._medium.between(self.own.peer, self.peer).loss:
            self._keeps_alive = True
            self._beat()

    def _beat(self) -> None:
        if self._error is None and self._medium.between(self.own.peer, self.peer).loss:
            if not self._wrote:
                self._send(Frame(FrameType.HEARTBEAT))
            self._wrote = False
            self._medium.call_at(trio.current_time() + self._medium.policy.heartbeat_s, self._beat)
        else:
            self._keeps_alive = False

    def _reason(self) -> PeerError:
        assert self._error is not None
        return self._error.again()
