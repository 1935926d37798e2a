"""The client's half of a session over several hops, as a state machine without clock, socket or task.

It says where the session stands, and which frames bring its hops there. Each hop's own part is in `hop_state.py`, and
a chunk's way through all of them in `chunk_path.py`. The other half, at each server, is `stage.py`.

The client alone raises the epoch. It does so whenever a hop may have computed something that the session has not taken:
then all hops go back to the session's position, and late frames of the former epoch are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from llmnode.core.ids import Epoch, Step
from llmnode.errors import LocalProtocolError
from llmnode.wire.chunk import Chunk
from llmnode.wire.hop_state import HopState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from llmnode.wire.chunk_path import ChunkResult
    from llmnode.wire.frame import Buffer
    from llmnode.wire.hop_state import Request
    from llmnode.wire.session_terms import SessionTerms

HopT = TypeVar("HopT", bound=HopState)


@dataclass(slots=True)
class SessionState(Generic[HopT]):
    """All hops stand at `position` in `epoch`, if it `is_settled`. `step` is the number of the next step."""

    terms: SessionTerms
    hops: list[HopT] = field(default_factory=list)
    position: int = 0
    epoch: Epoch = Epoch(0)
    step: Step = Step(0)
    is_settled: bool = True

    @property
    def lost(self) -> HopT | None:
        """The first hop that has failed. It has the inputs of the next one."""
        return next((hop for hop in self.hops if hop.failure is not None), None)

    def begin_epoch(self) -> Epoch:
        self.epoch = Epoch(self.epoch + 1)
        return self.epoch

    def resume(self, epoch: Epoch, position: int) -> Epoch:
        """The session was saved in `epoch` at `position`. Returns a new epoch, in which no hop was asked anything."""
        self.position, self.epoch, self.is_settled = position, epoch, False
        return self.begin_epoch()

    # Steps

    def chunks(self, lengths: Iterable[int]) -> list[Chunk]:
        """Numbers for positions that go through all hops one after another, from the session's position on."""
        if not self.is_settled:
            raise LocalProtocolError("the hops have not gone back to one position yet")
        chunks, start = [], self.position
        for number, length in enumerate(lengths):
            chunks.append(Chunk(self.epoch, Step(self.step + number), start, length))
            start += length
        return chunks

    def commit(self, result: ChunkResult) -> None:
        """All hops have computed the chunk: the session stands after it now."""
        chunk = result.chunk
        if (chunk.epoch, chunk.step, chunk.start) != (self.epoch, self.step, self.position):
            raise LocalProtocolError(f"{chunk} is not the next: {self.step} at {self.position} of epoch {self.epoch}")
        self.log_inputs(result, self.hops, None)
        self.position += chunk.length
        self.step = Step(self.step + 1)

    def log_inputs(self, result: ChunkResult, hops: Sequence[HopT], before: HopT | None) -> None:
        """Keep the inputs of `hops`, as far as the hop before each does not."""
        for hop, hidden in zip(hops, result.inputs, strict=True):
            if before is None or not self.terms.policy.recovery.upstream_logs:
                assert hidden.payload is not None, "inputs that no hop logs come to the client"
                hop.inputs.append(hidden.payload, result.chunk.length)
            before = hop

    # Back to one position

    def truncate(self, position: int) -> None:
        """Forget the positions from `position` on. The hops do so with the next `settle`."""
        if not 0 <= position <= self.position:
            raise LocalProtocolError(f"cannot go back to position {position} from {self.position}")
        self.position, self.is_settled = position, False

    def unsettle(self) -> None:
        """Something failed on the way: the hops may stand at several positions."""
        self.is_settled = False

    def settle(self, now_s: float) -> list[tuple[HopT, list[Request]]]:
        """Requests that bring all hops to the session's position, in a new epoch. `tell_neighbours` comes next.

        A hop that gets its input from a hop that is no longer trusted is told so first. Else the latter could push once
        more, in the new epoch.
        """
        epoch = self.begin_epoch()
        revoked = dict(self._set_neighbours([None, *self.hops, None], (), now_s, quiet=False, only_revoked=True))
        return [(hop, [*revoked.get(hop, []), hop.truncate(epoch, self.step, self.position)]) for hop in self.hops]

    def settled(self) -> None:
        """All requests of `settle` and `tell_neighbours` were answered."""
        self.is_settled = True

    # Neighbours

    def tell_neighbours(self, now_s: float) -> list[tuple[HopT, list[Request]]]:
        """Requests that tell each hop its neighbours, for hops that do not know them."""
        return self._set_neighbours([None, *self.hops, None], (), now_s, quiet=False)

    def open(
        self, hops: Sequence[HopT], before: Sequence[HopT | None], now_s: float, *, quiet: bool = False
    ) -> list[tuple[HopT, list[Request]]]:
        """Requests that open `hops`, and tell them and the last of `before` their neighbours.

        With nothing `before`, no hop is told neighbours. `quiet`: nobody wants the results of the last hop.
        """
        if not before:
            return [(hop, [hop.open(self.epoch, self.position)]) for hop in hops]
        return self._set_neighbours([*before, *hops, None], hops, now_s, quiet=quiet)

    def introduce(
        self, hops: Sequence[HopT], before: Sequence[HopT | None], now_s: float, *, quiet: bool
    ) -> list[tuple[HopT, list[Request]]]:
        """The requests of `open` that tell neighbours, for `hops` that are open."""
        return self._set_neighbours([*before, *hops, None], (), now_s, quiet=quiet) if before else []

    def _set_neighbours(
        self,
        chain: Sequence[HopT | None],
        opening: Sequence[HopT],
        now_s: float,
        *,
        quiet: bool,
        only_revoked: bool = False,
    ) -> list[tuple[HopT, list[Request]]]:
        """Requests to the hops of `chain` except its ends. None is the client.

        `only_revoked`: only to hops that take pushes of a hop that is no longer trusted.
        """
        step = Step(self.step + 1)  # 0 is the step of an OPEN
        pushes = self.terms.policy.push.enabled
        all_requests = []
        for before, hop, after in zip(chain, chain[1:], chain[2:], strict=False):
            if hop is None or (only_revoked and not _is_revoked(before, hop)):
                continue
            requests = [hop.open(self.epoch, self.position)] if hop in opening else []
            is_quiet = quiet and after is None
            place = (before, after) if pushes else (None, None)
            if (request := hop.set_neighbours(*place, self.epoch, step, now_s, quiet=is_quiet)) is not None:
                requests.append(request)
            if requests:
                all_requests.append((hop, requests))
        return all_requests

    # Other hops

    def replays(self, lost: HopT) -> Iterator[tuple[Chunk, Buffer | HopT]]:
        """All positions of the session in chunks of its epoch. With each comes its payload, or the hop that has it."""
        most = self.terms.policy.chunk_tokens
        before = self.before(lost)
        origins: Iterable[tuple[Buffer | HopT, int]] = lost.inputs.chunks(most)
        if before is not None and self.terms.policy.recovery.upstream_logs:
            origins = ((before, min(most, self.position - start)) for start in range(0, self.position, most))
        start, epoch = 0, self.epoch
        for step, (origin, length) in enumerate(origins):
            yield Chunk(epoch, Step(step), start, length), origin
            start += length

    def until(self, hop: HopT) -> Sequence[HopT]:
        """The hops before this one."""
        return self.hops[: self.hops.index(hop)]

    def before(self, hop: HopT) -> HopT | None:
        return next(reversed(self.until(hop)), None)

    def replace(self, left: Sequence[HopT], hops: Sequence[HopT]) -> None:
        """Other hops have computed all inputs of `left`, some hops in a row: they take their place."""
        index = self.hops.index(left[0])
        self.hops[index : index + len(left)] = hops

    # Copies

    def shared_with(self, source: SessionState[HopT], hops: Sequence[HopT]) -> int:
        """How many positions this session, and a copy of `source` at `hops`, have in common."""
        theirs, ours = source.terms, self.terms
        if (theirs.model, theirs.codec, theirs.prompts) != (ours.model, ours.codec, ours.prompts):
            raise LocalProtocolError("no copy of a session of another model, adapter or form, or with other prompts")
        if source.position > self.terms.max_length:
            raise LocalProtocolError(f"no space for {source.position} positions of another session")
        return min(self.position, source.position, self.hops[0].inputs.shared_with(source.hops[0].inputs))

    def is_copy(self, source: SessionState[HopT], hops: Sequence[HopT], shared: int) -> bool:
        """Whether there is nothing to copy."""
        return self.is_settled and hops == self.hops and shared == self.position == source.position

    def copy(self, source: SessionState[HopT], hops: Sequence[HopT], shared: int) -> list[tuple[HopT, Epoch, Request]]:
        """Requests that make each of `hops` a copy of its counterpart in `source`, with the epoch to open it in.

        The hops do not know their neighbours yet: after the answers, `tell_neighbours`.
        """
        self.hops, self.position, self.is_settled = list(hops), source.position, True
        opened = self.begin_epoch()
        epoch = self.begin_epoch()
        at = epoch, self.step, source.position
        return [(hop, opened, hop.copy(other, shared, *at)) for hop, other in zip(hops, source.hops, strict=True)]


def _is_revoked(before: HopState | None, hop: HopState) -> bool:
    """Whether `hop` takes pushes of the hop before, which has lost the right to them."""
    return before is not None and not before.pushing.is_trusted and hop.takes_steps_of(before)
