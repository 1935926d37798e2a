"""An inference session: hidden states of one sequence, through every hop of a route, position by position.

Hidden states go from hop to hop directly, and every hop's output comes here as well: to be checked against what the
next hop says it computed, and to be logged. So a session outlives its servers (Petals, Algorithm 1, with the cache at
the client): when a peer is lost, its inputs are given to who takes its place. Whatever fails, all hops go back to the
last position that all of them had computed, under a new epoch, and the rest is done again.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.client.flight import fly
from llmnode.client.hop import Chunk, SessionHop
from llmnode.client.recovery import Recovery, Trouble
from llmnode.core.ids import Epoch, Step
from llmnode.errors import (
    LlmnodeError,
    LocalProtocolError,
    NoRoute,
    PeerError,
    SessionClosed,
    SessionLost,
    single_error,
)
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from llmnode.client.connection import Connection
    from llmnode.client.flight import Flight
    from llmnode.client.hop import HopTiming
    from llmnode.client.log import InputLog
    from llmnode.client.recovery import Detours
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Route
    from llmnode.wire.frame import Buffer

log = logging.getLogger(__name__)


class InferenceSession:
    """Petals' primitive: `step` runs hidden states through all blocks and remembers them in the KV of every hop.

    Made by `open_session`. Not for several tasks at once, except that any may close it.
    """

    def __init__(
        self, model: ModelInfo, max_length: int, codec: Codec, policy: ClientPolicy, detours: Detours | None
    ) -> None:
        self.max_length = max_length
        self.timings: Sequence[HopTiming] = ()
        """Of the latest step, one per hop."""
        self.recoveries: list[Recovery] = []
        self._model = model
        self._form = HiddenForm(model.hidden_size, codec)
        self._policy = policy
        self._detours = detours
        self._hops: list[SessionHop] = []
        self._position = 0
        self._epoch = Epoch(0)
        self._step = Step(0)
        self._settled = True
        self._ended: LlmnodeError | None = None

    @property
    def position(self) -> int:
        """Number of positions in the KV of every hop."""
        return self._position

    @property
    def route(self) -> Route:
        """The hops it goes through now."""
        return tuple(each.hop for each in self._hops)

    async def open(self, route: Route, connections: Mapping[PeerId, Connection]) -> None:
        self._hops = await self._open_hops(route, connections)
        await self._for_all_hops(self._introduce)

    async def step(self, hidden: Buffer) -> Buffer:
        """Append positions. hidden: (tokens, hidden_size) in fp32, as it leaves the embedding.

        Returns the same shape, as it leaves the last block. What crosses the wire is in the session's codec, in chunks
        of the policy's size, several under way at once. Peers that fail are replaced meanwhile. Raises SessionLost if
        that is of no use, after which only closing is left, as it is after a step that was cancelled; and NoRoute if
        nobody holds a lost peer's blocks: the session stands where it stood, and the same step may be tried again.
        """
        self._check_open()
        row_bytes = self._model.row_bytes
        length, rest = divmod(len(hidden), row_bytes)
        if rest or not length or self._position + length > self.max_length:
            raise LocalProtocolError(
                f"{len(hidden)} bytes ({row_bytes} a position) at position {self._position} of {self.max_length}"
            )
        waiting = deque(self._chunks(hidden))
        outputs: list[Buffer] = []
        await self._persist(lambda: self._stream(waiting, outputs), position_before=self._position)
        return outputs[0] if len(outputs) == 1 else b"".join(outputs)

    async def truncate(self, position: int) -> None:
        """Forget the positions from `position` on, at every hop. Raises as `step` does."""
        self._check_open()
        if not 0 <= position <= self._position:
            raise LocalProtocolError(f"cannot go back to position {position} from {self._position}")
        self._position = position
        self._settled = False
        await self._persist(trio.lowlevel.checkpoint, position_before=position)

    async def close(self) -> None:
        """Tell every hop to free its KV."""
        self._ended = self._ended or SessionClosed("closed")
        for hop in self._hops:
            await hop.close()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionClosed(f"the session has ended: {self._ended}")

    @contextmanager
    def _ends_if_broken_off(self) -> Iterator[None]:
        """Some hops may have done their part and others not: going on would take a late answer for a new one."""
        try:
            yield
        except SessionLost as error:
            self._ended = error
            raise
        except LlmnodeError:
            raise
        except BaseException:  # a group, if it was cancelled while several hops were busy
            self._ended = SessionClosed("it was cancelled on the way through its hops")
            raise

    # The way through the hops

    def _chunks(self, hidden: Buffer) -> Iterator[tuple[Buffer, int]]:
        """Payloads and their lengths. They go on from hop to hop as they are: a lossy codec loses once, not twice."""
        row_bytes, most = self._model.row_bytes, self._policy.chunk_tokens
        for at in range(0, len(hidden), most * row_bytes):
            rows = memoryview(hidden)[at : at + most * row_bytes]
            yield bytes(self._form.encode(rows)), len(rows) // row_bytes  # logged, and `hidden` is the caller's

    async def _persist(self, work: Callable[[], Awaitable[None]], *, position_before: int) -> None:
        """Do `work` with all hops at the session's position, and the rest of it again after what could be mended."""
        trouble = Trouble()
        with self._ends_if_broken_off():
            while True:
                try:
                    await self._settle()
                    return await work()
                except PeerError as error:
                    self._settled = False
                    try:
                        await self._recover(error, trouble)
                    except NoRoute:
                        self._position = position_before
                        raise

    async def _settle(self) -> None:
        """Have all hops stand at the session's position, in one epoch, and know their neighbours."""
        if not self._settled:
            self._epoch = Epoch(self._epoch + 1)
            await self._for_all_hops(lambda hop: hop.align(self._epoch, self._step, self._position))
            await self._for_all_hops(self._introduce)
            self._settled = True

    async def _introduce(self, hop: SessionHop) -> None:
        if self._policy.push:
            index = self._hops.index(hop)
            before, after = self._hops[max(0, index - 1) : index], self._hops[index + 1 : index + 2]
            await hop.stand_between(next(iter(before), None), next(iter(after), None), self._step)

    async def _for_all_hops(self, act: Callable[[SessionHop], Awaitable[None]]) -> None:
        with single_error():
            async with trio.open_nursery() as nursery:
                for hop in self._hops:
                    nursery.start_soon(act, hop)

    async def _stream(self, waiting: deque[tuple[Buffer, int]], outputs: list[Buffer]) -> None:
        """All of `waiting` through all hops, several chunks under way; what has passed them goes over to `outputs`."""
        if len(waiting) == 1:
            payload, length = waiting[0]
            outputs.append(
                self._land(await fly(self._hops, self._chunk(0, self._position, length), payload, self._policy))
            )
            return
        window = trio.Semaphore(self._policy.chunks_ahead)
        start, landed = self._position, trio.Event()
        landed.set()

        async def pass_all(
            chunk: Chunk, payload: Buffer, first: trio.Event, done: trio.Event, *, task_status: trio.TaskStatus[None]
        ) -> None:
            flight = await fly(self._hops, chunk, payload, self._policy, task_status)
            await first.wait()  # they land in order
            outputs.append(self._land(flight))
            waiting.popleft()
            done.set()
            window.release()

        with single_error():
            async with trio.open_nursery() as nursery:
                for number, (payload, length) in enumerate(list(waiting)):
                    await window.acquire()
                    first, landed = landed, trio.Event()
                    chunk = self._chunk(number, start, length)
                    await nursery.start(pass_all, chunk, payload, first, landed)
                    start += length

    def _land(self, flight: Flight) -> Buffer:
        """All hops have computed the chunk: the session stands after it now. Returns what it became, in fp32."""
        output = decode_hidden(flight.output, self._form.codec, flight.chunk.length * self._model.hidden_size)
        for hop, payload in zip(self._hops, flight.inputs, strict=True):
            hop.inputs.append(payload, flight.chunk.length)
        self._position += flight.chunk.length
        self._step = Step(self._step + 1)
        self.timings = flight.timings
        return output

    # Recovery

    async def _recover(self, error: PeerError, trouble: Trouble) -> None:
        """Put others in the place of all hops that have failed. Raises SessionLost or NoRoute."""
        if self._detours is None or all(hop.failure is None for hop in self._hops):
            raise SessionLost([error]) from error
        trouble.deadline_s = min(trouble.deadline_s, trio.current_time() + self._policy.recovery_timeout_s)
        while (index := next((i for i, hop in enumerate(self._hops) if hop.failure is not None), None)) is not None:
            await self._replace(index, self._detours, trouble)

    async def _replace(self, index: int, detours: Detours, trouble: Trouble) -> None:
        lost, began = self._hops[index], trio.current_time()
        assert lost.failure is not None
        lost.inputs.truncate(self._position)
        trouble.note(lost.failure, detours)
        await self._abandon([lost])  # if it lives it may be asked to take its own place, and has no room for both
        missing: NoRoute | None = None
        hurry = False
        while self._ended is None and trio.current_time() < trouble.deadline_s:
            try:
                with trio.fail_at(trouble.deadline_s):
                    route, connections = await detours.find(lost.hop.span, trouble.failed, hurry=hurry)
                    hops = await self._rebuild(route, connections, lost.inputs)
            except NoRoute as found:
                missing = found
                if hurry:  # everybody has been asked
                    log.warning("%s; trying again for %.0f s", found, trouble.deadline_s - trio.current_time())
                    with trio.move_on_after(self._policy.retry_s):
                        await detours.wait_changed()
                    trouble.failed.clear()  # they may be back, or have room, by now
                hurry = not hurry
            except PeerError as failure:
                missing = None
                trouble.note(failure, detours)
            except trio.TooSlowError:
                break
            else:
                self._hops[index : index + 1] = hops
                self._note_recovery(lost, hops, trio.current_time() - began)
                return
        self._check_open()
        raise missing or NoRoute([lost.hop.span], hint=str(trouble.causes[-1]))

    async def _rebuild(
        self, route: Route, connections: Mapping[PeerId, Connection], inputs: InputLog
    ) -> list[SessionHop]:
        """New hops that have computed `inputs`, which the first of them is given. Raises PeerError."""
        hops = await self._open_hops(route, connections)
        try:
            start = 0
            for step, (payload, length) in enumerate(inputs.chunks(self._policy.chunk_tokens)):
                flight = await fly(hops, Chunk(Epoch(0), Step(step), start, length), payload, self._policy)
                for hop, given in zip(hops, flight.inputs, strict=True):
                    hop.inputs.append(given, length)
                start += length
            self._check_open()  # nobody would close these
        except BaseException:
            await self._abandon(hops)
            raise
        return hops

    async def _open_hops(self, route: Route, connections: Mapping[PeerId, Connection]) -> list[SessionHop]:
        """Raises the PeerError of one that does not open; then none is left open."""
        hops = [SessionHop(hop, connections[hop.peer], self._form, self._policy) for hop in route]
        try:
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in hops:
                        nursery.start_soon(hop.open, self._model, self.max_length)
        except BaseException:
            await self._abandon(hops)
            raise
        return hops

    async def _abandon(self, hops: Sequence[SessionHop]) -> None:
        with trio.move_on_after(self._policy.open_timeout_s, shield=True):
            for hop in hops:
                await hop.close()

    def _note_recovery(self, lost: SessionHop, hops: Sequence[SessionHop], stall_s: float) -> None:
        others = tuple(each.hop.peer for each in hops)
        positions = lost.inputs.positions
        self.recoveries.append(Recovery(lost.hop.peer, lost.hop.span, others, positions, stall_s))
        log.info("recovered span=%s positions=%d in %.3f s: %s", lost.hop.span, positions, stall_s, lost.failure)

    def _chunk(self, number: int, start: int, length: int) -> Chunk:
        return Chunk(self._epoch, Step(self._step + number), start, length)


@asynccontextmanager
async def open_session(
    route: Route,
    connections: Mapping[PeerId, Connection],
    model: ModelInfo,
    max_length: int,
    codec: Codec,
    policy: ClientPolicy,
    detours: Detours | None = None,
) -> AsyncIterator[InferenceSession]:
    """Open a session with KV for `max_length` positions at every hop; it is closed with the context.

    Without `detours` it ends with the first peer that it loses. Raises the PeerError of the first hop that does not
    open.
    """
    session = InferenceSession(model, max_length, codec, policy, detours)
    try:
        await session.open(route, connections)
        yield session
    finally:
        with trio.move_on_after(policy.open_timeout_s, shield=True):
            await session.close()
