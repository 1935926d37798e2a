"""A hostile server that sends answers in any order: of wrong kinds, for other steps, twice, or when nobody has asked.

It computes as an honest one, and its frames are changed on their way out. So it gets far into a session, and no
client can take a wrong result for a right one: digests would not fit.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmnode.core.ids import NO_SESSION, Epoch, SessionId, Step
from llmnode.core.policy import LinkPolicy
from llmnode.errors import PeerUnreachable, RemoteProtocolError
from llmnode.wire.frame import Frame, FrameDecoder, FrameType, encode
from llmnode.wire.messages import RefusalCode, Resumed, pack
from llmnode.wire.push_messages import PushLimit
from llmnode.wire.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmnode.core.ids import PeerId
    from llmnode.testing.network import MemoryNetwork

EDGES = (0, 1, 2, 5, 2**31, 2**32 - 1)
REMEMBERED = 16
RETRIES_S = (0.0, 0.0, 0.001, 5.0, 1e6)
OF_SWARM = frozenset((FrameType.VIEW, FrameType.NEWS, FrameType.DESCRIPTION))
"""They come all the time. Few are changed, or nobody would hear of the server."""
FORGED = frozenset((FrameType.EVALUATED, FrameType.GRADIENT))
"""Answers without a digest. Numbers of another pass in their place would be a lie, which no frame shows."""


@dataclass(slots=True)
class Disorder:
    """The frames of `network`, as a `Tamper`. `acts` counts what it has done."""

    rng: random.Random
    network: MemoryNetwork
    acts: Counter[str]
    share: float
    """This share of the frames is changed."""
    honest: int
    """The first frames of sessions are sent as they are."""
    _sent: deque[Frame] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _held: list[tuple[int, PeerId, Frame]] = field(default_factory=list)
    """Frames that are sent late: after how many others, and to which peer."""

    @classmethod
    def drawn(cls, rng: random.Random, network: MemoryNetwork, acts: Counter[str]) -> Disorder:
        share = rng.choice((0.02, 0.05, 0.1, 0.1, 0.3, 1.0))
        return cls(rng, network, acts, share, rng.choice((0, 0, 3, 10, 20)))

    def __call__(self, peer: PeerId, frame: Frame) -> Iterable[Frame]:
        rng = self.rng
        if frame.type in OF_SWARM:
            share = self.share / 20
        else:
            share = self.share if self.honest <= 0 else 0.0
            self.honest -= frame.session != NO_SESSION
        acts = self._acts()
        frames = rng.choice(acts)(peer, frame) if rng.random() < share else [frame]
        self._sent.append(frame)
        return [*frames, *self._due(peer)]

    def _acts(self) -> list[Callable[[PeerId, Frame], list[Frame]]]:
        return [
            self._drop,
            self._twice,
            self._late,
            self._late,
            self._repeat,
            self._of_another_step,
            self._of_another_kind,
            self._with_another_number,
            self._spoilt,
            self._spoilt,
            self._refuse,
            self._refuse_after,
            self._end_session,
            self._unasked,
            self._gone,
            self._torn,
        ]

    def _note(self, act: str, *frames: Frame) -> list[Frame]:
        self.acts[act] += 1
        return list(frames)

    def _drop(self, _peer: PeerId, _frame: Frame) -> list[Frame]:
        return self._note("dropped")

    def _twice(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        """OPENED has another nonce the second time, perhaps."""
        again = frame
        if frame.type is FrameType.OPENED and self.rng.random() < 0.5:
            again = replace(frame, meta=self._changed(bytes(frame.meta)))
        return self._note(f"{frame.type.name} twice", frame, again)

    def _late(self, peer: PeerId, frame: Frame) -> list[Frame]:
        self._held.append((self.rng.randint(1, 6), peer, frame))
        return self._note("late")

    def _due(self, peer: PeerId) -> list[Frame]:
        waiting = [(left - 1, to, frame) if to == peer else (left, to, frame) for left, to, frame in self._held]
        self._held = [each for each in waiting if each[0] > 0]
        return [frame for left, _, frame in waiting if left <= 0]

    def _repeat(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        former = self.rng.sample(list(self._sent), min(len(self._sent), self.rng.randint(1, 4)))
        return self._note("repeated", *former, *([frame] if self.rng.random() < 0.7 else []))

    def _of_another_step(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        """The content of a former frame, as an answer to what was asked."""
        former = [each for each in self._sent if each.type not in FORGED]
        if not former:
            return [frame]
        chosen = self.rng.choice(former)
        asked = replace(chosen, session=frame.session, epoch=frame.epoch, step=frame.step)
        if self.rng.random() < 0.5:
            asked = replace(asked, start=frame.start, length=frame.length)
        if self.rng.random() < 0.5:
            asked = replace(asked, type=frame.type)
        return self._note("for another step", asked)

    def _of_another_kind(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        kinds = [each for each in FrameType if each is not FrameType.PIECE]
        kind = self.rng.choice([*kinds, FrameType(99)])
        return self._note("of another kind", replace(frame, type=kind), *([frame] if self.rng.random() < 0.3 else []))

    def _with_another_number(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        rng = self.rng
        name = rng.choice(("epoch", "step", "start", "length", "session"))
        if name == "session":
            others = [NO_SESSION, SessionId(rng.randbytes(16)), *(each.session for each in self._sent)]
            changed = replace(frame, session=rng.choice(others))
        else:
            number: int = getattr(frame, name)
            near = rng.choice((max(0, number - 1), min(2**32 - 1, number + 1), *EDGES))
            changed = replace(frame, **{name: near})
        return self._note(f"another {name}", changed, *([frame] if rng.random() < 0.3 else []))

    def _spoilt(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        if frame.type not in FORGED and frame.payload and self.rng.random() < 0.5:
            payload = bytes(frame.payload)
            others = (
                self._changed(payload),
                payload[:-1] + bytes([payload[-1] ^ 1]),
            )  # the latter may be computed with
            return self._note("spoilt payload", replace(frame, payload=self.rng.choice(others)))
        return self._note("spoilt metadata", replace(frame, meta=self._changed(bytes(frame.meta))))

    def _changed(self, content: bytes) -> bytes:
        rng, at = self.rng, self.rng.randint(0, len(content))
        flipped = content[:at] + b"\xff" + content[at + 1 :]
        return rng.choice((content[:at], content + b"\0", rng.randbytes(len(content)), flipped, b""))

    def _refusal(self, frame: Frame) -> Frame:
        code = self.rng.choice((*RefusalCode, "never-heard-of"))
        return refusal_of(frame, code, "because", self.rng.choice(RETRIES_S))

    def _refuse(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        return self._note("refused", self._refusal(frame))

    def _refuse_after(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        """It has accepted first."""
        return self._note("refused afterwards", frame, self._refusal(frame))

    def _end_session(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        """It says unasked that it has the session no more. It may go on to serve it."""
        unasked = replace(frame, epoch=Epoch(0), step=Step(0))
        refusal = refusal_of(unasked, RefusalCode.UNKNOWN_SESSION, "gone", self.rng.choice(RETRIES_S))
        return self._note("ended unasked", *self.rng.choice(([refusal], [refusal, frame], [frame, refusal])))

    def _unasked(self, _peer: PeerId, frame: Frame) -> list[Frame]:
        """A valid frame of any kind, which is of no use in this state."""
        rng = self.rng
        kind = rng.choice([each for each in FrameType if each is not FrameType.PIECE])
        meta = {
            FrameType.GRANT: pack(PushLimit(rng.choice((0, 300, 2**62)))),
            FrameType.WANT: pack(PushLimit(rng.choice((0, 300, 2**62)))),
            FrameType.RESUMED: pack(Resumed(frame.epoch, rng.choice((0, 1, frame.start)))),
        }.get(kind, b"")
        unasked = Frame(kind, frame.session, frame.epoch, frame.step, frame.start, frame.length, meta)
        return self._note(f"unasked {kind.name}", *rng.choice(([unasked, frame], [frame, unasked], [unasked])))

    def _gone(self, peer: PeerId, frame: Frame) -> list[Frame]:
        """It ends all links to the peer, and half of the frame with them."""
        for link in [each for each in self.network.links if each.peer == peer]:
            link.fail(PeerUnreachable("connection lost"))
        return self._note("gone")

    def _torn(self, peer: PeerId, frame: Frame) -> list[Frame]:
        """Half of a frame, and then something else: the peer's decoder says what becomes of its link."""
        policy = LinkPolicy()
        content = encode(frame, policy)
        cut = self.rng.randrange(len(content))
        torn = content[:cut] + self.rng.randbytes(self.rng.choice((0, len(content) - cut, 2 * len(content) + 100)))
        error: PeerUnreachable | RemoteProtocolError = PeerUnreachable("closed the stream")
        try:
            assert not list(FrameDecoder(policy).feed(torn))
        except RemoteProtocolError as wrong:
            error = wrong
        for link in [each for each in self.network.links if each.peer == peer]:
            link.far.fail(error)
        return self._note("torn")
