"""The client's half of one hop of a session, as a state machine without clock, socket or task.

Its methods return the frames to send, and are told the answers. The other half is the server's `stage.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.core.ids import NO_SESSION, Epoch, PeerId, SessionId, Step
from llmnode.core.peers.peer_speed import Overtime, PeerSpeed
from llmnode.errors import PeerError, PeerRefused, RemoteProtocolError
from llmnode.wire import deep_prompts
from llmnode.wire.chunk import Hidden
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.log import PayloadLog
from llmnode.wire.messages import (
    PROMPTS,
    ForkRequest,
    Lease,
    Leased,
    Neighbours,
    Opened,
    OpenRequest,
    RefusalCode,
    Replay,
    Replayed,
    Result,
    Resumed,
    pack,
    unpack,
)
from llmnode.wire.open_extensions import open_extensions
from llmnode.wire.profile import profile_fields
from llmnode.wire.push_state import PushState
from llmnode.wire.refusal import memory_in_s

if TYPE_CHECKING:
    from llmnode.core.operations import DeepPrompts
    from llmnode.core.peers.peer_speed import PromisedTime
    from llmnode.core.route import Hop
    from llmnode.wire.chunk import Chunk
    from llmnode.wire.frame import Buffer
    from llmnode.wire.session_terms import SessionTerms


_FIRST = Step(0)


@dataclass(frozen=True, slots=True)
class Request:
    """A frame to send, and the answer that is due within `timeout_s`."""

    frame: Frame
    answer: FrameType
    timeout_s: float
    introduces: PeerId | None = None
    """A peer that the frame names, which its receiver has to know before it comes."""


class HopState:
    """One peer's part of a session. `session` is its own name of the session.

    A peer that replaces another one, perhaps the same peer in its next life, gets a name that was never used.
    """

    def __init__(self, hop: Hop, terms: SessionTerms, session: SessionId) -> None:
        self.hop = hop
        self.terms = terms
        self.session = session
        self.inputs = PayloadLog(terms.form)
        """Its inputs at the positions that all hops have computed, as far as they are logged here."""
        self.failure: PeerError | None = None
        """The first failure: the hop is lost."""
        self.pushing = PushState(terms.policy.push)
        self.pace = PeerSpeed()
        self.promised: PromisedTime | None = None
        """The peer is held to it, if others could take its place."""
        self.has_computed = False
        """It has computed a chunk."""
        self.overtime = Overtime(terms.policy.standing)
        self.memory_refusals = 0
        """The steps for which the peer had no memory, and which it was given again."""
        self.under_way = 0
        """The positions that it may be computing in this epoch."""
        self.is_open = False
        self.nonce = b""
        """The peer's own for this session: all receipts have it."""
        self.is_leased = False
        self.keeps_outputs = terms.policy.recovery.upstream_logs and hop.span.end < terms.model.blocks
        self._form = terms.form
        self._neighbours: Neighbours | None = None  # as it was told, and does
        self._asked = Neighbours("", "", NO_SESSION, quiet=False, again=False)  # as it was told last

    @property
    def _prompts(self) -> DeepPrompts:
        return self.terms.prompts.of_blocks(self.hop.span.start, self.hop.span.end)

    def check_prompts(self) -> None:
        """Raises PeerRefused for more prompts than servers take: they may fit peers that have fewer blocks."""
        if (size_bytes := self._prompts.size_bytes) > (most := deep_prompts.MOST_SESSION_BYTES):
            what = f"the deep prompts of blocks {self.hop.span} have {size_bytes} bytes, and servers take {most}"
            raise self.blame(PeerRefused(RefusalCode.NO_ROOM, f"{what}: use fewer prompts, or servers of fewer blocks"))

    # Requests

    def open(self, epoch: Epoch, at_once: int = 0) -> Request:
        """`at_once` is the number of positions that come as soon as it is open."""
        terms, span, prompts = self.terms, self.hop.span, self._prompts
        message = OpenRequest(
            **profile_fields(terms.model.profile),
            span_start=span.start,
            span_end=span.end,
            max_length=terms.max_length,
            codec=terms.codec,
            priority=terms.policy.priority.word,
            keep_outputs=self.keeps_outputs,
            extensions=open_extensions(prompts, at_once),
            required=[PROMPTS] if prompts else None,
        )
        frame = Frame(FrameType.OPEN, self.session, epoch, meta=pack(message), payload=prompts.values)
        timeout_s = terms.policy.open_timeout_s + prompts.size_bytes / terms.policy.passes.bytes_per_s
        return Request(frame, FrameType.OPENED, timeout_s)

    def resume(self, epoch: Epoch, step: Step = _FIRST) -> Request:
        """Moves the session to the connection that this is sent over."""
        frame = Frame(FrameType.RESUME, self.session, epoch, step)
        return Request(frame, FrameType.RESUMED, self.terms.policy.open_timeout_s)

    def truncate(self, epoch: Epoch, step: Step, position: int) -> Request:
        """Has the KV end at `position`, whatever was computed beyond; the next step is to be `step` of `epoch`."""
        self.inputs.truncate(position)
        frame = Frame(FrameType.TRUNCATE, self.session, epoch, step, start=position)
        return Request(frame, FrameType.TRUNCATED, self.answer_timeout_s())

    def copy(self, source: HopState, shared: int, epoch: Epoch, step: Step, position: int) -> Request:
        """Has KV and log be those of `source`, at the same peer, up to `position`.

        The first `shared` positions are the same already, if the hop is open. If it is not, it must be opened first.
        """
        self.inputs = source.inputs.copy()
        self.inputs.truncate(position)
        message = ForkRequest(source=source.session, shared=shared if self.is_open else 0)
        frame = Frame(FrameType.FORK, self.session, epoch, step, start=position, meta=pack(message))
        return Request(frame, FrameType.FORKED, max(self.answer_timeout_s(), source.answer_timeout_s()))

    def set_neighbours(
        self, before: HopState | None, after: HopState | None, epoch: Epoch, step: Step, now_s: float, *, quiet: bool
    ) -> Request | None:
        """Has it take steps from the hop before, and push results to the one after. None if it does that already.

        If `quiet`, nobody wants the results of this hop: it only logs them.
        """
        receiver = after if after is not None and self.pushing.is_wanted_to(after.hop.peer, now_s) else None
        asked = Neighbours(
            sender=before.hop.peer if before and before.pushing.is_trusted else "",
            receiver=receiver.hop.peer if receiver else "",
            receiver_session=receiver.session if receiver else NO_SESSION,
            quiet=quiet,
            again=False,
        )
        if asked == self._neighbours:
            return None
        self.pushing.receiver = self._neighbours = None  # until it answers, nobody knows what it does
        self._asked = asked
        meta = pack(replace(asked, again=self.pushing.has_failed_to(asked.receiver)))
        frame = Frame(FrameType.NEIGHBOURS, self.session, epoch, step, meta=meta)
        introduces = receiver.hop.peer if receiver else None  # a server pushes to no peer that it does not know
        timeout_s = self.answer_timeout_s() if self.is_open else self.terms.policy.open_timeout_s
        return Request(frame, FrameType.FORWARDED, timeout_s, introduces)

    def takes_steps_of(self, before: HopState) -> bool:
        """Whether it was told to take steps from the hop before, which may give it others than it tells the client.

        It was told so until it is told something else, whether that hop is still trusted or not.
        """
        return self._asked.sender == before.hop.peer

    def lease(self, epoch: Epoch, step: Step) -> Request:
        """Asks that the session outlive our connection."""
        self.is_leased = False
        frame = self._lease(epoch, step, leaves=False)
        return Request(frame, FrameType.LEASED, self.terms.policy.open_timeout_s)

    def replay(self, chunk: Chunk, *, push: bool) -> Request:
        """Asks for the output of `chunk` again, from its log: pushed to the next hop if it can and that is wanted."""
        frame = self._about(FrameType.REPLAY, chunk, pack(Replay(push)))
        return Request(frame, FrameType.REPLAYED, self.answer_timeout_s(chunk.length))

    def give(self, chunk: Chunk, payload: Buffer) -> Frame:
        """The STEP with its input."""
        return self._about(FrameType.STEP, chunk, payload=payload)

    def goodbye(self, *, keep: bool) -> Frame:
        """Has the peer free its KV, or `keep` it for its lease."""
        if keep and self.is_leased:
            return self._lease(Epoch(0), Step(0), leaves=True)
        return Frame(FrameType.CLOSE, self.session)

    # Answers

    def answered(self, request: Request, answer: Frame) -> None:
        """The peer did as the request says. Raises RemoteProtocolError."""
        match request.frame.type:
            case FrameType.OPEN:
                self.is_open = True
                self.nonce = unpack(Opened, answer.meta).nonce if answer.meta else b""
            case FrameType.NEIGHBOURS:
                self._confirm(self._asked)
            case FrameType.TRUNCATE | FrameType.FORK:
                self.under_way = 0
            case FrameType.LEASE:
                self.is_leased = unpack(Leased, answer.meta).lease_ms > 0

    def refused(self, request: Request, refusal: PeerRefused, now_s: float) -> None:
        """Raises the refusal, unless it only says that the peer cannot push: then its results come to the client."""
        if request.frame.type is not FrameType.NEIGHBOURS or refusal.code != RefusalCode.CANNOT_FORWARD:
            raise refusal
        self.pushing.fail(PeerId(self._asked.receiver), now_s, refusal.retry_after_s)
        self._confirm(replace(self._asked, receiver="", receiver_session=NO_SESSION))

    def taken_over(self, answer: Frame, epoch: Epoch, position: int) -> None:
        """The session that it was to have kept is open. Raises PeerRefused unless that stayed in `epoch` and has
        `position` or more.
        """
        stands = unpack(Resumed, answer.meta)
        if stands.epoch != epoch or stands.position < position:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, f"has gone back, to {stands.position} or before")
        self.is_open = True

    def moved(self, answer: Frame, epoch: Epoch, position: int) -> None:
        """The session goes on over another connection. Raises RemoteProtocolError if it is not as it was."""
        stands = unpack(Resumed, answer.meta)
        if (stands.epoch, stands.position) != (epoch, position):
            raise RemoteProtocolError(f"stands at {stands.position} of epoch {stands.epoch} all of a sudden")

    def computed(self, chunk: Chunk, answer: Frame, now_s: float) -> tuple[Hidden, Result]:
        """Its output for `chunk`. Whether it computed the right input is not checked. Raises RemoteProtocolError."""
        result = unpack(Result, answer.meta)
        if not result.pushed and chunk.length <= self.terms.policy.relayed.step_positions:
            self.not_pushed(now_s)  # servers do not push more than a step through relays
        return self._read(chunk, answer, result.output_digest, pushed=result.pushed), result

    def replayed(self, chunk: Chunk, answer: Frame, *, push: bool) -> Hidden:
        """Its logged output. Raises RemoteProtocolError."""
        replayed = unpack(Replayed, answer.meta)
        return self._read(chunk, answer, replayed.output_digest, pushed=push and replayed.pushed)

    def not_pushed(self, now_s: float) -> None:
        """A push got lost, or was not made. From now on, and for a while, its results come by way of the client."""
        if self.pushing.receiver is not None:
            self.pushing.fail(self.pushing.receiver, now_s)
            self._neighbours = None  # it may go on pushing until it is told something else

    # Failures

    def blamed(self) -> _Blamed:
        """A context: a PeerError within is this hop's failure."""
        return _Blamed(self)

    def blame(self, error: PeerError) -> PeerError:
        """The error is this hop's failure. Returns it."""
        if isinstance(error, PeerRefused) and self.is_open:  # it may have had to free the KV for others
            error.evicts = error.code == RefusalCode.UNKNOWN_SESSION
            error.breaks_promise = not error.evicts
        blamed = error.blame(self.hop.peer, self.hop.span)
        self.failure = self.failure or blamed
        return blamed

    def timeout_s(self, positions: int) -> float:
        """The time for a step, by what its steps took before; for the first one, by its announced speed."""
        policy, promised, expected_s = self.terms.policy, self.promised, self.pace.expected_s(positions)
        patience_s = policy.step_patience_s
        if expected_s is None:
            if promised is None:
                return policy.step_timeout_s
            patience_s, expected_s = promised.patience_s + self._way_s(positions), promised.position_s * positions
        return min(policy.step_timeout_s, patience_s + policy.step_patience_times * expected_s)

    def pause_s(self, error: PeerError | None, waited_s: float) -> float | None:
        """The pause before the peer is given the step again that it has answered with `error`; None if it is not.

        It is, if it has no memory now, nobody else could take its place, and this has not lasted for too long.
        """
        policy, retry_s = self.terms.policy, memory_in_s(error)
        if retry_s is None or self.promised is not None or waited_s >= policy.memory_patience_s:
            return None
        self.memory_refusals += 1
        return min(max(retry_s, policy.route.retry_s), policy.route.longest_pause_s)

    def answer_timeout_s(self, positions: int = 0) -> float:
        """The time for an answer that takes no forward, and sends this number of `positions`.

        The hop may have to compute first what is under way: it has the time of such a step, or of a decode.
        """
        way_s = self._way_s(positions) if positions else 0.0
        return min(self.terms.policy.step_timeout_s, way_s + self.timeout_s(max(1, self.under_way)))

    def note_took(self, positions: int, took_s: float) -> None:
        """It has computed a chunk."""
        self.under_way -= positions
        self.has_computed = True
        self.pace.note(positions, took_s)
        if self.promised is not None:
            self.overtime.note(self.promised, positions, took_s)

    def _way_s(self, positions: int) -> float:
        return self._form.bytes_of(positions) / self.terms.policy.standing.first_bytes_per_s

    def _confirm(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self.pushing.receiver = PeerId(neighbours.receiver) if neighbours.receiver else None

    def _about(self, kind: FrameType, chunk: Chunk, meta: bytes = b"", payload: Buffer = b"") -> Frame:
        header = chunk.epoch, chunk.step, chunk.start, chunk.length
        return Frame(kind, self.session, *header, meta, payload, self._form.value_bytes)

    def _lease(self, epoch: Epoch, step: Step, *, leaves: bool) -> Frame:
        message = Lease(int(1000 * self.terms.policy.recovery.lease_s), leaves)
        return Frame(FrameType.LEASE, self.session, epoch, step, meta=pack(message))

    def _read(self, chunk: Chunk, answer: Frame, output_digest: bytes, *, pushed: bool) -> Hidden:
        if (answer.start, answer.length) != (chunk.start, chunk.length):
            raise RemoteProtocolError("answered for other positions than it was asked for")
        is_quiet = self._neighbours is not None and self._neighbours.quiet
        if not answer.payload and (is_quiet or (pushed and self.keeps_outputs)):
            return Hidden(output_digest, None, pushed)
        self._form.check(answer)
        self._form.check_values(answer)  # the next hop would refuse them, and be blamed
        if output_digest != _native.blake3_digest(answer.payload):
            raise RemoteProtocolError("sent other hidden states than it says")
        return Hidden(output_digest, answer.payload, pushed)


class _Blamed:
    __slots__ = ("_hop",)

    def __init__(self, hop: HopState) -> None:
        self._hop = hop

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PeerError):
            self._hop.blame(error)
