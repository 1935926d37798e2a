"""How work crosses between a node and its worker process: msgpack for what is small, shared memory for hidden states.

A message is a list that begins with a word. Both ends are of one version and trust each other, so a wrong message is a
bug; what a peer has sent is numbers in shared memory, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from llmnode.compute.work import Close, Done, Fork, Open, Part, Truncate, Work
from llmnode.core.ids import SessionId
from llmnode.core.span import Span
from llmnode.errors import ConfigError, LocalProtocolError, ModelError
from llmnode.ports import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.compute.work import Chore
    from llmnode.wire.frame import Buffer

Message = list[Any]  # Any: what msgpack can hold

HELLO = "hello"
"""The child's first: it has started, and has imported nothing large."""
SAID = "said"
"""The child's, with a line about what takes long. The answer is still to come."""
ANSWER, FAILED = "answer", "failed"
OPEN_MODEL, FITTING_BLOCKS, LOAD, WORK = "open-model", "fitting-blocks", "load", "work"
"""The node's, each of which has one answer."""

ERROR_CHARACTERS = 4000

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, ModelError, LocalProtocolError, MemoryError, RuntimeError)
}
_CHORES: dict[str, type[Truncate | Fork | Close]] = {"truncate": Truncate, "fork": Fork, "close": Close}


def pack_message(*message: Any) -> bytes:  # Any: what msgpack can hold
    packed = msgpack.packb(message)
    assert isinstance(packed, bytes)
    return packed


class Messages:
    """Out of bytes, however they were cut."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker()

    def feed(self, data: bytes) -> None:
        self._unpacker.feed(data)

    def __iter__(self) -> Iterator[Message]:
        """Those that are whole by now, each once."""
        yield from self._unpacker


def pack_error(error: Exception) -> Message:
    """What the other end has no class for is a RuntimeError there, as torch's errors are."""
    kind = next((name for name, each in _ERRORS.items() if isinstance(error, each)), None)
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    return [kind or RuntimeError.__name__, text[:ERROR_CHARACTERS].encode(errors="replace")]


def unpack_error(message: Message) -> Exception:
    kind, text = message
    return _ERRORS[kind](text.decode())


def work_bytes(work: Work) -> tuple[int, int]:
    """Of hidden states: those that go there, and those that come back."""
    parts = work.parts
    return sum(memoryview(part.piece.hidden).nbytes for part in parts), sum(part.output_bytes for part in parts)


def put_work(work: Work, memory: memoryview) -> Message:
    """Copies hidden states to `memory`, of the first of `work_bytes`."""
    sizes = put_buffers([part.piece.hidden for part in work.parts], memory)
    parts = [[size, *_put_part(part)] for part, size in zip(work.parts, sizes, strict=True)]
    return [[_put_chore(chore) for chore in work.chores], parts, *work_bytes(work)]


def take_work(chores: Message, parts: Message, memory: memoryview) -> Work:
    """Copies nothing: hidden states stay in `memory`."""
    buffers = take_buffers([size for size, *_ in parts], memory)
    return Work(
        [_take_chore(*chore) for chore in chores],
        [_take_part(hidden, *part) for (_, *part), hidden in zip(parts, buffers, strict=True)],
    )


def put_done(done: Done, memory: memoryview) -> Message:
    """Copies hidden states to `memory`."""
    sizes = iter(put_buffers([each for each in done.outputs if not isinstance(each, Exception)], memory))
    chores = [pack_error(each) if isinstance(each, Exception) else each for each in done.chores]
    return [chores, [pack_error(each) if isinstance(each, Exception) else next(sizes) for each in done.outputs]]


def take_done(chores: Message, outputs: Message, memory: memoryview) -> Done:
    """Copies hidden states out of `memory`, which is for the next results then."""
    buffers = take_buffers([each for each in outputs if isinstance(each, int)], memory)
    return Done(
        [unpack_error(each) if isinstance(each, list) else each for each in chores],
        [unpack_error(each) if isinstance(each, list) else bytes(next(buffers)) for each in outputs],
    )


def put_buffers(buffers: Sequence[Buffer], memory: memoryview) -> list[int]:
    """One after the other. Returns their sizes."""
    sizes, offset = [], 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        memory[offset : offset + len(view)] = view
        sizes.append(len(view))
        offset += len(view)
    return sizes


def take_buffers(sizes: Sequence[int], memory: memoryview) -> Iterator[memoryview]:
    offset = 0
    for size in sizes:
        yield memory[offset : offset + size]
        offset += size


def _put_part(part: Part) -> Message:
    piece = part.piece
    return [piece.session, piece.start, piece.length, piece.first, piece.end, part.undo_to, part.output_bytes]


def _take_part(hidden: Buffer, session: bytes, *fields: Any) -> Part:  # Any: numbers, and None for an end
    start, length, first, end, undo_to, output_bytes = fields
    return Part(Piece(SessionId(session), start, length, hidden, first, end), undo_to, output_bytes)


def _put_chore(chore: Chore) -> Message:
    match chore:
        case Open(session, span, max_length):
            return ["open", session, span.start, span.end, max_length]
        case Truncate(session, length):
            return ["truncate", session, length]
        case Fork(session, source, shared, length):
            return ["fork", session, source, shared, length]
        case Close(session):
            return ["close", session]


def _take_chore(kind: str, session: bytes, *fields: Any) -> Chore:  # Any: as each kind has them
    if kind == "open":
        start, end, max_length = fields
        return Open(SessionId(session), Span(start, end), max_length)
    return _CHORES[kind](SessionId(session), *fields)
