"""Frames about the swarm, and about pushes, as a hostile client sends them: VIEW, NEWS, PROBE and GRANT.

Most can be read, and most announcements are signed. Some are signed by another peer, are over or from the future, or
speak of the server itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import NO_SESSION, PeerId, SessionId, Step
from llmnode.core.policy import ServePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.testing import EXACT_MODEL
from llmnode.wire.announcement import pack_news, pack_sequences, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, pack
from llmnode.wire.push_messages import PushLimit

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from llmnode.core.announcement import SignedBody
    from llmnode.testing.network import MemoryNetwork

SWARM = SwarmPolicy(view_peers=8, announcement_bytes=2000, clocks=4)
"""A small view: peers are forgotten for others."""
STATES = (*PeerState, "a newer state")
SEQUENCES = (0, 1, 2**31, 2**63 - 1)
CLOCKS_MS = (0, 0, 0, 100, -100, 60_000, -60_000)
PROBE_BYTES = (0, 1, 1000, 1000, ServePolicy().probe_bytes, ServePolicy().probe_bytes + 1)
LIMITS_BYTES = (0, 1, 300, 10_000, 2**62)


@dataclass(frozen=True, slots=True)
class SwarmFrames:
    """`announcers` are peers that may be announced, the server among them. It is `now_ms` by honest clocks."""

    rng: random.Random
    announcers: Sequence[MemoryNetwork]
    now_ms: int

    def view(self) -> Frame:
        rng = self.rng
        known = rng.sample(self.announcers, rng.randint(0, len(self.announcers)))
        sequences = {each.peer: rng.choice((*SEQUENCES, self.now_ms)) for each in known}
        return self._about_swarm(FrameType.VIEW, pack_sequences(sequences))

    def news(self) -> Frame:
        rng = self.rng
        named = [rng.choice(self.announcers) for _ in range(rng.choice((0, 1, 1, 2, 12)))]
        forms = [self._announced(each) for each in named]
        wanted = [PeerId(rng.choice((each.peer, "nobody"))) for each in named[:2]]
        return self._about_swarm(FrameType.NEWS, pack_news(forms, wanted, SWARM))

    def probe(self) -> Frame:
        payload = bytes(self.rng.choice(PROBE_BYTES))
        return Frame(FrameType.PROBE, step=Step(self.rng.randrange(2**16)), payload=payload)

    def grant(self, session: Frame) -> Frame:
        """No client grants anything. `session` has the fields of a frame of its session."""
        return replace(session, type=FrameType.GRANT, meta=pack(PushLimit(self.rng.choice(LIMITS_BYTES))))

    def _about_swarm(self, kind: FrameType, payload: bytes) -> Frame:
        rng = self.rng
        session = NO_SESSION if rng.random() < 0.9 else SessionId(bytes(16))
        clock = Clock(self.now_ms + rng.choice(CLOCKS_MS))
        return Frame(kind, session, step=Step(rng.randrange(2**16)), meta=pack(clock), payload=payload)

    def _announced(self, network: MemoryNetwork) -> SignedBody:
        rng, model = self.rng, EXACT_MODEL
        start = rng.randrange(model.blocks)
        span = Span(start, rng.randint(start + 1, model.blocks))
        state = PeerState(rng.choice(STATES))
        kv_tokens, block_us = rng.choice((0, 400, 2**31)), rng.choice((0, 1, 1000))
        offer = Offer(model.name, model.profile, model.blocks, span, state, block_us, kv_tokens, kv_tokens)
        sequence = self.now_ms + rng.choice((0, 0, 0, -1000, 29_000, 31_000, -44_000, -46_000))
        lifetime_ms = rng.choice((1, 45_000, 45_000, 45_000, 46_000))
        announcement = Announcement(
            network.peer, tuple(network.addresses), sequence, sequence + lifetime_ms, "llmnode/0", offer
        )
        signer = network if rng.random() < 0.9 else rng.choice(self.announcers)
        return sign_announcement(announcement, signer.sign).signed
