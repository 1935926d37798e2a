"""A client's side of one hop of a session: asks its peer, knows where its KV stands, and logs what it was given."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.client.log import InputLog
from llmnode.core.ids import SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.errors import PeerError, RemoteProtocolError
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Open, Result, pack, unpack

if TYPE_CHECKING:
    from llmnode.client.connection import Connection
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Hop
    from llmnode.core.span import Span
    from llmnode.wire.frame import Buffer
    from llmnode.wire.payload import HiddenForm


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Where one hop's part of a step went, in microseconds. `round_trip_us` is ours, the rest is the peer's word."""

    peer: PeerId
    span: Span
    round_trip_us: int
    queue_us: int
    compute_us: int


class SessionHop:
    """One peer's part of a session. Whatever it raises is a PeerError that names peer and span.

    Its name is its own: who replaces a peer, perhaps the same one in its next life, starts with a name never used.
    """

    def __init__(self, hop: Hop, connection: Connection, form: HiddenForm, policy: ClientPolicy) -> None:
        self.hop = hop
        self.log = InputLog(form)
        self._connection = connection
        self._form = form
        self._policy = policy
        self._session = SessionId(secrets.token_bytes(SESSION_ID_BYTES))
        self._epoch = Epoch(0)
        self._next_step = Step(0)

    @property
    def position(self) -> int:
        """Number of positions in its KV."""
        return self.log.positions

    async def open(self, model: ModelInfo, max_length: int) -> None:
        request = Open(
            model_digest=model.digest,
            span_start=self.hop.span.start,
            span_end=self.hop.span.end,
            max_length=max_length,
            dtype=model.dtype,
            codec=self._form.codec,
        )
        frame = Frame(FrameType.OPEN, self._session, meta=pack(request))
        await self._ask(frame, FrameType.OPENED, self._policy.open_timeout_s)

    async def step(self, payload: Buffer, length: int) -> tuple[Buffer, HopTiming]:
        """Append `length` positions. Returns their hidden states after this hop's blocks, in the session's codec."""
        start = self.position
        frame = Frame(FrameType.STEP, self._session, self._epoch, self._next_step, start, length, b"", payload)
        asked = time.perf_counter_ns()
        answer = await self._ask(frame, FrameType.RESULT, self._policy.step_timeout_s)
        try:
            if (answer.start, answer.length) != (start, length):
                raise RemoteProtocolError("answered for other positions than it was asked for")
            self._form.check(answer)
            self._form.check_values(answer)  # the next hop would refuse them, and be blamed
            result = unpack(Result, answer.meta)
        except PeerError as error:
            raise self._blamed(error) from None
        self.log.append(payload, length)
        self._next_step = Step(self._next_step + 1)
        round_trip_us = (time.perf_counter_ns() - asked) // 1000
        timing = HopTiming(self.hop.peer, self.hop.span, round_trip_us, result.queue_us, result.compute_us)
        return answer.payload, timing

    async def truncate(self, position: int) -> None:
        """Forget the positions from `position` on, under a new epoch: even if the peer fails, the log is cut."""
        self.log.truncate(position)
        self._epoch = Epoch(self._epoch + 1)
        frame = Frame(FrameType.TRUNCATE, self._session, self._epoch, self._next_step, start=position)
        await self._ask(frame, FrameType.TRUNCATED, self._policy.step_timeout_s)

    async def close(self) -> None:
        """Tell the peer to free its KV. One that is gone has freed it already."""
        try:
            await self._connection.tell(Frame(FrameType.CLOSE, self._session))
        except PeerError:
            return

    async def _ask(self, frame: Frame, answer_type: FrameType, timeout_s: float) -> Frame:
        try:
            return await self._connection.ask(frame, answer_type, timeout_s)
        except PeerError as error:
            raise self._blamed(error) from None

    def _blamed(self, error: PeerError) -> PeerError:
        return error.blame(self.hop.peer, self.hop.span)
