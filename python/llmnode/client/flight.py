"""One chunk of hidden states on its way through all hops of a session, or through those that replace a lost one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.client.hop import Hidden, SessionHop
from llmnode.client.recovery import ALL_WOULD_REFUSE
from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.hop import Chunk, ExpectedOutput, HopTiming
    from llmnode.core.policy import ClientPolicy
    from llmnode.wire.frame import Buffer


@dataclass(frozen=True, slots=True)
class Flight:
    """A chunk that has passed all hops: what each was given, and what the last put out."""

    chunk: Chunk
    inputs: Sequence[Hidden]
    output: Hidden
    timings: Sequence[HopTiming]


async def fly(
    hops: Sequence[SessionHop],
    chunk: Chunk,
    origin: Buffer | SessionHop,
    policy: ClientPolicy,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> Flight:
    """See that each hop gets its input, and check its output. The first gets `origin`, or what that hop has logged.

    Started once the first hop has its input. Raises a PeerError, which is the `failure` of its hop; or IntegrityError,
    which is nobody's, if two hops contradict each other: the former may then push no more.
    """
    inputs: list[Hidden] = []
    timings: list[HopTiming] = []
    with ExitStack() as stack:
        upstream: _Upstream | None = None
        if isinstance(origin, SessionHop):
            upstream = _Upstream(origin, stack.enter_context(origin.expect(chunk)), policy.replay_patience_s, 0.0)
        expected = [stack.enter_context(hop.expect(chunk)) for hop in hops]
        hidden = await upstream.replay(policy, push=True) if upstream else Hidden.of(origin)  # type: ignore[arg-type]
        for hop, output in zip(hops, expected, strict=True):
            inputs.append(hidden)
            leg = _Leg(upstream, hop, output, policy)
            if not leg.is_direct(hidden):
                hidden = await leg.give(hidden)
            if hop is hops[0]:
                task_status.started()
            hidden, timing = await leg.receive(hidden)
            hop.pace.note(chunk.length, timing.round_trip_us / 1e6)
            timings.append(timing)
            upstream = _Upstream(hop, output, policy.push_patience_s, (timing.queue_us + timing.compute_us) / 1e6)
    return Flight(chunk, inputs, hidden, timings)


@dataclass(frozen=True, slots=True)
class _Upstream:
    """Who pushes a hop its input, or can be asked for it, and how long it took itself."""

    hop: SessionHop
    output: ExpectedOutput
    patience_s: float
    took_s: float

    async def replay(self, policy: ClientPolicy, *, push: bool) -> Hidden:
        with self.hop.blamed():
            return await self.output.replay(policy.step_timeout_s, push=push)

    async def fetch(self, hidden: Hidden, policy: ClientPolicy) -> Buffer:
        """What it has pushed, or should have."""
        again = await self.replay(policy, push=False)
        if again.payload is None or again.digest != hidden.digest:
            raise self.hop.blame(IntegrityError("sends other hidden states than before"))
        return again.payload


@dataclass(frozen=True, slots=True)
class _Leg:
    """The way of one chunk into one hop and through it."""

    upstream: _Upstream | None
    hop: SessionHop
    output: ExpectedOutput
    policy: ClientPolicy

    def is_direct(self, hidden: Hidden) -> bool:
        return hidden.pushed and self.upstream is not None and self.upstream.hop.may_push

    async def give(self, hidden: Hidden) -> Hidden:
        """Give the hop its input by way of us."""
        payload = hidden.payload
        if payload is None:
            assert self.upstream is not None, "only who has logged it may keep it from us"
            payload = await self.upstream.fetch(hidden, self.policy)
        with self.hop.blamed():
            await self.output.give(payload)
        return Hidden(hidden.digest, payload, pushed=False)

    async def receive(self, hidden: Hidden) -> tuple[Hidden, HopTiming]:
        """What the hop puts out for `hidden`, which it has been given."""
        if self.upstream is not None and hidden.pushed:
            try:
                return await self.output.receive(hidden, self._push_patience_s(self.upstream))
            except PeerTimeout:  # it may be slow, or the push got lost: it is safe to give it the same again
                self.upstream.hop.may_push = False
                hidden = await self.give(hidden)
            except PeerError as error:
                if not _is_about_the_input(error):
                    self.hop.blame(error)
                    raise
                self.upstream.hop.may_push = False
                peers = f"{self.upstream.hop.hop.peer} and {self.hop.hop.peer}"
                raise IntegrityError(f"{peers} contradict each other: {error.message}") from error
        with self.hop.blamed():
            return await self.output.receive(hidden, self.hop.timeout_s(self.output.chunk.length))

    def _push_patience_s(self, upstream: _Upstream) -> float:
        """How long the hop may take before we take the push for lost."""
        expected_s = self.hop.pace.expected_s(self.output.chunk.length)
        return upstream.patience_s + 4 * (upstream.took_s if expected_s is None else expected_s)


def _is_about_the_input(error: PeerError) -> bool:
    """Then it may be who pushed it that lies, or who says so."""
    return isinstance(error, IntegrityError) or (isinstance(error, PeerRefused) and error.code in ALL_WOULD_REFUSE)
