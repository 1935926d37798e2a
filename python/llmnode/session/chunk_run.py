"""One chunk of hidden states on its way through all hops of a session, or through those that replace a lost one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout, single_error
from llmnode.session.failures import ALL_WOULD_REFUSE
from llmnode.session.hop import SessionHop
from llmnode.wire.chunk import Hidden

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from llmnode.core.policy import ClientPolicy
    from llmnode.session.hop import ExpectedOutput
    from llmnode.wire.chunk import Chunk, HopOutput
    from llmnode.wire.frame import Buffer
    from llmnode.wire.messages import Result


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk that has passed all hops: what each was given, and what the last put out."""

    chunk: Chunk
    inputs: Sequence[Hidden]
    outputs: Sequence[HopOutput]

    @property
    def output(self) -> Hidden:
        return self.outputs[-1].hidden


class HopsDisagree(IntegrityError):
    """Two hops say different things of what went between them. No `failure` of either, until it is judged.

    `shown` is None if the second could not use what it got.
    """

    def __init__(self, chunk: Chunk, upstream: SessionHop, told: Result, hop: SessionHop, shown: Result | None) -> None:
        peers = upstream.hop.peer, hop.hop.peer
        super().__init__(f"{peers[0]} and {peers[1]} contradict each other", suspects=peers)
        self.chunk = chunk
        self.upstream = upstream
        self.told = told
        self.hop = hop
        self.shown = shown


async def run_chunks(
    hops: Sequence[SessionHop],
    loads: Iterable[tuple[Chunk, Buffer | SessionHop]],
    policy: ClientPolicy,
    land: Callable[[ChunkResult], Awaitable[None]],
) -> None:
    """Runs chunks that follow each other, several under way at once. `land` is called for each, in their order."""
    window = trio.Semaphore(policy.chunks_ahead)
    landed = trio.Event()
    landed.set()

    async def pass_all(
        chunk: Chunk,
        origin: Buffer | SessionHop,
        before: trio.Event,
        done: trio.Event,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        flight = await run_chunk(hops, chunk, origin, policy, task_status)
        await before.wait()
        await land(flight)
        done.set()
        window.release()

    with single_error():
        async with trio.open_nursery() as nursery:
            for load in loads:
                await window.acquire()
                before, landed = landed, trio.Event()
                await nursery.start(pass_all, *load, before, landed)


async def run_chunk(
    hops: Sequence[SessionHop],
    chunk: Chunk,
    origin: Buffer | SessionHop,
    policy: ClientPolicy,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> ChunkResult:
    """See that each hop gets its input, and check its output. The first gets `origin`, or what that hop has logged.

    Started once the first hop has its input, or is to be given it. Raises a PeerError, which is the `failure` of its
    hop; or IntegrityError, which is nobody's yet, if two hops contradict each other (HopsDisagree, or about a log):
    the former may then push no more.
    """
    inputs: list[Hidden] = []
    outputs: list[HopOutput] = []
    with ExitStack() as stack:
        upstream: _Upstream | None = None
        if isinstance(origin, SessionHop):
            upstream = _Upstream(origin, stack.enter_context(origin.expect(chunk)), policy.recovery.replay_patience_s)
        expected = [stack.enter_context(hop.expect(chunk)) for hop in hops]
        if upstream:
            hidden = await upstream.replay(policy, task_status.started, push=True)
        else:
            hidden = Hidden.of(origin)  # type: ignore[arg-type]
        for hop, output in zip(hops, expected, strict=True):
            inputs.append(hidden)
            leg = _HopCall(upstream, hop, output, policy)
            if not leg.is_direct(hidden):
                hidden = await leg.give(hidden)
            if hop is hops[0] and not isinstance(origin, SessionHop):
                task_status.started()
            outputs.append(arrived := await leg.receive(hidden))
            hop.pace.note(chunk.length, arrived.timing.round_trip_us / 1e6)
            hidden, upstream = arrived.hidden, _Upstream(hop, output, policy.push.patience_s, arrived)
    return ChunkResult(chunk, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Upstream:
    """Who pushes a hop its input, or can be asked for it; and what it put out, unless long ago."""

    hop: SessionHop
    output: ExpectedOutput
    patience_s: float
    computed: HopOutput | None = None

    @property
    def took_s(self) -> float:
        timing = self.computed and self.computed.timing
        return (timing.queue_us + timing.compute_us) / 1e6 if timing else 0.0

    async def replay(self, policy: ClientPolicy, asked: Callable[[], None] = lambda: None, *, push: bool) -> Hidden:
        with self.hop.blamed():
            return await self.output.replay(policy.step_timeout_s, asked, push=push)

    async def fetch(self, hidden: Hidden, policy: ClientPolicy) -> Buffer:
        """What it has pushed, or should have."""
        again = await self.replay(policy, push=False)
        if again.payload is None or again.digest != hidden.digest:
            raise self.hop.blame(IntegrityError("sends other hidden states than before"))
        return again.payload


@dataclass(frozen=True, slots=True)
class _HopCall:
    """The way of one chunk into one hop and through it."""

    upstream: _Upstream | None
    hop: SessionHop
    output: ExpectedOutput
    policy: ClientPolicy

    def is_direct(self, hidden: Hidden) -> bool:
        return hidden.pushed and self.upstream is not None and self.upstream.hop.pushing.works

    async def give(self, hidden: Hidden) -> Hidden:
        """Give the hop its input by way of us."""
        payload = hidden.payload
        if payload is None:
            assert self.upstream is not None, "only who has logged it may keep it from us"
            payload = await self.upstream.fetch(hidden, self.policy)
        with self.hop.blamed():
            await self.output.give(payload)
        return Hidden(hidden.digest, payload, pushed=False)

    async def receive(self, hidden: Hidden) -> HopOutput:
        """What the hop puts out for `hidden`, which it has been given."""
        if self.upstream is not None and hidden.pushed:
            try:
                answer = await self.output.receive(self._push_patience_s(self.upstream))
            except PeerTimeout:  # it may be slow, or the push got lost: it is safe to give it the same again
                self.upstream.hop.note_not_pushed()
                hidden = await self.give(hidden)
            except PeerError as error:
                if isinstance(error, PeerRefused) and error.code in ALL_WOULD_REFUSE:  # was it given something else?
                    raise self._contradiction(self.upstream, None) from error
                self.hop.blame(error)
                raise
            else:
                if answer.said.input_digest != hidden.digest:
                    raise self._contradiction(self.upstream, answer.said)
                return answer
        with self.hop.blamed():
            answer = await self.output.receive(self.hop.timeout_s(self.output.chunk.length))
            if answer.said.input_digest != hidden.digest:
                raise IntegrityError("computed something else than it was given")
            return answer

    def _contradiction(self, upstream: _Upstream, shown: Result | None) -> IntegrityError:
        upstream.hop.pushing.is_trusted = False
        if upstream.computed is None:
            peers = upstream.hop.hop.peer, self.hop.hop.peer
            return IntegrityError(f"{peers[1]} did not get what {peers[0]} has logged", suspects=peers)
        return HopsDisagree(self.output.chunk, upstream.hop, upstream.computed.said, self.hop, shown)

    def _push_patience_s(self, upstream: _Upstream) -> float:
        """How long the hop may take before we take the push for lost."""
        expected_s = self.hop.pace.expected_s(self.output.chunk.length)
        return upstream.patience_s + 4 * (upstream.took_s if expected_s is None else expected_s)
