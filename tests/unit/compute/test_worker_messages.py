"""What crosses between a node and its worker process is on the other side what it was on this."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.compute.work import Close, Done, Fork, Open, Part, Truncate, Work
from llmnode.compute.worker_messages import (
    Messages,
    pack_error,
    pack_message,
    put_done,
    put_work,
    take_done,
    take_work,
    unpack_error,
    work_bytes,
)
from llmnode.core.ids import SessionId
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.ports import Piece

SESSIONS = st.binary(min_size=16, max_size=16).map(SessionId)
COUNTS = st.integers(0, 2**31)
SPANS = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda each: Span(each[0], sum(each)))
CHORES = st.one_of(
    st.builds(Open, SESSIONS, SPANS, COUNTS),
    st.builds(Truncate, SESSIONS, COUNTS),
    st.builds(Fork, SESSIONS, SESSIONS, COUNTS, COUNTS),
    st.builds(Close, SESSIONS),
)
PIECES = st.builds(Piece, SESSIONS, COUNTS, COUNTS, st.binary(max_size=200), COUNTS, st.none() | COUNTS)
PARTS = st.builds(Part, PIECES, COUNTS, COUNTS)
WORK = st.builds(Work, st.lists(CHORES, max_size=5), st.lists(PARTS, max_size=5))
ERRORS = st.builds(RuntimeError, st.text(max_size=50))
DONE = st.builds(
    Done,
    st.lists(st.one_of(st.booleans(), ERRORS), max_size=5),
    st.lists(st.one_of(st.binary(max_size=200), ERRORS), max_size=5),
)


def crossed(message: list[object], cut: int) -> list[object]:
    """Read in two pieces."""
    packed, messages = pack_message(*message), Messages()
    cut %= len(packed)
    messages.feed(packed[:cut])
    assert list(messages) == []
    messages.feed(packed[cut:])
    (message,) = messages
    return message


def plain(outcomes: list[object]) -> list[object]:
    """Errors have no equality."""
    return [(type(each), str(each)) if isinstance(each, Exception) else each for each in outcomes]


@given(WORK, COUNTS)
def test_work_arrives_as_it_was(work: Work, cut: int) -> None:
    memory = memoryview(bytearray(work_bytes(work)[0]))
    chores, parts, *sizes = crossed(put_work(work, memory), cut)
    assert tuple(sizes) == work_bytes(work)
    assert take_work(chores, parts, memory) == work  # type: ignore[arg-type]


@given(DONE, COUNTS)
def test_results_and_errors_arrive_as_they_were(done: Done, cut: int) -> None:
    memory = memoryview(bytearray(1000))
    taken = take_done(*crossed(put_done(done, memory), cut), memory)  # type: ignore[arg-type]
    memory[:] = bytes(1000)  # results are the next ones' by then
    assert plain(list(taken.chores)) == plain(list(done.chores))
    assert plain(list(taken.outputs)) == plain(list(done.outputs))


def test_an_error_keeps_its_kind_and_one_of_an_unknown_kind_names_it() -> None:
    class TorchError(RuntimeError):
        pass

    for error, kind, text in (
        (ConfigError("mend it"), ConfigError, "mend it"),
        (MemoryError(), MemoryError, ""),
        (TorchError("no room"), RuntimeError, "no room"),
        (KeyError("odd"), RuntimeError, "KeyError: 'odd'"),
        (RuntimeError("\ud800" + "x" * 100_000), RuntimeError, "?" + "x" * 3999),
    ):
        (message,) = ([*pack_error(error)],)
        unpacked = unpack_error(crossed(message, 3))
        assert type(unpacked) is kind
        assert str(unpacked) == text
