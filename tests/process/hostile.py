"""The bytes of a hostile client: sessions whose frames are mutated. This module knows neither socket nor clock.

Sequences have frames repeated, swapped or left out. `mutations.py` has what becomes of single frames and of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import SESSION_ID_BYTES, Epoch, PeerId, SessionId, Step
from llmnode.core.policy import SwarmPolicy
from llmnode.core.priority import PRIORITIES
from llmnode.core.span import Span
from llmnode.core.view_digests import BUCKETS, DIGEST_BYTES, HASH_BYTES, SALT_BYTES
from llmnode.wire.announcement import pack_news, pack_sequences, sign_announcement
from llmnode.wire.frame import Frame, FrameType, encode
from llmnode.wire.messages import Clock, Description, ForkRequest, Lease, Neighbours, OpenRequest, Replay, pack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec, encode_hidden
from llmnode.wire.profile import profile_of
from process.mutations import (
    PASSES,
    POLICY,
    bit_flipped,
    boundary_moved,
    broken,
    in_pieces,
    is_refused,
    mutated,
    shuffled_a_little,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

BATCH_FRAMES = 100
"""The frames of one write. They are fewer than a link may hold, so that the server's answers are tested, not its
limit."""
NOW_MS = 1_800_000_000_000
SESSION_LENGTHS = (1, 8, 16, 48)


class Ending(Enum):
    """The end of a batch."""

    ANSWERED = "every frame was well-formed: the link lives, and answers the fence"
    REFUSED = "the last bytes are no frame: the server ends the link"
    CUT = "the client leaves in the middle of a frame"


@dataclass(frozen=True, slots=True)
class Batch:
    """The bytes of one write: `frames` frames, all of which the server reads, and then `ending`."""

    data: bytes
    frames: int
    spoiled: int
    """The number of frames that no honest client would send."""
    fence: SessionId
    """The last frame is a CLOSE of this session, which nobody opened: its refusal says that all before it was read."""
    ending: Ending
    questions: frozenset[tuple[SessionId, Epoch, Step]]
    passes: frozenset[tuple[SessionId, Epoch, Step]]
    """Those of `questions` that are passes. Each is answered, some after the fence."""


@dataclass(slots=True)
class Attacker:
    """An endless stream of batches, which depends on `chance` and on what is attacked alone."""

    chance: Random
    target: Description
    _rows: bytes = b""

    def batches(self) -> Iterator[Batch]:
        self._rows = np.random.default_rng(0).standard_normal(64 * self.target.hidden_size, np.float32).tobytes()
        while True:
            yield self._batch(self.chance.choices(list(Ending), weights=(80, 15, 5))[0])

    def _batch(self, ending: Ending) -> Batch:
        chance = self.chance
        frames: list[Frame] = []
        spoiled = 0
        fence = _name(chance)
        while len(frames) < BATCH_FRAMES:
            session = self._session()
            spoils = chance.choice((0.25, 0.8, 1.0))  # of the few, most of the session comes to run
            sent = [mutated(chance, frame) if chance.random() < spoils else frame for frame in session]
            spoiled += sum(each is not frame for each, frame in zip(sent, session, strict=True))
            frames += shuffled_a_little(chance, sent)
            # Or its KV would be reserved for as long as the link lives, and the next session refused before any depth.
            frames += [frame for frame in session if frame.type is FrameType.CLOSE]
        frames.append(Frame(FrameType.CLOSE, fence))
        encoded = [encode(frame, POLICY) for frame in frames]
        moved = chance.sample(range(len(encoded) - 1), 5)
        for index in moved:
            encoded[index] = boundary_moved(chance, encoded[index])
        spoiled += 5
        encoded = [in_pieces(chance, frame) if chance.random() < 0.1 else frame for frame in encoded]
        end = {Ending.ANSWERED: lambda: b"", Ending.REFUSED: self._no_frame, Ending.CUT: self._part_of_a_frame}
        return Batch(
            b"".join(encoded) + end[ending](),
            len(frames) + (ending is not Ending.ANSWERED),
            spoiled + (ending is not Ending.ANSWERED),
            fence,
            ending,
            frozenset(_question(frame) for frame in frames),
            frozenset(_question(frame) for at, frame in enumerate(frames) if frame.type in PASSES and at not in moved),
        )

    def _session(self) -> list[Frame]:
        """A valid one: steps of unequal length, one sent twice, cut back, gone on with, copied and closed."""
        chance, session, copy = self.chance, _name(self.chance), _name(self.chance)
        codec = chance.choices(list(Codec), weights=(5, 1, 1, 1))[0]
        max_length = chance.choice(SESSION_LENGTHS)
        request = OpenRequest(
            self.target.model_digest,
            self.target.span_start,
            self.target.span_end,
            max_length,
            self.target.dtype,
            codec,
            chance.choice(list(PRIORITIES)),
            chance.random() < 0.5,
        )
        frames = [Frame(FrameType.OPEN, session, meta=pack(request))]
        copied = chance.random() < 0.3
        if copied:
            frames += [replace(frames[0], session=copy), self._fork(copy, session, 1, 0)]
        if chance.random() < 0.3:
            frames.append(self._forward(session))
        position = step = epoch = 0
        for _ in range(chance.randrange(1, 4)):
            length = chance.randrange(1, 4)
            header = session, Epoch(epoch), Step(step), position, length
            frames.append(Frame(FrameType.STEP, *header, payload=self._encoded(length, codec)))
            position, step = position + length, step + 1
            if chance.random() < 0.2:
                frames.append(frames[-1])
            if chance.random() < 0.2:
                replay = pack(Replay(push=chance.random() < 0.5))
                frames.append(Frame(FrameType.REPLAY, session, Epoch(epoch), Step(step), 0, position, replay))
            if chance.random() < 0.2:
                # Short: the KV of a session that nobody comes for must be free when the flood is over.
                lease = pack(Lease(chance.randrange(500), leaves=chance.random() < 0.5))
                frames.append(Frame(FrameType.LEASE, session, Epoch(epoch), Step(step), meta=lease))
                frames.append(Frame(FrameType.RESUME, session, Epoch(epoch + 1), Step(step)))
            if chance.random() < 0.3:
                epoch, position = epoch + 1, chance.randrange(position + 1)
                frames.append(Frame(FrameType.TRUNCATE, session, Epoch(epoch), Step(step), start=position))
        if copied:
            frames.append(self._fork(copy, session, 2, position))
            step_frame = Frame(FrameType.STEP, copy, Epoch(2), Step(1), position, 1, payload=self._encoded(1, codec))
            frames += [step_frame, Frame(FrameType.CLOSE, copy, Epoch(2), Step(2))]
        frames.append(
            chance.choice((Frame(FrameType.DESCRIBE), self._view(), self._news(), self._pass(), self._pass()))
        )
        frames.append(Frame(FrameType.CLOSE, session, Epoch(epoch), Step(step)))
        return frames

    def _fork(self, copy: SessionId, session: SessionId, epoch: int, keep: int) -> Frame:
        """Mostly forks `session`, which may not have this position yet."""
        source = self.chance.choices((session, copy, _name(self.chance)), weights=(8, 1, 1))[0]
        request = ForkRequest(source, self.chance.choice((0, 0, 0, 1, keep)))
        return Frame(FrameType.FORK, copy, Epoch(epoch), Step(1), start=keep, meta=pack(request))

    def _forward(self, session: SessionId) -> Frame:
        """Between peers that nobody has heard of, or to the client alone."""
        sender, receiver = (PeerId(self.chance.randbytes(20).hex()) for _ in range(2))
        request = Neighbours(
            sender,
            self.chance.choice((receiver, "")),
            _name(self.chance),
            quiet=self.chance.random() < 0.5,
            again=self.chance.random() < 0.5,
        )
        return Frame(FrameType.NEIGHBOURS, session, meta=pack(request))

    def _pass(self) -> Frame:
        """A few sequences, or gradients for them too."""
        chance, target = self.chance, self.target
        kind = chance.choice(PASSES)
        lengths = [chance.randrange(1, 4) for _ in range(chance.randrange(1, 3))]
        span = Span(target.span_start, target.span_end)
        request = Pass(target.model_digest, span.start, span.end, target.dtype, Codec.RAW, "training", lengths)
        payload = self._encoded(sum(lengths), Codec.RAW) * (2 if kind is FrameType.BACKWARD else 1)
        return Frame(kind, step=Step(chance.getrandbits(32)), meta=pack(request), payload=payload)

    def _view(self) -> Frame:
        clock, kind = pack(Clock(NOW_MS)), self.chance.choice((FrameType.VIEW, FrameType.DIGESTS, FrameType.MISSING))
        if kind is not FrameType.VIEW:
            sizes = SALT_BYTES + BUCKETS * DIGEST_BYTES, 3 * HASH_BYTES
            return Frame(kind, meta=clock, payload=self.chance.randbytes(self.chance.choice(sizes)))
        known = {PeerId(self.chance.randbytes(20).hex()): self.chance.getrandbits(40) for _ in range(3)}
        return Frame(kind, meta=clock, payload=pack_sequences(known))

    def _news(self) -> Frame:
        """An announcement that its peer never signed. If it were believed, the server would go on asking that peer for
        days.
        """
        target, peer = self.target, PeerId(self.chance.randbytes(20).hex())
        offer = Offer(
            target.model,
            profile_of(target),
            target.blocks,
            Span(target.span_start, target.span_end),
            PeerState.ONLINE,
            block_us=100,
            kv_tokens=1000,
            kv_tokens_free=1000,
        )
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"
        announcement = Announcement(peer, (address,), NOW_MS, NOW_MS + 40_000, "llmnode/0", offer)
        signed = sign_announcement(announcement, lambda _body: self.chance.randbytes(64)).signed
        if self.chance.random() < 0.5:
            signed = replace(signed, body=bit_flipped(self.chance, signed.body))
        payload = pack_news([signed], [PeerId("12D3KooW")], SwarmPolicy())
        return Frame(FrameType.NEWS, meta=pack(Clock(NOW_MS)), payload=payload)

    def _encoded(self, length: int, codec: Codec) -> bytes:
        """Values as they leave an embedding: (length, hidden_size)."""
        row_bytes = 4 * self.target.hidden_size
        start = self.chance.randrange(len(self._rows) // row_bytes - length) * row_bytes
        return bytes(encode_hidden(self._rows[start : start + length * row_bytes], codec))

    def _no_frame(self) -> bytes:
        """Bytes at which a decoder must give up, whatever comes next."""
        while True:
            data = broken(self.chance, encode(self.chance.choice(self._session()), POLICY))
            if is_refused(data):  # a flipped length may only make the decoder wait
                return data

    def _part_of_a_frame(self) -> bytes:
        frame = encode(self.chance.choice(self._session()), POLICY)
        return frame[: self.chance.randrange(1, len(frame))]


def _question(frame: Frame) -> tuple[SessionId, Epoch, Step]:
    return frame.session, frame.epoch, frame.step


def _name(chance: Random) -> SessionId:
    return SessionId(chance.randbytes(SESSION_ID_BYTES))
