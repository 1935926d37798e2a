"""The client's half of sessions, joined with servers in plain Python. A test decides what happens next, and what fails.

`World` has the peers and carries the frames. `Session` does with its `SessionState` as `llmnode.session` does, without
tasks: whatever waits for an answer is a generator.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from llmnode.core.ids import Epoch, PeerId, SessionId
from llmnode.errors import PeerRefused, PeerTimeout, PeerUnreachable, RemoteProtocolError
from llmnode.wire.chunk_path import Outcome
from llmnode.wire.frame import Frame, FrameDecoder, FrameType, encode
from llmnode.wire.hop_state import HopState
from llmnode.wire.messages import Refusal, unpack
from unit.stage_peer import STEPS_AHEAD, StagePeer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from llmnode.core.ids import Step
    from llmnode.core.policy import LinkPolicy
    from llmnode.core.route import Hop
    from llmnode.errors import PeerError
    from llmnode.wire.session_terms import SessionTerms

CLIENT = PeerId("client")
Question: TypeAlias = "tuple[SessionId, Epoch, Step]"


@dataclass(eq=False)
class Wanted:
    """An answer that a task waits for."""

    peer: PeerId
    wire: int | None
    question: Question
    kind: FrameType
    since_s: float
    timeout_s: float


Task: TypeAlias = "Generator[Wanted, Outcome, Any]"  # each its own result


@dataclass(eq=False)
class Running:
    """A task, and the answer that it waits for, or None if it is over."""

    task: Task
    wanted: Wanted | None = None
    result: Any = None  # of any task

    def resume(self, outcome: Outcome | None) -> None:
        try:
            self.wanted = next(self.task) if outcome is None else self.task.send(outcome)
        except StopIteration as end:
            self.wanted, self.result = None, end.value


class World:
    """Peers that hold all blocks, and all that is under way between them and the client.

    `choose(n)` is one of range(n): 0 is the simplest. `faults` says how often each may happen.
    """

    def __init__(
        self,
        choose: Callable[[int], int],
        peers: Sequence[PeerId],
        terms: SessionTerms,
        links: LinkPolicy,
        faults: Mapping[str, int],
    ) -> None:
        self.choose = choose
        self.now_s = 1000.0
        self.terms = terms
        self.met: Counter[str] = Counter()
        """The faults that have happened."""
        self.peers = {peer: StagePeer(peer, terms.model, terms.form, self) for peer in peers}
        self._rarely = (40, 8)[choose(2)]
        self._links = links
        self._left = Counter(faults)
        self._wires: defaultdict[frozenset[PeerId], int] = defaultdict(int)
        self._under_way: dict[tuple[PeerId, PeerId, SessionId], deque[Frame]] = {}
        """Links keep the order within each session."""
        self._answers: dict[Question, Frame | None] = {}
        """The questions that are waited for, each with the first answer that has come and was not taken."""
        self._names = 0

    def new_name(self) -> SessionId:
        self._names += 1
        return SessionId(self._names.to_bytes(16, "big"))

    # For servers

    def wire(self, sender: PeerId, receiver: PeerId) -> int:
        return self._wires[frozenset((sender, receiver))]

    def carry(self, sender: PeerId, receiver: PeerId, frame: Frame, wire: int | None = None) -> bool:
        if wire is not None and wire != self.wire(sender, receiver):
            return False
        (frame,) = FrameDecoder(self._links).feed(encode(frame, self._links))
        frames = self._under_way.setdefault((sender, receiver, frame.session), deque())
        if frame.type is FrameType.STEP:
            if sender != CLIENT and self.strikes("push changed"):
                first, *rest = bytes(frame.payload)
                frame = replace(frame, payload=bytes([first ^ 1, *rest]))
                self._note_wrong(receiver, frame.session)
            if self.strikes("step twice"):
                frames.append(frame)
        frames.append(frame)
        if frame.type is FrameType.STEP and sender != CLIENT and self.strikes("push ahead"):
            self._note_wrong(receiver, frame.session)
            frames += [replace(frame, epoch=Epoch(frame.epoch + 50 + number)) for number in range(STEPS_AHEAD)]
        return True

    def strikes(self, fault: str) -> bool:
        if not self._left[fault] or self.choose(8) < 7:
            return False
        self._left[fault] -= 1
        self.met[fault] += 1
        return True

    def spare(self) -> None:
        """Nothing fails any more."""
        self._left.clear()

    def _note_wrong(self, receiver: PeerId, session: SessionId) -> None:
        if (given := self.peers[receiver].sessions.get(session)) is not None:
            given.was_given_wrong = True

    # For sessions

    @contextmanager
    def expecting(self, questions: Iterable[Question]) -> Iterator[None]:
        """From now on answers are kept when they come."""
        asked = list(questions)
        for question in asked:
            assert question not in self._answers, "asked twice at once"
            self._answers[question] = None
        try:
            yield
        finally:
            for question in asked:
                del self._answers[question]

    def run(self, tasks: Iterable[Task], done: Callable[[Any], None] | None = None, most: int = 100) -> None:
        """Run tasks side by side, `most` of them at once, until all are over. `done` is called in their order.

        Raises the first error of a task. Then the others are dropped.
        """
        running: deque[Running] = deque()
        waiting = deque(tasks)
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    running.append(Running(waiting.popleft()))
                    running[-1].resume(None)
                while running and running[0].wanted is None:
                    first = running.popleft()
                    if done is not None:
                        done(first.result)
                if running:
                    self._go_on(running)
        finally:
            for each in running:
                each.task.close()

    def settle_down(self) -> None:
        """Let everything arrive and be done."""
        while events := self._events(()):
            events[self.choose(len(events))]()

    def tell(self, peer: PeerId, wire: int, frame: Frame) -> None:
        """Raises PeerUnreachable if that connection is lost."""
        if not self.carry(CLIENT, peer, frame, wire):
            raise PeerUnreachable("connection lost", peer=peer)

    # Events

    def _go_on(self, running: Sequence[Running]) -> None:
        if self._strike(running):
            return
        if events := self._events(running):
            events[self.choose(len(events))]()
            return
        self.met["answer lost"] += 1
        waiting = [each for each in running if each.wanted is not None]
        self._time_out(min(waiting, key=lambda each: _deadline_s(each.wanted)))

    def _events(self, running: Iterable[Running]) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        for each in running:
            if self._outcome(each.wanted) is not None:
                events.append(partial(self._resume, each))
        for peer in self.peers.values():
            events += [partial(peer.work, busy) for busy in peer.busy]
        events += [partial(self._deliver, *way) for way, frames in self._under_way.items() if frames]
        return events

    def _strike(self, running: Sequence[Running]) -> bool:
        """Perhaps something fails."""
        kinds = [each for each in ("peer lost", "wire cut", "no answer in time") if self._left[each]]
        if not kinds or self.choose(self._rarely) < self._rarely - 1:
            return False
        kind = kinds[self.choose(len(kinds))]
        waiting = [each for each in running if each.wanted is not None]
        self._left[kind] -= 1
        self.met[kind] += 1
        names = list(self.peers)
        match kind:
            case "peer lost":
                self._lose(names[self.choose(len(names))])
            case "wire cut":
                one = names.pop(self.choose(len(names)))
                others = [CLIENT, *names]
                self._cut(one, others[self.choose(len(others))])
            case _ if waiting:
                self._time_out(waiting[self.choose(len(waiting))])
        return True

    def _lose(self, peer: PeerId) -> None:
        """It begins a new life at once, which knows nothing of the last one."""
        for other in (CLIENT, *self.peers):
            if other != peer:
                self._cut(peer, other)
        self.peers[peer] = StagePeer(peer, self.terms.model, self.terms.form, self)

    def _cut(self, one: PeerId, other: PeerId) -> None:
        self._wires[frozenset((one, other))] += 1
        for here, there in ((one, other), (other, one)):
            for way in [each for each in self._under_way if each[:2] == (here, there)]:
                del self._under_way[way]
            if here != CLIENT:
                self.peers[here].lose(there)

    def _deliver(self, sender: PeerId, receiver: PeerId, session: SessionId) -> None:
        self.now_s += 0.001
        frame = self._under_way[sender, receiver, session].popleft()
        if receiver != CLIENT:
            self.peers[receiver].receive(sender, frame)
            return
        question = frame.session, frame.epoch, frame.step
        if question in self._answers:
            self._answers[question] = self._answers[question] or frame

    def _outcome(self, wanted: Wanted | None) -> Outcome | None:
        """None if the answer is still to come."""
        if wanted is None:
            return None
        answer = self._answers[wanted.question]
        if answer is None:
            lost = wanted.wire != self.wire(CLIENT, wanted.peer)
            return self._failed(wanted, PeerUnreachable("connection lost", peer=wanted.peer)) if lost else None
        try:
            _check(answer, wanted)
        except (PeerRefused, RemoteProtocolError) as error:
            return self._failed(wanted, error)
        return Outcome(self.now_s, wanted.since_s, answer)

    def _resume(self, running: Running) -> None:
        outcome, wanted = self._outcome(running.wanted), running.wanted
        assert outcome is not None
        assert wanted is not None
        self._answers[wanted.question] = None
        running.resume(outcome)

    def _time_out(self, running: Running) -> None:
        wanted = running.wanted
        assert wanted is not None
        if self._answers[wanted.question] is None:
            self.now_s = max(self.now_s, _deadline_s(wanted))
            running.resume(self._failed(wanted, PeerTimeout(f"no {wanted.kind.name}", peer=wanted.peer)))

    def _failed(self, wanted: Wanted, error: PeerError) -> Outcome:
        return Outcome(self.now_s, wanted.since_s, error=error)


class PairedHop(HopState):
    """A hop, and the connection to its peer when it was made."""

    def __init__(self, world: World, hop: Hop, session: SessionId | None = None) -> None:
        super().__init__(hop, world.terms, session or world.new_name())
        self.wire = world.wire(CLIENT, hop.peer)


def _deadline_s(wanted: Wanted | None) -> float:
    assert wanted is not None
    return wanted.since_s + wanted.timeout_s


def _check(answer: Frame, wanted: Wanted) -> None:
    if answer.type is FrameType.REFUSAL:
        refusal = unpack(Refusal, answer.meta)
        retry_after_s = refusal.retry_after_ms / 1000 or None
        raise PeerRefused(refusal.code, refusal.message, retry_after_s=retry_after_s, peer=wanted.peer)
    if answer.type is not wanted.kind:
        raise RemoteProtocolError(f"answered {answer.type.name} where {wanted.kind.name} is due", peer=wanted.peer)
