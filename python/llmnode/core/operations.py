"""The operations that are asked of a worker: each is a value, from the stage that decides on it to the executor.

A worker does an operation (`Worker.do`). It gives a forward to its executor in slices, which batches choose, and every
other operation as it is. Nothing here knows a frame, a tensor or a queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from llmnode.core.ids import AdapterId, PeerId, SessionId
from llmnode.core.priority import Priority
from llmnode.core.span import Span

Buffer: TypeAlias = bytes | bytearray | memoryview

Result_co = TypeVar("Result_co", covariant=True)


class Operation(Generic[Result_co]):
    """The base of all operations. A worker answers it with a `Result_co`, or raises."""

    __slots__ = ()

    @property
    def sessions(self) -> tuple[SessionId, ...]:
        """All sessions that it reads or changes. It waits for what was asked for them before."""
        return ()


class SessionOperation(Operation[Result_co]):
    """The base of the operations of a session."""

    __slots__ = ()

    session: SessionId

    @property
    def sessions(self) -> tuple[SessionId, ...]:
        return (self.session,)


@dataclass(frozen=True, slots=True)
class DeepPrompts:
    """Numbers that are added to the first `positions` of each sequence before each block. Source: Petals, section 3.3.

    `values` is (blocks, rows, positions, hidden_size) in fp32. There is one row for all sequences, or one for each.
    """

    blocks: int
    rows: int
    positions: int
    values: Buffer

    def __bool__(self) -> bool:
        return self.blocks > 0

    @property
    def size_bytes(self) -> int:
        return memoryview(self.values).nbytes

    def of_blocks(self, first: int, end: int) -> DeepPrompts:
        """Those of the blocks [`first`, `end`), counted from their own first one. Copies nothing."""
        if not self:
            return self
        block_bytes = self.size_bytes // self.blocks
        values = memoryview(self.values).cast("B")[first * block_bytes : end * block_bytes]
        return DeepPrompts(end - first, self.rows, self.positions, values)

    def of_sequences(self, start: int, end: int) -> DeepPrompts:
        """Those of the sequences [`start`, `end`)."""
        if self.rows <= 1 or (start, end) == (0, self.rows):
            return self
        row_bytes = self.size_bytes // (self.blocks * self.rows)
        values = memoryview(self.values).cast("B")
        firsts = range(start, self.blocks * self.rows, self.rows)
        parts = [values[first * row_bytes : (first + end - start) * row_bytes] for first in firsts]
        return DeepPrompts(self.blocks, end - start, self.positions, b"".join(parts))


NO_PROMPTS = DeepPrompts(0, 0, 0, b"")


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of what goes into the matrices of an adapter, in training: each number is 0 with this `probability`.

    There is a seed for each sequence, in [0, 2^63). The numbers that are 0 follow from it, and from nothing else of a
    pass. So a backward and another server drop the same ones (`compute/dropout.py`).
    """

    probability: float
    seeds: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.seeds)

    def of_sequences(self, start: int, end: int) -> Dropout:
        """That of the sequences [`start`, `end`)."""
        return Dropout(self.probability, self.seeds[start:end])


NO_DROPOUT = Dropout(0.0, ())


@dataclass(frozen=True, slots=True)
class Open(SessionOperation[bool]):
    """Reserve KV in the blocks of `span` for `positions`, or for all of `max_length`. False if they do not fit."""

    session: SessionId
    span: Span
    max_length: int
    client: PeerId = PeerId("")
    """The account that its forwards are charged to."""
    priority: Priority = Priority.INTERACTIVE
    adapter: AdapterId | None = None
    """The adapter that its forwards go through. All parts of it in the blocks of `span` are adopted."""
    prompts: DeepPrompts = NO_PROMPTS
    """One row, for the blocks of `span`."""
    group: str = ""
    """The client's address group: clients of one group share what a single client of another one gets."""
    positions: int | None = None
    """KV for them is enough at first: it grows with `Resize`."""

    @property
    def first_positions(self) -> int:
        return self.max_length if self.positions is None else self.positions


@dataclass(frozen=True, slots=True)
class Resize(SessionOperation[bool]):
    """Have KV for this number of `positions` in all, at most `Open.max_length`. False if there is no memory for it.

    They are no fewer than have ever been computed: positions that were cut off may have memory still.
    """

    session: SessionId
    positions: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a `Forward`, `Evaluate` or `Backward`: numbers of the same shape, and where the time went."""

    hidden: Buffer
    queue_us: int
    """The rest of the time from the request to the result."""
    compute_us: int
    """The whole time of all batches that had a slice of it, whatever else was in them."""


@dataclass(frozen=True, slots=True)
class Forward(SessionOperation[Computed]):
    """Run `length` positions, from `start` on, through the session's blocks, and append them to its KV."""

    session: SessionId
    start: int
    length: int
    hidden: Buffer
    """(length, hidden_size) in fp32."""

    def rows(self, start: int, length: int) -> memoryview:
        """The hidden states of `length` positions, from its own position `start` on. Copies nothing."""
        row_bytes = len(self.hidden) // self.length
        return memoryview(self.hidden)[start * row_bytes : (start + length) * row_bytes]


@dataclass(frozen=True, slots=True)
class Truncate(SessionOperation[bool]):
    """Keep the first `length` positions of the session's KV, and nothing of a forward that has blocks left."""

    session: SessionId
    length: int


@dataclass(frozen=True, slots=True)
class Fork(SessionOperation[bool]):
    """Make the session's KV the first `length` positions of that of `source`, which goes through the same blocks.

    The first `shared` are the same already. On an error no session is changed.
    """

    session: SessionId
    source: SessionId
    shared: int
    length: int

    @property
    def sessions(self) -> tuple[SessionId, ...]:
        return self.session, self.source


@dataclass(frozen=True, slots=True)
class Close(SessionOperation[bool]):
    """Free the session's KV. Closing an unknown session does nothing."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Adopt(Operation[bool]):
    """Hold the part of an adapter that belongs to one block, until it is forgotten.

    Raises AdapterError if the part does not fit the block; then nothing is held.
    """

    adapter: AdapterId
    block: int
    values: int
    """How many numbers its matrices have."""
    weights: Buffer
    """The part, in the form of `models/lora.py`."""


@dataclass(frozen=True, slots=True)
class Forget(Operation[bool]):
    """Drop all parts of an adapter, which no session uses. To forget an unknown one does nothing."""

    adapter: AdapterId


Control: TypeAlias = Open | Resize | Truncate | Fork | Close | Adopt | Forget
"""The operations that take no time: an executor does each whole, before the slices of its batch."""


@dataclass(frozen=True, slots=True)
class Evaluate(Operation[Computed]):
    """Put whole sequences through the blocks of `span`. It has no session, and nothing of it is kept.

    Petals' `rpc_forward`: for training, and for all that needs outputs alone.
    """

    span: Span
    lengths: tuple[int, ...]
    """Positions of each sequence."""
    hidden: Buffer
    """(positions, hidden_size) in fp32, sequence after sequence."""
    client: PeerId = PeerId("")
    """The account that it is charged to."""
    priority: Priority = Priority.TRAINING
    adapter: AdapterId | None = None
    """The adapter that the blocks have for these sequences; see `Open`."""
    waited_s: float = 0.0
    """How long the parts of the same pass before it have waited for their turns."""
    prompts: DeepPrompts = NO_PROMPTS
    """Those of the blocks of `span`."""
    group: str = ""
    """The client's address group, as in `Open`."""
    number: int = 0
    """The pass of a client with the least number goes first, with all of its parts."""
    alone: bool = False
    """Nothing else is computed together with it, since a product of more rows may give them other bits."""
    dropout: Dropout = NO_DROPOUT
    """That of the adapter."""

    @property
    def positions(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Backward(Operation[Computed]):
    """Gradients for `hidden`, which goes into the blocks of `span`, from `gradient` for what comes out.

    Both are of one shape, as in `Evaluate`. The blocks are computed again. Petals' `rpc_backward`. The result also has
    gradients for the adapter's matrices, in the order of `models/lora.py`, after those for `hidden`; and then those for
    `prompts`, in their form.
    """

    span: Span
    lengths: tuple[int, ...]
    hidden: Buffer
    gradient: Buffer
    client: PeerId = PeerId("")
    priority: Priority = Priority.TRAINING
    adapter: AdapterId | None = None
    adapter_values: int = 0
    """How many numbers the adapter's matrices have in the blocks of `span`."""
    waited_s: float = 0.0
    prompts: DeepPrompts = NO_PROMPTS
    group: str = ""
    number: int = 0
    alone: bool = False
    dropout: Dropout = NO_DROPOUT

    @property
    def positions(self) -> int:
        return sum(self.lengths)


Pass: TypeAlias = Evaluate | Backward
"""An operation without a session: an executor does several of one kind through the same blocks at once."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The positions and blocks of one forward that one batch computes.

    The positions are [`start`, `start + length`) of the session. Its blocks, counted from its own first one, are
    [`first`, `end`). The executor keeps what has blocks left, and gets the rest before any other slice of the session.
    """

    session: SessionId
    start: int
    length: int
    hidden: Buffer
    """(length, hidden_size) in fp32; empty if `first` is not 0, since the executor has them."""
    first: int = 0
    end: int | None = None
    """None for the session's last block."""

    @property
    def is_whole(self) -> bool:
        """Whether it goes through all blocks of the session at once."""
        return not self.first and self.end is None

    def blocks(self, span: Span) -> Span:
        """Its blocks in the model, where `span` are those of its session."""
        if self.is_whole:
            return span
        return Span(span.start + self.first, span.end if self.end is None else span.start + self.end)
