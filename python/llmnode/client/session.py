"""An inference session: hidden states of one sequence, through every hop of a route, position by position."""

from __future__ import annotations

import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.errors import (
    LlmnodeError,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    SessionClosed,
    SessionLost,
    single_error,
)
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Open, Result, pack, unpack
from llmnode.wire.payload import Codec, HiddenForm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from llmnode.client.connection import Connection
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Hop, Route
    from llmnode.core.span import Span
    from llmnode.wire.frame import Buffer


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Where one hop's part of a step went, in microseconds. `round_trip_us` is ours, the rest is the peer's word."""

    peer: PeerId
    span: Span
    round_trip_us: int
    queue_us: int
    compute_us: int


class InferenceSession:
    """Petals' primitive: `step` runs hidden states through all blocks and remembers them in the KV of every hop.

    Made by `open_session`. Not for several tasks at once.
    """

    def __init__(
        self,
        route: Route,
        connections: Mapping[PeerId, Connection],
        model: ModelInfo,
        max_length: int,
        codec: Codec,
        policy: ClientPolicy,
    ) -> None:
        self._route = route
        self._connections = connections
        self._model = model
        self._form = HiddenForm(model.hidden_size, codec)
        self._policy = policy
        self._session = SessionId(secrets.token_bytes(SESSION_ID_BYTES))
        self._epoch = Epoch(0)
        self._next_step = Step(0)
        self._position = 0
        self._ended: LlmnodeError | None = None
        self.max_length = max_length
        self.timings: Sequence[HopTiming] = ()
        """Of the latest step, one per hop."""

    @property
    def position(self) -> int:
        """Number of positions in the KV of every hop."""
        return self._position

    async def open(self) -> None:
        async with trio.open_nursery() as nursery:
            for hop in self._route:
                nursery.start_soon(self._open_hop, hop)

    async def step(self, hidden: Buffer) -> Buffer:
        """Append positions. hidden: (tokens, hidden_size) in fp32, as it leaves the embedding.

        Returns the same shape, as it leaves the last block. What crosses the wire is in the session's codec.
        Raises SessionLost. After that, or if it is cancelled, only closing is left.
        """
        self._check_open()
        row_bytes = self._model.row_bytes
        length, rest = divmod(len(hidden), row_bytes)
        if rest or not length or self._position + length > self.max_length:
            raise LocalProtocolError(
                f"{len(hidden)} bytes ({row_bytes} a position) at position {self._position} of {self.max_length}"
            )
        payload = self._form.encode(hidden)  # as it is from hop to hop: a lossy codec loses once a hop, not twice
        timings = []
        with self._ends_if_broken_off():
            for hop in self._route:
                answer, timing = await self._step_hop(hop, payload, length)
                payload = answer.payload
                timings.append(timing)
            output = self._decode(answer)
        self.timings = timings
        self._position += length
        self._next_step = Step(self._next_step + 1)
        return output

    async def truncate(self, position: int) -> None:
        """Forget the positions from `position` on, at every hop, under a new epoch."""
        self._check_open()
        if not 0 <= position <= self._position:
            raise LocalProtocolError(f"cannot go back to position {position} from {self._position}")
        self._epoch = Epoch(self._epoch + 1)
        frame = Frame(FrameType.TRUNCATE, self._session, self._epoch, self._next_step, start=position)
        with self._ends_if_broken_off():
            for hop in self._route:
                await self._connections[hop.peer].ask(frame, FrameType.TRUNCATED, self._policy.step_timeout_s)
        self._position = position

    async def close(self) -> None:
        """Tell every hop to free its KV. Peers that are gone have freed it already."""
        self._ended = self._ended or SessionClosed("closed")
        for hop in self._route:
            try:
                await self._connections[hop.peer].tell(Frame(FrameType.CLOSE, self._session))
            except PeerError:
                continue

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionClosed(f"the session has ended: {self._ended}")

    @contextmanager
    def _ends_if_broken_off(self) -> Iterator[None]:
        """Some hops may have done their part and others not: going on would take a late answer for a new one."""
        try:
            yield
        except PeerError as error:
            self._ended = SessionLost([error])
            raise self._ended from error
        except trio.Cancelled:
            self._ended = SessionClosed("it was cancelled on the way through its hops")
            raise

    async def _open_hop(self, hop: Hop) -> None:
        request = Open(
            model_digest=self._model.digest,
            span_start=hop.span.start,
            span_end=hop.span.end,
            max_length=self.max_length,
            dtype=self._model.dtype,
            codec=self._form.codec,
        )
        frame = Frame(FrameType.OPEN, self._session, meta=pack(request))
        try:
            await self._connections[hop.peer].ask(frame, FrameType.OPENED, self._policy.open_timeout_s)
        except PeerError as error:
            raise error.blame(hop.peer, hop.span) from None

    def _decode(self, answer: Frame) -> Buffer:
        last = self._route[-1]
        try:
            return self._form.decode(answer)
        except PeerError as error:
            raise error.blame(last.peer, last.span) from None

    async def _step_hop(self, hop: Hop, payload: Buffer, length: int) -> tuple[Frame, HopTiming]:
        frame = Frame(FrameType.STEP, self._session, self._epoch, self._next_step, self._position, length, b"", payload)
        asked = time.perf_counter_ns()
        try:
            answer = await self._connections[hop.peer].ask(frame, FrameType.RESULT, self._policy.step_timeout_s)
            if (answer.start, answer.length) != (frame.start, frame.length):
                raise RemoteProtocolError("answered for other positions than it was asked for")
            self._form.check(answer)
            result = unpack(Result, answer.meta)
        except PeerError as error:
            raise error.blame(hop.peer, hop.span) from None
        round_trip_us = (time.perf_counter_ns() - asked) // 1000
        return answer, HopTiming(hop.peer, hop.span, round_trip_us, result.queue_us, result.compute_us)


@asynccontextmanager
async def open_session(
    route: Route,
    connections: Mapping[PeerId, Connection],
    model: ModelInfo,
    max_length: int,
    codec: Codec,
    policy: ClientPolicy,
) -> AsyncIterator[InferenceSession]:
    """Open a session with KV for `max_length` positions at every hop; it is closed with the context.

    Raises the PeerError of the first hop that does not open.
    """
    session = InferenceSession(route, connections, model, max_length, codec, policy)
    try:
        with single_error():
            await session.open()
        yield session
    finally:
        with trio.move_on_after(policy.open_timeout_s, shield=True):
            await session.close()
