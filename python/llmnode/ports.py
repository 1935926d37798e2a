"""The seams of a node: what can be replaced by a twin in memory.

`Network` carries frames between peers, `Directory` finds a swarm, `Loader` reads a span into an `Executor`, which
computes it, `Worker` runs an executor off the event loop. `llmnode.testing` has the twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llmnode.core.serving.scheduling import Priority

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.core.traffic import Traffic
    from llmnode.wire.frame import Buffer, Frame


class Link(Protocol):
    """Frames to and from one peer, in order. Ends by itself when the peer falls silent."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def relayed(self) -> bool:
        """Whether it goes through a relay, and not straight to the peer."""

    @property
    def relay_limit_bytes(self) -> int | None:
        """What the relay carries at most, in each direction; None if that is not limited, or there is none."""

    async def wait_direct(self) -> None:
        """Until a new link to the peer would not go through a relay."""

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
    def traffic(self) -> Traffic:
        """Of all links so far."""

    @property
    def key(self) -> bytes:
        """The 32 bytes behind our id, for nobody but ourselves in another process."""

    async def dial(self, address: str) -> Link:
        """Open a link to `address`. Raises ConfigError (no such address form) or PeerUnreachable.

        Whether the peer takes it, and is still there, shows by its answers.
        """

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
    """A part of one forward: positions `start` and on of one session, through the blocks that it opened.

    Or through some of these: an executor that was given others before them has kept what came of that, and is given the
    rest, with the same positions, before any other piece of the session.
    """

    session: SessionId
    start: int
    length: int
    hidden: Buffer
    """(length, hidden_size) of the model's dtype; with `first`, empty."""
    first: int = 0
    """Of the session's blocks, counted from its own first one."""
    end: int | None = None
    """Up to which of them; None for all."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The answer to a `Piece`: hidden states of the same shape, and where the time went."""

    hidden: Buffer
    queue_us: int
    """The rest of the time from when it was asked for until it was there."""
    compute_us: int
    """Of all forwards that had a part of it, whole, whoever else was in them: what it waited for, and not its share."""


class Held(Protocol):
    """What an executor holds, wherever it is."""

    @property
    def span(self) -> Span: ...

    def kv_tokens_free(self) -> int: ...


class Executor(Held, Protocol):
    """Computes a span for any number of sessions. Blocking, and for one thread at a time."""

    def open(self, session: SessionId, span: Span, max_length: int) -> bool:
        """Reserve KV for `max_length` positions. False, and nothing reserved, if there is no room."""

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Buffer]:
        """Run every piece, and append to its session's KV. On an error no session is changed.

        Of a piece that has blocks left to go through nothing comes back yet, and KV does not count it.
        """

    def truncate(self, session: SessionId, length: int) -> None:
        """Keep so much of its KV, and nothing of a piece that has blocks left."""

    def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None:
        """Have the session's KV be the first `length` positions of `source`'s, which goes through the same blocks.

        The first `shared` are the same already. On an error no session is changed.
        """

    def close(self, session: SessionId) -> None:
        """Free the session's KV. Closing an unknown session does nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`tensor_bytes` are of the span's weights in memory."""

    executor: Executor
    tensor_bytes: int


class Loader(Protocol):
    """Opens one model, and makes an executor of a span of it. Blocking, and for one thread at a time."""

    def open_model(self) -> ModelInfo:
        """To be called first. Its dtype is what the blocks will be computed in. Raises ConfigError or ModelError."""

    def fitting_blocks(self) -> int:
        """How many there is memory for. Raises ConfigError if it is none."""

    def load(self, span: Span) -> Loaded:
        """Raises ConfigError or ModelError."""


class Worker(Protocol):
    """Runs one executor apart from the event loop, and shares it among sessions.

    What is asked for one session is done in the order in which it was asked. Whatever fails for one fails for no other.
    A call that is cancelled is not done, unless it runs already: then it is waited for.
    Where the executor can be lost with all that it holds, every call but `close` raises WorkerLost for a session that
    was open then, and `open` until there is another.
    """

    @property
    def span(self) -> Span: ...

    @property
    def kv_tokens(self) -> int:
        """All the KV there is for sessions, whether free or not, and whether the executor is there or lost."""

    @property
    def kv_tokens_free(self) -> int: ...

    @property
    def busy_us(self) -> int:
        """For how long it has run the executor, whichever there was."""

    async def open(
        self,
        session: SessionId,
        span: Span,
        max_length: int,
        client: PeerId,
        priority: Priority = Priority.INTERACTIVE,
    ) -> bool:
        """As `Executor.open`. `client` is on whose account its forwards go."""

    async def forward(self, piece: Piece) -> Computed: ...

    async def truncate(self, session: SessionId, length: int) -> None: ...

    async def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None: ...

    async def close(self, session: SessionId) -> None: ...
