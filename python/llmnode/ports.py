"""The seams of a node: what can be replaced by a twin in memory.

`Network` carries frames between peers, `Directory` finds a swarm, `Loader` reads a span into an `Executor`, which
computes it, `Worker` runs an executor off the event loop. `llmnode.testing` has the twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.operations import Buffer, Control, Operation, Slice
    from llmnode.core.span import Span
    from llmnode.core.traffic import Traffic
    from llmnode.wire.frame import Frame

Result = TypeVar("Result")


class Link(Protocol):
    """Frames to and from one peer, in order. Ends by itself when the peer falls silent."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def group(self) -> str:
        """The address group that the peer is in (`core/budget`): identities are free, and addresses are not."""

    @property
    def relayed(self) -> bool:
        """Whether it goes through a relay, and not straight to the peer."""

    @property
    def relay_limit_bytes(self) -> int | None:
        """The most bytes that the relay carries in each direction; None without a limit, or without a relay."""

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
        """The traffic of all links since the start."""

    @property
    def key(self) -> bytes:
        """The 32 bytes behind our id, for nobody but ourselves in another process."""

    def vouch(self, addresses: Sequence[str]) -> None:
        """The user has named these addresses: they may be dialled, whoever names them. Raises ConfigError."""

    async def dial(self, address: str, *, is_heard: bool = False) -> Link:
        """Open a link to `address`. Raises ConfigError (no such address form) or PeerUnreachable.

        An address that `is_heard` from others, and that nobody vouches for, is dialled only if it is where we are, and
        seldom.

        Whether the peer takes it, and is still there, shows by its answers.
        """

    def accept(self) -> AbstractAsyncContextManager[Link]:
        """The next link that a peer opened to us; it ends with the context."""

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes with the key behind our own id."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether the holder of the key behind `peer` signed `message`. False too for an id that is none."""


class Directory(Protocol):
    """Names the peers that serve a model, for a node that has met no swarm yet. Slow, and right only after a while.

    Its answers are not verified: the caller checks signatures and expiry.
    """

    async def publish(self, signed: SignedAnnouncement) -> None:
        """Put our announcement where others look for its model. Failing is silent: the next one may succeed."""

    async def find(self, model_digest: bytes) -> Sequence[SignedAnnouncement]:
        """Announcements of peers that serve the model, as far as they are found in time."""


class Held(Protocol):
    """The holdings of an executor, wherever it is."""

    @property
    def span(self) -> Span: ...

    def kv_tokens_free(self) -> int: ...


class Executor(Held, Protocol):
    """Computes a span for any number of sessions. Blocking, and for one thread at a time."""

    def apply(self, operation: Control) -> bool:
        """Do an operation. False if it is an `Open` that there is no KV for. On an error no session is changed."""

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        """Run every slice, and append it to its session's KV. On an error no session is changed.

        A slice that has blocks left puts out nothing yet, and KV does not count it.
        """


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

    Operations of one session are done in the order in which they were asked. If one fails, it fails for no other
    session. A call that is cancelled is not done; but if it runs already, the caller waits for it.
    Where the executor can be lost with all that it holds, every operation but `Close` raises WorkerLost for a session
    that was open then, and `Open` does until there is another executor.
    """

    @property
    def span(self) -> Span: ...

    @property
    def kv_tokens(self) -> int:
        """All the KV that sessions can have, whether free or not, and whether the executor is there or lost."""

    @property
    def kv_tokens_free(self) -> int: ...

    @property
    def busy_us(self) -> int:
        """The time for which it has run an executor since it began."""

    async def do(self, operation: Operation[Result]) -> Result:
        """Do an operation, and return its result."""


class WorkerSource(Protocol):
    """Makes workers for spans of one model, one at a time, for as long as a node lives."""

    @property
    def tensor_bytes(self) -> int:
        """The size of the weights that were loaded last, in memory."""

    async def open_model(self) -> ModelInfo:
        """To be called first. Raises ConfigError or ModelError; WorkerLost if a worker ended at every start."""

    async def fitting_blocks(self) -> int:
        """How many blocks there is memory for. Raises as `Loader.fitting_blocks`, or WorkerLost."""

    async def load(self, span: Span) -> Worker:
        """A fresh worker. The one before has been lost or dropped. Raises as `open_model`."""

    def serves(self) -> None:
        """The worker has done a first forward: if it is lost now, its successor may well do the same."""

    async def wait_lost(self) -> None:
        """Until the worker is lost, which is reported. Raises WorkerLost if another one would be lost too."""

    async def drop(self) -> None:
        """End the worker. Its calls raise WorkerLost from then on, and all its memory is given back."""

    def kill(self) -> None:
        """The node ends: whatever waits for the worker fails at once, as far as a forward can be interrupted."""

    async def end(self) -> None:
        """Nothing is left of the source then."""
