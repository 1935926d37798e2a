"""The seams of a node: what can be replaced by a twin in memory.

`Network` carries frames between peers, `Directory` finds a swarm, `Executor` computes a span, `Worker` runs an executor
off the event loop. `llmnode.testing` has the twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.span import Span
    from llmnode.wire.frame import Buffer, Frame


class Link(Protocol):
    """Frames to and from one peer, in order. Ends by itself when the peer falls silent."""

    @property
    def peer(self) -> PeerId: ...

    async def send(self, frame: Frame) -> None:
        """Queue a frame; returns before it is on the wire. Raises PeerUnreachable once the link has ended."""

    async def receive(self) -> Frame:
        """The next frame. One task at a time. Raises PeerUnreachable or RemoteProtocolError when the link has ended."""

    async def end(self, reason: str) -> None:
        """Close the link; both sides' `receive` raise. Safe to call twice."""


class Network(Protocol):
    """Connections to peers, authenticated: a link's `peer` proved that it holds the key of that id."""

    @property
    def peer(self) -> PeerId:
        """Our own id."""

    @property
    def addresses(self) -> Sequence[str]:
        """Where others reach us: multiaddrs that end in `/p2p/ID`."""

    @property
    def key(self) -> bytes:
        """The 32 bytes behind our id, for nobody but ourselves in another process."""

    async def dial(self, address: str) -> Link:
        """Open a link to `address`. Raises ConfigError (no such address form) or PeerUnreachable."""

    def accept(self) -> AbstractAsyncContextManager[Link]:
        """The next link that a peer opened to us; it ends with the context."""

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes with the key behind our own id."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether the holder of the key behind `peer` signed `message`. False too for an id that is none."""


class Directory(Protocol):
    """Says who serves a model, to somebody who has met no swarm yet. Slow, and right only after a while.

    What it answers is not verified: whoever asks checks signatures and expiry.
    """

    async def publish(self, signed: SignedAnnouncement) -> None:
        """Put our announcement where others look for its model. Failing is silent: the next one may succeed."""

    async def find(self, model_digest: bytes) -> Sequence[SignedAnnouncement]:
        """Announcements of peers that serve the model, as far as they are found in time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one forward: positions `start` and on of one session, through the blocks that it opened."""

    session: SessionId
    start: int
    length: int
    hidden: Buffer
    """(length, hidden_size) of the model's dtype."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The answer to a `Piece`: hidden states of the same shape, and where the time went."""

    hidden: Buffer
    queue_us: int
    compute_us: int


class Executor(Protocol):
    """Computes a span for any number of sessions. Blocking, and for one thread at a time."""

    span: Span

    def kv_tokens_free(self) -> int: ...

    def open(self, session: SessionId, span: Span, max_length: int) -> bool:
        """Reserve KV for `max_length` positions. False, and nothing reserved, if there is no room."""

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Buffer]:
        """Run every piece, and append to its session's KV. On an error no session is changed."""

    def truncate(self, session: SessionId, length: int) -> None: ...

    def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None:
        """Have the session's KV be the first `length` positions of `source`'s, which goes through the same blocks.

        The first `shared` are the same already. On an error no session is changed.
        """

    def close(self, session: SessionId) -> None:
        """Free the session's KV. Closing an unknown session does nothing."""


class Worker(Protocol):
    """Runs one executor apart from the event loop, one call at a time, in the order in which they are made."""

    @property
    def span(self) -> Span: ...

    @property
    def kv_tokens_free(self) -> int: ...

    async def open(self, session: SessionId, span: Span, max_length: int) -> bool: ...

    async def forward(self, piece: Piece) -> Computed: ...

    async def truncate(self, session: SessionId, length: int) -> None: ...

    async def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None: ...

    async def close(self, session: SessionId) -> None: ...
