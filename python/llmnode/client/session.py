"""An inference session: hidden states of one sequence, through every hop of a route, position by position.

It outlives its servers (Petals, Algorithm 1): each hop's inputs are logged here, on the client, and when a peer is lost
they are given to who takes its place, until its KV stands where the lost one stood.
"""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio

from llmnode.client.hop import SessionHop
from llmnode.errors import (
    LlmnodeError,
    LocalProtocolError,
    NoRoute,
    PeerError,
    PeerRefused,
    SessionClosed,
    SessionLost,
    single_error,
)
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence

    from llmnode.client.connection import Connection
    from llmnode.client.hop import HopTiming
    from llmnode.client.log import InputLog
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Route
    from llmnode.core.span import Span
    from llmnode.wire.frame import Buffer

log = logging.getLogger(__name__)

CAUSES_KEPT = 16
"""Of one step: the first failures, and the latest."""

FAILED_COMPUTATIONS = 6
"""That one step may meet; after more the fault is taken to be its own."""

ALL_WOULD_REFUSE = {
    RefusalCode.WRONG_POSITION,
    RefusalCode.STALE_EPOCH,
    RefusalCode.TOO_FAR_AHEAD,
    RefusalCode.CONFLICT,
    RefusalCode.BAD_MESSAGE,
}
"""What the session itself has done wrong. With any other refusal, of an unknown code too, others may accept it."""


class Detours(Protocol):
    """Who else holds a span: what a session asks when it has lost a peer."""

    def report(self, error: PeerError) -> None:
        """A peer failed; others are preferred to it for a while. A refusal is no failure."""

    async def find(
        self, span: Span, avoid: Collection[PeerId], *, hurry: bool
    ) -> tuple[Route, Mapping[PeerId, Connection]]:
        """Hops that cover `span`, over peers not in `avoid`; in a `hurry` also over peers that have failed lately.

        Raises NoRoute, or the PeerError of who could not be reached.
        """

    async def wait_changed(self) -> None:
        """Until other peers are known than now."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A peer was lost, and others took its place."""

    lost: PeerId
    span: Span
    taken_over_by: tuple[PeerId, ...]
    positions: int
    """How many were given again."""
    stall_s: float
    """From the moment that the loss was noticed until the session could go on."""


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

    async def step(self, hidden: Buffer) -> Buffer:
        """Append positions. hidden: (tokens, hidden_size) in fp32, as it leaves the embedding.

        Returns the same shape, as it leaves the last block. What crosses the wire is in the session's codec. Peers that
        fail are replaced meanwhile. Raises SessionLost if that is of no use, after which only closing is left, as it is
        after a step that was cancelled; and NoRoute if nobody holds a lost peer's blocks: the same step may be tried
        again later.
        """
        self._check_open()
        row_bytes = self._model.row_bytes
        length, rest = divmod(len(hidden), row_bytes)
        if rest or not length or self._position + length > self.max_length:
            raise LocalProtocolError(
                f"{len(hidden)} bytes ({row_bytes} a position) at position {self._position} of {self.max_length}"
            )
        # As it is from hop to hop: a lossy codec loses once a hop, not twice. It is logged, and `hidden` the caller's.
        payload: Buffer = bytes(self._form.encode(hidden))
        with self._ends_if_broken_off():
            await self._go_back_to(self._position)  # some hops may be ahead, if the last try ended in NoRoute
            payload = await self._step_all(payload, length)
            output = decode_hidden(payload, self._form.codec, length * self._model.hidden_size)
        self._position += length
        return output

    async def truncate(self, position: int) -> None:
        """Forget the positions from `position` on, at every hop. Raises as `step` does."""
        self._check_open()
        if not 0 <= position <= self._position:
            raise LocalProtocolError(f"cannot go back to position {position} from {self._position}")
        self._position = position
        with self._ends_if_broken_off():
            await self._go_back_to(position)

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
        except BaseException:  # a group, if it was cancelled while it opened several hops
            self._ended = SessionClosed("it was cancelled on the way through its hops")
            raise

    # The way through the hops

    async def _step_all(self, payload: Buffer, length: int) -> Buffer:
        timings: list[HopTiming] = []
        trouble = _Trouble()
        index = 0
        while index < len(self._hops):
            try:
                output, timing = await self._hops[index].step(payload, length)
            except PeerError as error:
                await self._recover(index, error, trouble)
            else:
                payload = output
                timings.append(timing)
                index += 1
        self.timings = timings
        return payload

    async def _go_back_to(self, position: int) -> None:
        trouble = _Trouble()
        index = 0
        while index < len(self._hops):
            hop = self._hops[index]
            try:
                if hop.position > position:
                    await hop.truncate(position)
                index += 1
            except PeerError as error:
                await self._recover(index, error, trouble)

    # Recovery

    async def _recover(self, index: int, error: PeerError, trouble: _Trouble) -> None:
        """Put others in the place of the hop at `index`, with the KV that it had. Raises SessionLost or NoRoute."""
        detours, lost, began = self._detours, self._hops[index], trio.current_time()
        if detours is None:
            raise SessionLost([error]) from error
        trouble.note(error, detours)
        trouble.deadline_s = min(trouble.deadline_s, began + self._policy.recovery_timeout_s)
        await lost.close()  # if it lives it may be asked to take its own place, and has no room for both
        missing: NoRoute | None = None
        while self._ended is None and trio.current_time() < trouble.deadline_s:
            try:
                with trio.fail_at(trouble.deadline_s):
                    route, connections = await detours.find(lost.hop.span, trouble.refusers, hurry=missing is not None)
                    hops = await self._rebuild(route, connections, lost.log)
            except NoRoute as found:
                missing = found
                trouble.refusers.clear()  # they may have room by and by
                with trio.move_on_after(self._policy.retry_s):
                    await detours.wait_changed()
            except PeerError as failure:
                missing = None
                trouble.note(failure, detours)
            except trio.TooSlowError:
                break
            else:
                self._replace(index, hops, began, error)
                return
        self._check_open()
        raise missing or SessionLost(trouble.causes)

    async def _rebuild(
        self, route: Route, connections: Mapping[PeerId, Connection], inputs: InputLog
    ) -> list[SessionHop]:
        """New hops that have computed `inputs`, which the first of them is given. Raises PeerError."""
        hops = await self._open_hops(route, connections)
        try:
            for payload, length in inputs.chunks(self._policy.chunk_tokens):
                for hop in hops:
                    payload, _ = await hop.step(payload, length)
            self._check_open()  # nobody would close these
        except BaseException:
            with trio.move_on_after(self._policy.open_timeout_s, shield=True):
                for hop in hops:
                    await hop.close()
            raise
        return hops

    def _replace(self, index: int, hops: list[SessionHop], began: float, error: PeerError) -> None:
        lost = self._hops[index]
        self._hops[index : index + 1] = hops
        stall_s = trio.current_time() - began
        others = tuple(each.hop.peer for each in hops)
        self.recoveries.append(Recovery(lost.hop.peer, lost.hop.span, others, lost.position, stall_s))
        log.info("recovered span=%s positions=%d in %.3f s: %s", lost.hop.span, lost.position, stall_s, error)

    async def _open_hops(self, route: Route, connections: Mapping[PeerId, Connection]) -> list[SessionHop]:
        """Raises the PeerError of one that does not open; then none is left open."""
        hops = [SessionHop(hop, connections[hop.peer], self._form, self._policy) for hop in route]
        try:
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in hops:
                        nursery.start_soon(hop.open, self._model, self.max_length)
        except BaseException:
            with trio.move_on_after(self._policy.open_timeout_s, shield=True):
                for hop in hops:
                    await hop.close()
            raise
        return hops


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
    await session.open(route, connections)
    try:
        yield session
    finally:
        with trio.move_on_after(policy.open_timeout_s, shield=True):
            await session.close()


@dataclass(slots=True)
class _Trouble:
    """What failed on the way of one step, through whatever hops and recoveries."""

    causes: list[PeerError] = field(default_factory=list)
    refusers: set[PeerId] = field(default_factory=set)
    failed_computations: int = 0
    deadline_s: float = math.inf

    def note(self, error: PeerError, detours: Detours) -> None:
        """Raises SessionLost for what others would not do better."""
        detours.report(error)
        self.causes = [*self.causes[: CAUSES_KEPT - 1], error]
        if isinstance(error, PeerRefused):
            if error.code in ALL_WOULD_REFUSE:
                raise SessionLost(self.causes) from error
            self.failed_computations += error.code == RefusalCode.COMPUTE_FAILED
            if self.failed_computations > FAILED_COMPUTATIONS:
                raise SessionLost(self.causes) from error
            if error.peer is not None:
                self.refusers.add(error.peer)
