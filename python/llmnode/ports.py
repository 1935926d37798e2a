"""The interfaces of a node: each can be replaced by a twin in memory.

`Network` carries frames between peers. `Directory` finds a swarm. `Loader` reads a span into an `Executor`, which
computes it. `Worker` runs an executor off the event loop. `llmnode.testing` has the twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.budget import Budget, Scope
    from llmnode.core.ids import PeerId
    from llmnode.core.links.send_rates import SendRates
    from llmnode.core.model import ModelInfo, Precision
    from llmnode.core.operations import Buffer, Control, Operation, Pass, Slice
    from llmnode.core.placement.own_precision import Candidate
    from llmnode.core.span import Span
    from llmnode.core.speed import ForwardsSeen
    from llmnode.core.traffic import Traffic
    from llmnode.wire.frame import Frame

Result = TypeVar("Result")


class Link(Protocol):
    """Frames to and from one peer, in order within each session, and within each step without a session.

    It ends by itself when the peer falls silent.
    """

    @property
    def peer(self) -> PeerId: ...

    @property
    def group(self) -> str:
        """The peer's address group (`core/budget`). Identities cost nothing, but addresses do."""

    @property
    def scope(self) -> Scope:
        """The part of the node's budget that the link holds. It is closed with the link."""

    @property
    def relayed(self) -> bool:
        """Whether it goes through a relay."""

    @property
    def relay_limit_bytes(self) -> int | None:
        """The most bytes that the relay carries in each direction; None without a limit, or without a relay."""

    @property
    def version(self) -> int | None:
        """The newest protocol that both sides speak; None while the other side has not agreed to one."""

    async def wait_version(self) -> int:
        """Until the other side has agreed to a version, which is returned. Raises as `receive`."""

    async def wait_direct(self) -> None:
        """Wait until a new link to the peer would not go through a relay."""

    @property
    def is_full(self) -> bool:
        """Whether too much waits for the peer already, so that `send` waits until it has taken some of that."""

    async def send(self, frame: Frame) -> None:
        """Queue a frame. It returns before the frame is on the wire. Raises PeerUnreachable once the link has ended."""

    async def wait_written(self) -> None:
        """Until the system has taken what was sent before. Raises PeerUnreachable once the link has ended."""

    async def receive(self) -> Frame:
        """The next frame. One task at a time. Raises PeerUnreachable or RemoteProtocolError when the link has ended."""

    async def end(self, reason: str) -> None:
        """Close the link: `receive` raises at both sides. It may be called twice."""


class Network(Protocol):
    """Authenticated connections to peers: the peer at the other end has proved that it holds the key of its id."""

    @property
    def peer(self) -> PeerId:
        """Our own id."""

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs where others reach us. They end in `/p2p/ID`."""

    @property
    def budget(self) -> Budget:
        """The limits for all peers together."""

    @property
    def traffic(self) -> Traffic:
        """The traffic of all links since the start."""

    @property
    def send_rates(self) -> SendRates:
        """How fast peers have taken large frames from us lately, as they say."""

    @property
    def key(self) -> bytes:
        """The 32 bytes of our private key. Give them only to another process of our own."""

    def vouch(self, addresses: Sequence[str]) -> None:
        """The user has named these addresses. So they may be dialled, also if others name them. Raises ConfigError."""

    async def dial(self, address: str, *, is_heard: bool = False) -> Link:
        """Open a link to `address`. Raises ConfigError (no such address form) or PeerUnreachable.

        `is_heard`: others have told us the address. Unless the user vouches for it, it is dialled seldom, and only if
        it is public or in our own network.

        A link is no proof that the peer accepts it, or is still there. Only its answers show that.
        """

    def accept(self) -> AbstractAsyncContextManager[Link]:
        """The next link that a peer opened to us. It ends with the context."""

    def sign(self, message: bytes) -> bytes:
        """A signature of 64 bytes with the key behind our own id."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether the holder of the key of `peer` has signed `message`. False if `peer` is not a valid id."""


class Directory(Protocol):
    """Names the peers that serve a model, for a node that has met no swarm yet. It is slow, and right after a while.

    Its answers are not verified: the caller checks signatures and expiry.
    """

    async def publish(self, signed: SignedAnnouncement) -> None:
        """Put our announcement where others look for its model. A failure is silent: the next call may succeed."""

    async def find(self, model_digest: bytes) -> Sequence[SignedAnnouncement]:
        """Announcements of peers that serve the model, as far as the directory finds them in time."""


class Held(Protocol):
    """The span of an executor and its free KV. The executor may be in another process."""

    @property
    def span(self) -> Span: ...

    def kv_tokens_free(self) -> int: ...

    @property
    def kv_page(self) -> int:
        """KV is reserved in multiples of this many positions."""

    @property
    def passes_beside(self) -> bool:
        """Whether passes are computed at the same time as all else."""


class Executor(Held, Protocol):
    """Computes a span for any number of sessions. It blocks. One thread at a time may use it.

    If it has `passes_beside`, another thread may call `run` meanwhile.
    """

    def apply(self, operation: Control) -> bool:
        """Do an operation. False if it is an `Open` or a `Resize`, and there is no KV for it.

        On an error no session is changed.
        """

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        """Run every slice, and append it to its session's KV. On an error no session is changed.

        A slice with more blocks to come has no output yet, and does not count in the KV.
        """

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        """Do passes of one kind, all through the same blocks. Nothing of them is kept."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An executor that has its weights. `tensor_bytes` is their size in memory.

    `position_bytes` is what one position of a session takes: its KV in all blocks, and its place in the log. It is 0 if
    that is not known, or if any of it, or of the weights, is not in the memory of the CPU.
    """

    executor: Executor
    tensor_bytes: int
    position_bytes: int = 0


class Loader(Protocol):
    """Opens one model, and loads spans of it. It blocks. One thread at a time may use it."""

    def open_model(self) -> ModelInfo:
        """Call it first. The dtype of the result is that of the blocks. Raises ConfigError or ModelError."""

    def fitting_blocks(self) -> int:
        """The number of blocks that there is memory for. Raises ConfigError if it is none."""

    def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        """Those of the `precisions` in which the device can compute the model, and has memory for a block."""

    def load(self, span: Span) -> Loaded:
        """Load a span. Raises ConfigError or ModelError."""

    def load_beside(self, span: Span, held: Executor, kv_tokens: int) -> Loaded | None:
        """Load a span while another thread uses `held`, with KV for `kv_tokens` positions as that has.

        Blocks that both have are in memory once. None if there is no memory for both. Raises as `load`.
        """


class Worker(Protocol):
    """Runs one executor apart from the event loop, and shares it among sessions.

    Operations of one session are done in the order in which they were asked for. If one fails, other sessions do not
    notice. A cancelled call is not done; but if it runs already, the caller waits for it.
    An executor can be lost with all its KV. Then every operation but `Close` raises WorkerLost for sessions that were
    open, and `Open` does so until there is another executor.
    """

    @property
    def span(self) -> Span: ...

    @property
    def kv_tokens(self) -> int:
        """The positions of KV that all sessions together can have, free or not, also while the executor is lost."""

    @property
    def kv_tokens_free(self) -> int: ...

    @property
    def kv_page(self) -> int:
        """KV is reserved in multiples of this many positions."""

    @property
    def busy_us(self) -> int:
        """The time for which executors have computed since the worker began, in microseconds. Passes that they compute
        beside all else count too.
        """

    @property
    def load(self) -> float:
        """The load average: how many forwards and passes it has computed, or had waiting, at a time lately."""

    @property
    def seen(self) -> ForwardsSeen:
        """The times of forwards until now."""

    def pass_blocks(self, kind: type[Pass], positions: int, blocks: int) -> int:
        """The blocks, out of `blocks`, that this many `positions` of a pass may go through in one operation now, since
        others wait meanwhile: for passes beside all else, other passes alone.
        """

    def pass_positions(self, kind: type[Pass], blocks: int) -> int:
        """Sequences of a pass through `blocks` blocks go together up to this number of positions now."""

    async def do(self, operation: Operation[Result]) -> Result:
        """Do an operation, and return its result."""


class WorkerSource(Protocol):
    """Makes workers for spans of one model, for as long as a node lives: one, or two while it changes its span."""

    @property
    def tensor_bytes(self) -> int:
        """The size in memory of the weights that were loaded last, of the workers that there are."""

    @property
    def position_bytes(self) -> int:
        """That of a position, as in `Loaded`, of the same worker."""

    async def open_model(self) -> ModelInfo:
        """Call it first. Raises ConfigError or ModelError; WorkerLost if a worker ended at every start."""

    async def fitting_blocks(self) -> int:
        """The number of blocks that there is memory for. Raises as `Loader.fitting_blocks`, or WorkerLost."""

    async def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        """Returns those of `Loader.candidates`. Raises WorkerLost."""

    async def load(self, span: Span) -> Worker:
        """A fresh worker. The one before it is lost or dropped by then. Raises as `open_model`."""

    async def load_beside(self, span: Span) -> Worker | None:
        """A second worker, while the first one goes on. None if there is no memory for both.

        If it is cancelled or raises, there is one worker as before. Raises as `load`; WorkerLost if both are lost.
        """

    async def drop_one(self, worker: Worker) -> None:
        """End one of two workers: from then on its calls raise WorkerLost. Frees the memory that it alone held."""

    def serves(self) -> None:
        """The worker has done a first forward. If it is lost now, its successor may well serve too."""

    async def wait_lost(self) -> None:
        """Wait until the worker is lost, and report it. Two are lost together.

        Raises WorkerLost if another one would be lost too.
        """

    async def drop(self) -> None:
        """End all workers, and free all their memory. From then on their calls raise WorkerLost."""

    def kill(self) -> None:
        """The node ends: calls that wait for the worker fail at once, as far as a forward can be interrupted."""

    async def end(self) -> None:
        """End the source. Afterwards nothing of it is left."""
