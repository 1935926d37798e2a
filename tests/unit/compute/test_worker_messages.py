"""Operations, slices and results arrive in the worker process as they were sent, and back; wrong ones are refused."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.compute.packed_fields import unpack_fields
from llmnode.compute.work import Done, Work
from llmnode.compute.worker_messages import (
    Messages,
    input_bytes,
    pack_error,
    pack_message,
    put_done,
    put_work,
    take_done,
    take_work,
    unpack_error,
)
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import (
    NO_PROMPTS,
    Adopt,
    Backward,
    Close,
    Control,
    DeepPrompts,
    Dropout,
    Evaluate,
    Forget,
    Fork,
    Open,
    Pass,
    Resize,
    Slice,
    Truncate,
)
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.errors import AdapterError, ConfigError, EmbeddedModelMissing, LocalProtocolError

SESSIONS = st.binary(min_size=16, max_size=16).map(SessionId)
CHARACTERS = st.characters(codec="utf-8")
COUNTS = st.integers(0, 2**31)
SPANS = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda each: Span(each[0], sum(each)))
ACCOUNTS = st.text(CHARACTERS, max_size=60).map(PeerId), st.sampled_from(Priority)
ADAPTERS = st.binary(min_size=32, max_size=32)
NUMBERS = st.binary(max_size=200)
PROMPTS = st.just(NO_PROMPTS) | st.builds(DeepPrompts, COUNTS, COUNTS, COUNTS, NUMBERS)
CONTROLS = st.one_of(
    st.builds(
        Open, SESSIONS, SPANS, COUNTS, *ACCOUNTS, st.none() | ADAPTERS, PROMPTS, st.text(max_size=9), st.none() | COUNTS
    ),
    st.builds(Resize, SESSIONS, COUNTS),
    st.builds(Truncate, SESSIONS, COUNTS),
    st.builds(Fork, SESSIONS, SESSIONS, COUNTS, COUNTS),
    st.builds(Close, SESSIONS),
    st.builds(Adopt, ADAPTERS, COUNTS, COUNTS, st.binary(max_size=200)),
    st.builds(Forget, ADAPTERS),
)
SLICES = st.builds(Slice, SESSIONS, COUNTS, COUNTS, st.binary(max_size=200), COUNTS, st.none() | COUNTS)
LENGTHS = st.lists(COUNTS, max_size=5).map(tuple)
MORE = {
    "alone": st.booleans(),
    "dropout": st.builds(Dropout, st.floats(0, 1), st.lists(st.integers(0, 2**63 - 1), max_size=5).map(tuple)),
}
PASSES = st.one_of(
    st.builds(Evaluate, SPANS, LENGTHS, NUMBERS, *ACCOUNTS, st.none() | ADAPTERS, prompts=PROMPTS, **MORE),
    st.builds(Backward, SPANS, LENGTHS, NUMBERS, NUMBERS, *ACCOUNTS, st.none() | ADAPTERS, COUNTS, **MORE),
)
WORK = st.builds(Work, *(st.lists(each, max_size=5) for each in (CONTROLS, SLICES, PASSES)))
ERRORS = st.builds(RuntimeError, st.text(max_size=50))
DONE = st.builds(
    Done,
    st.lists(st.one_of(st.booleans(), ERRORS), max_size=5),
    st.lists(st.one_of(st.binary(max_size=100), ERRORS), max_size=5),
    st.lists(st.one_of(st.binary(max_size=100), ERRORS), max_size=5),
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
    memory = memoryview(bytearray(input_bytes(work)))
    assert take_work(crossed(put_work(work, memory), cut), memory) == work


def test_every_operation_crosses() -> None:
    """`CONTROLS` and `PASSES` above have each, so that a new one cannot be forgotten here."""
    assert set(get_args(Control)) == {Open, Resize, Truncate, Fork, Close, Adopt, Forget}
    assert set(get_args(Pass)) == {Evaluate, Backward}


GOOD: dict[type[object], list[object]] = {
    Open: [bytes(16), [0, 3], 100, "client", 1, None, [1, 1, 2, 16], "group", None],
    Resize: [bytes(16), 5],
    Truncate: [bytes(16), 5],
    Fork: [bytes(16), bytes(16), 0, 5],
    Close: [bytes(16)],
    Slice: [bytes(16), 0, 1, 8, 0, None],
    Backward: [[0, 3], [5, 2], 8, 8, "client", 1, None, 3, 0.5, [1, 1, 2, 16], "group", 4, False, [0.5, [5, 2]]],
    DeepPrompts: [2, 1, 3, 16],
    Dropout: [0.5, [5, 2]],
    Adopt: [bytes(32), 2, 3, 8],
    Forget: [bytes(32)],
}
WRONG = [-1, 2**63, 1.5, True, "5", b"", bytes(17), [-1], [None], [0] * 1001, None, "x" * 1001, {"a": 1}]


def take(size: int) -> bytes:
    return bytes(size)


@pytest.mark.parametrize("kind", GOOD)
def test_a_field_of_another_type_or_beyond_its_limits_is_refused(kind: type[object]) -> None:
    good = GOOD[kind]
    assert type(unpack_fields(kind, good, take)) is kind
    for index in range(len(good)):
        for wrong in WRONG:
            fits = {str: "5", float: 1.5, bool: True}.get(type(good[index]))
            if wrong is good[index] is None or (fits is not None and wrong == fits):
                continue
            with pytest.raises(LocalProtocolError):
                unpack_fields(kind, [*good[:index], wrong, *good[index + 1 :]], take)
    for other in (good[:-1], [*good, 0], tuple(good), "no list", None):
        with pytest.raises(LocalProtocolError):
            unpack_fields(kind, other, take)  # type: ignore[arg-type]


def test_a_size_beyond_the_shared_memory_is_refused() -> None:
    memory = memoryview(bytearray(8))
    with pytest.raises(LocalProtocolError, match="shared memory of 8"):
        take_work([[], [[bytes(16), 0, 1, 9, 0, None]], []], memory)


@given(DONE, COUNTS)
def test_results_and_errors_arrive_as_they_were(done: Done, cut: int) -> None:
    memory = memoryview(bytearray(1000))
    taken = take_done(crossed(put_done(done, memory), cut), memory)
    memory[:] = bytes(1000)  # results are the next ones' by then
    assert plain(list(taken.results)) == plain(list(done.results))
    assert plain(list(taken.outputs)) == plain(list(done.outputs))
    assert plain(list(taken.passed)) == plain(list(done.passed))


def test_an_error_keeps_its_kind_and_one_of_an_unknown_kind_names_it() -> None:
    class TorchError(RuntimeError):
        pass

    for error, kind, text in (
        (ConfigError("mend it"), ConfigError, "mend it"),
        (EmbeddedModelMissing("install it"), EmbeddedModelMissing, "install it"),
        (AdapterError("too wide"), AdapterError, "too wide"),
        (MemoryError(), MemoryError, ""),
        (TorchError("no memory"), RuntimeError, "no memory"),
        (KeyError("odd"), RuntimeError, "KeyError: 'odd'"),
        (RuntimeError("\ud800" + "x" * 100_000), RuntimeError, "?" + "x" * 3999),
    ):
        (message,) = ([*pack_error(error)],)
        unpacked = unpack_error(crossed(message, 3))
        assert type(unpacked) is kind
        assert str(unpacked) == text
