"""Announcements: what a serving peer says of itself, for a while. Signed by it, so that anyone may pass them on.

Bytes and signatures are made elsewhere (`llmnode.wire.announcement`, `llmnode.net`); here they are opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from llmnode.core.route import Hop
from llmnode.core.speed import SHARED_SESSIONS, UNMEASURED, AnnouncedSpeed

if TYPE_CHECKING:
    from llmnode.core.adapters import AnnouncedAdapter
    from llmnode.core.ids import PeerId
    from llmnode.core.model import Profile
    from llmnode.core.span import Span


DOUBLE = "identity used twice"


class PeerState(StrEnum):
    """A peer's own word about itself."""

    JOINING = "joining"
    """It has chosen its blocks and loads them: others choose other ones."""
    ONLINE = "online"
    DRAINING = "draining"
    """It serves the sessions that it has, takes no others, and will soon have left."""
    LEFT = "left"
    """It stopped on purpose: nobody needs to wait until its last announcement expires."""
    UNKNOWN = "unknown"
    """A state that a newer node has announced. The peer is alive, and is used for nothing."""

    @classmethod
    def _missing_(cls, value: object) -> PeerState:
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Offer:
    """The part of an announcement about a peer's blocks: a span of one model in one profile, and its speed.

    `block_us` is the measured time of one token through one block, in microseconds; 0 while it is not known.
    """

    model: str
    profile: Profile
    blocks: int
    span: Span
    state: PeerState
    block_us: int
    kv_tokens: int
    """Positions that all its sessions together may hold: a longer one will never fit. 0 while it is joining."""
    kv_tokens_free: int
    """Those that a new session may have now. More may be free, which sessions here may still need."""
    speed: AnnouncedSpeed = UNMEASURED
    moves_to: Span | None = None
    """The blocks that the peer is going to serve instead: it loads them already, or once its sessions have ended."""
    adapters: tuple[AnnouncedAdapter, ...] = ()
    """Those that it holds for its blocks, beside the adapters that clients bring."""
    kv_page: int = 1
    """A session holds a multiple of this number of positions."""
    load: float | None = None
    """The steps that it computes, or has waiting, at a time, on average lately. None if it does not say."""
    stays: bool = False
    """Its user has chosen its blocks: it moves to no others."""

    def in_pages(self, positions: int) -> int:
        """The positions that a session holds at this peer if it needs this number of them."""
        return -(-positions // self.kv_page) * self.kv_page

    def computes(self, profile: Profile) -> bool:
        """Whether it says that it computes in this profile, be it with an adapter that it announces."""
        if self.profile == profile:
            return True
        if profile.adapter is None or self.profile.adapter is not None:
            return False
        is_same = (self.profile.model_digest, self.profile.precision) == (profile.model_digest, profile.precision)
        return is_same and any(each.digest == profile.adapter for each in self.adapters)

    @property
    def speed_tokens_per_s(self) -> float:
        """Tokens a second through the whole span, one at a time; 0 while `block_us` is not known."""
        return 1e6 / (self.block_us * len(self.span)) if self.block_us else 0.0

    @property
    def further_block_s(self) -> float:
        """The time that each further decode adds to one block of a forward, by what is announced of one session and of
        `SHARED_SESSIONS`. A server that has not measured many sessions is taken to be as slow with each as with the
        first: nobody is to gain by not measuring. 0 while nothing is known.
        """
        if not self.speed.tokens_per_s:
            return self.block_us / 1e6
        if not self.block_us:
            return 0.0
        batch_s = SHARED_SESSIONS / (self.speed.tokens_per_s * len(self.span))
        return max(0.0, batch_s - self.block_us / 1e6) / (SHARED_SESSIONS - 1)


@dataclass(frozen=True, slots=True)
class Announcement:
    """An offer of a peer, with its addresses and the time when it expires. A higher `sequence` replaces a lower one.

    `sequence` is the announcer's clock in milliseconds since 1970, `expires_ms` likewise.
    """

    peer: PeerId
    addresses: tuple[str, ...]
    sequence: int
    expires_ms: int
    software: str
    """`product/version`, and in parentheses what its peer has noticed about itself."""
    offer: Offer

    @property
    def hop(self) -> Hop:
        """The peer with all of its blocks."""
        return Hop(self.peer, self.offer.span)

    @property
    def has_double(self) -> bool:
        """Whether its peer has noticed that another node uses its identity."""
        return self.software.endswith(f"({DOUBLE})")


@dataclass(frozen=True, slots=True)
class SignedBody:
    """The exact bytes that a peer signed, and the signature."""

    body: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class SignedAnnouncement:
    """An announcement as its peer signed it, to be passed on as it is."""

    announcement: Announcement
    signed: SignedBody
