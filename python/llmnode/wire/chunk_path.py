"""The path of one chunk of hidden states through the hops of a session, without clock, socket or task.

`chunk_path` is a generator. It yields what to do at which hop, and is sent what came of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout
from llmnode.wire.chunk import Hidden, HopOutput, HopTiming
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.hop_state import HopState
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from llmnode.core.policy import ClientPolicy
    from llmnode.wire.chunk import Chunk
    from llmnode.wire.frame import Buffer
    from llmnode.wire.messages import Result

HopT = TypeVar("HopT", bound=HopState)

ALL_WOULD_REFUSE = {
    RefusalCode.WRONG_POSITION,
    RefusalCode.STALE_EPOCH,
    RefusalCode.TOO_FAR_AHEAD,
    RefusalCode.CONFLICT,
    RefusalCode.BAD_MESSAGE,
}
"""Refusals of something that the session itself has done wrong. Other peers may accept what any other refusal is for,
also one with an unknown code."""


class Send(NamedTuple, Generic[HopT]):
    """Send this frame to the hop."""

    hop: HopT
    frame: Frame


class Receive(NamedTuple, Generic[HopT]):
    """Wait this long for the hop's answer of this type about the chunk. After a PeerTimeout it may come again.

    With `is_pushed` another hop is to give it the chunk, and it is not its own fault if that does not come.
    After `early_s` others are tried. If these could take the hop's place, it is waited for no longer.
    """

    hop: HopT
    answer: FrameType
    timeout_s: float
    early_s: float = inf
    is_pushed: bool = False


class Outcome(NamedTuple):
    """The end of an action at `now_s`: the answer, which the client has waited for since `since_s`, or the error.

    `beside` is the number of positions of its other steps that were at the peer meanwhile, on average.
    """

    now_s: float
    since_s: float = 0.0
    answer: Frame | None = None
    error: PeerError | None = None
    beside: float = 0.0

    def frame(self) -> Frame:
        """The answer. Raises the error."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None, "an answer was waited for"
        return self.answer


Action: TypeAlias = Send[HopT] | Receive[HopT]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk that has passed all hops: the input of each, and their outputs."""

    chunk: Chunk
    inputs: Sequence[Hidden]
    outputs: Sequence[HopOutput]

    @property
    def output(self) -> Hidden:
        return self.outputs[-1].hidden


class HopsDisagree(IntegrityError):
    """Two hops say different things of what went between them. It is no `failure` of either, until it is judged.

    `shown` is None if the second could not use its input.
    """

    def __init__(self, chunk: Chunk, upstream: HopState, told: Result, hop: HopState, shown: Result | None) -> None:
        peers = upstream.hop.peer, hop.hop.peer
        super().__init__(f"{peers[0]} and {peers[1]} contradict each other", suspects=peers)
        self.chunk = chunk
        self.upstream = upstream
        self.told = told
        self.hop = hop
        self.shown = shown


def chunk_path(
    hops: Sequence[HopT], chunk: Chunk, origin: Buffer | HopT, policy: ClientPolicy
) -> Generator[Action[HopT], Outcome, ChunkResult]:
    """Sees that each hop gets its input, and checks its output. The first gets `origin`, or what that hop has logged.

    The first action sends that, or has it sent. Raises a PeerError, which is the `failure` of its hop; or
    IntegrityError, which is nobody's yet, if two hops contradict each other (HopsDisagree, or about a log): the former
    may then push no more.
    """
    for hop in hops:  # it may be pushed to before the client knows
        hop.under_way += chunk.length
    inputs: list[Hidden] = []
    outputs: list[HopOutput] = []
    upstream: _Upstream[HopT] | None = None
    if isinstance(origin, HopState):
        upstream = _Upstream(origin, policy.recovery.replay_patience_s)
        hidden = yield from upstream.replay(chunk, push=True)
    else:
        hidden = Hidden.of(origin)
    for hop in hops:
        inputs.append(hidden)
        output = yield from _Passage(upstream, hop, chunk).run(hidden)
        outputs.append(output)
        hop.note_took(chunk.length, output.timing.elapsed_us / 1e6)
        hidden, upstream = output.hidden, _Upstream(hop, policy.push.patience_s, output)
    return ChunkResult(chunk, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Upstream(Generic[HopT]):
    """The hop that pushes another one its input, or can be asked for it; and its output, unless that is long ago."""

    hop: HopT
    patience_s: float
    computed: HopOutput | None = None

    @property
    def took_s(self) -> float:
        """The time that the hop reports, limited to what the client has waited for it."""
        timing = self.computed and self.computed.timing
        return min(timing.queue_us + timing.compute_us, timing.elapsed_us) / 1e6 if timing else 0.0

    def replay(self, chunk: Chunk, *, push: bool) -> Generator[Action[HopT], Outcome, Hidden]:
        with self.hop.blamed():
            request = self.hop.replay(chunk, push=push)
            yield from _send(self.hop, request.frame)
            outcome = yield Receive(self.hop, request.answer, request.timeout_s)
            return self.hop.replayed(chunk, outcome.frame(), push=push)

    def fetch(self, chunk: Chunk, hidden: Hidden) -> Generator[Action[HopT], Outcome, Buffer]:
        """The output that it has pushed, or should have."""
        again = yield from self.replay(chunk, push=False)
        if again.payload is None or again.digest != hidden.digest:
            raise self.hop.blame(IntegrityError("sends other hidden states than before"))
        return again.payload


@dataclass(frozen=True, slots=True)
class _Passage(Generic[HopT]):
    """The chunk's way into one hop and through it."""

    upstream: _Upstream[HopT] | None
    hop: HopT
    chunk: Chunk

    def run(self, hidden: Hidden) -> Generator[Action[HopT], Outcome, HopOutput]:
        upstream = self.upstream
        is_direct = upstream is not None and hidden.pushed and upstream.hop.pushing.works
        if upstream is not None and is_direct:
            outcome = yield Receive(self.hop, FrameType.RESULT, self._push_patience_s(upstream), is_pushed=True)
            if isinstance(outcome.error, PeerTimeout):  # it may be slow, or the push got lost
                upstream.hop.not_pushed(outcome.now_s)
                is_direct = False  # it is safe to give it the same again
        if not is_direct:
            outcome = yield from self._give_and_receive(hidden)
        refused_s = outcome.now_s
        while (pause_s := self.hop.pause_s(outcome.error, outcome.now_s - refused_s)) is not None:
            outcome = yield Receive(self.hop, FrameType.RESULT, pause_s)  # it may have the same step twice
            if isinstance(outcome.error, PeerTimeout):
                is_direct = False
                outcome = yield from self._give_and_receive(hidden)
        return self._checked(outcome, hidden, direct=is_direct)

    def _give_and_receive(self, hidden: Hidden) -> Generator[Action[HopT], Outcome, Outcome]:
        yield from self._give(hidden)
        hop, positions = self.hop, self.chunk.length
        timeout_s, policy = hop.timeout_s(positions), hop.terms.policy
        early_s = inf
        if hop.has_computed and hop.promised is not None and positions <= policy.standing.short_step:
            early_s = max(policy.replaced_patience_s, timeout_s - policy.step_patience_s + policy.replaced_patience_s)
        return (yield Receive(hop, FrameType.RESULT, timeout_s, early_s))

    def _give(self, hidden: Hidden) -> Generator[Action[HopT], Outcome, None]:
        """Gives the hop its input by way of the client."""
        payload = hidden.payload
        if payload is None:
            assert self.upstream is not None, "only a hop that has logged its output may keep it from us"
            payload = yield from self.upstream.fetch(self.chunk, hidden)
        with self.hop.blamed():
            yield from _send(self.hop, self.hop.give(self.chunk, payload))

    def _checked(self, outcome: Outcome, hidden: Hidden, *, direct: bool) -> HopOutput:
        """The hop's output, if it is that of `hidden`. An error is its failure, unless the hop before may be at fault.

        The hop before may have given it something else, whatever it says, and before the client did.
        """
        upstream = self.upstream
        doubted = upstream if upstream is not None and self.hop.takes_steps_of(upstream.hop) else None
        try:
            output = self._read(outcome, direct=direct)
        except PeerError as error:
            if outcome.error is None:  # else it says so itself
                error.after(outcome.now_s - outcome.since_s)
            if doubted is not None and isinstance(error, PeerRefused) and error.code in ALL_WOULD_REFUSE:
                raise self._contradiction(doubted, None) from error
            self.hop.blame(error)
            raise
        if output.said.input_digest == hidden.digest:
            return output
        if doubted is not None:
            raise self._contradiction(doubted, output.said)
        wrong = IntegrityError("computed something else than it was given")
        raise self.hop.blame(wrong.after(outcome.now_s - outcome.since_s))

    def _read(self, outcome: Outcome, *, direct: bool) -> HopOutput:
        hidden, result = self.hop.computed(self.chunk, outcome.frame(), outcome.now_s)
        took_us = int(1e6 * (outcome.now_s - outcome.since_s))
        hop = self.hop.hop
        timing = HopTiming(hop.peer, hop.span, took_us, result.queue_us, result.compute_us, direct, outcome.beside)
        return HopOutput(hidden, result, timing)

    def _contradiction(self, upstream: _Upstream[HopT], shown: Result | None) -> IntegrityError:
        upstream.hop.pushing.is_trusted = False
        if upstream.computed is None:
            peers = upstream.hop.hop.peer, self.hop.hop.peer
            return IntegrityError(f"{peers[1]} did not get what {peers[0]} has logged", suspects=peers)
        return HopsDisagree(self.chunk, upstream.hop, upstream.computed.said, self.hop, shown)

    def _push_patience_s(self, upstream: _Upstream[HopT]) -> float:
        """How long the hop may take before the push counts as lost, whatever the hop before says that it took."""
        expected_s = self.hop.pace.expected_s(self.chunk.length)
        patience_s = upstream.patience_s + 4 * (upstream.took_s if expected_s is None else expected_s)
        return min(patience_s, self.hop.terms.policy.step_timeout_s)


def _send(hop: HopT, frame: Frame) -> Generator[Action[HopT], Outcome, None]:
    outcome = yield Send(hop, frame)
    if outcome.error is not None:
        raise outcome.error
