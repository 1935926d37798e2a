"""What one batch asks of an executor, as plain data, and how it is done: in whatever thread or process that lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.span import Span
    from llmnode.ports import Executor, Piece
    from llmnode.wire.frame import Buffer


@dataclass(frozen=True, slots=True)
class Open:
    session: SessionId
    span: Span
    max_length: int


@dataclass(frozen=True, slots=True)
class Truncate:
    session: SessionId
    length: int


@dataclass(frozen=True, slots=True)
class Fork:
    session: SessionId
    source: SessionId
    shared: int
    length: int


@dataclass(frozen=True, slots=True)
class Close:
    session: SessionId


Chore = Open | Truncate | Fork | Close


@dataclass(frozen=True, slots=True)
class Part:
    """Of a piece, or all of it. If it fails, its session goes back to `undo_to`, where the whole piece began."""

    piece: Piece
    undo_to: int
    output_bytes: int
    """0 while it has blocks left to go through."""


@dataclass(frozen=True, slots=True)
class Work:
    """The chores are done in their order, and then all parts in one forward."""

    chores: Sequence[Chore]
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Done:
    """In the order of the `Work`: of each chore whether there was room for it, of each part its hidden states."""

    chores: Sequence[bool | Exception]
    outputs: Sequence[Buffer | Exception]


def do(executor: Executor, work: Work) -> Done:
    """Raises nothing. No one's failure is another's, and who fails is as it was before its piece."""
    chores = [_settle(executor, chore) for chore in work.chores]
    outputs = _forward(executor, [part.piece for part in work.parts])
    for part, output in zip(work.parts, outputs, strict=True):
        if isinstance(output, Exception) and (part.undo_to < part.piece.start or part.piece.first):
            executor.truncate(part.piece.session, part.undo_to)
    return Done(chores, outputs)


def failed(work: Work, error: Exception) -> Done:
    """All of it, for the same reason."""
    return Done([error] * len(work.chores), [error] * len(work.parts))


def _settle(executor: Executor, chore: Chore) -> bool | Exception:
    try:
        match chore:
            case Open(session, span, max_length):
                return executor.open(session, span, max_length)
            case Truncate(session, length):
                executor.truncate(session, length)
            case Fork(session, source, shared, length):
                executor.fork(session, source, shared, length)
            case Close(session):
                executor.close(session)
    except Exception as error:  # noqa: BLE001  it is raised to whoever asked
        return error
    return True


def _forward(executor: Executor, pieces: Sequence[Piece]) -> Sequence[Buffer | Exception]:
    """In one forward; if that fails in two, and so on: so it is found out whose failure it is."""
    if not pieces:
        return []
    try:
        return executor.forward(pieces)
    except Exception as error:  # noqa: BLE001  it is raised to whoever asked for the piece
        if len(pieces) == 1:
            return [error]
    half = len(pieces) // 2
    return [*_forward(executor, pieces[:half]), *_forward(executor, pieces[half:])]
