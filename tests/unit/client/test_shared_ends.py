"""The ends of a client: texts that ask for scores while others get theirs share the next product. All get an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from llmnode.client.ends import SharedEnds
from llmnode.models.packed_ends import MOST_ROWS
from unit.in_trio import in_trio

WAIT_S = 20


class Head:
    """Scores a row by doubling it, when the test allows it. It keeps the rows of each call."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.called = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.fails: Callable[[torch.Tensor], bool] = lambda _hidden: False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(hidden[:, 0].tolist())
        self.called.release()
        assert self.let.acquire(timeout=WAIT_S)
        if self.fails(hidden):
            raise RuntimeError("out of memory")
        return 2 * hidden


class Asked(dict[Any, None]):
    """Signals each new key."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)

    def setdefault(self, key: Any, default: None = None) -> None:
        if key not in self:
            self.came.release()
        super().setdefault(key, default)


@contextmanager
def asking(head: Head) -> Iterator[tuple[SharedEnds, Callable[..., Future[torch.Tensor]]]]:
    """The function asks for scores of rows with these numbers, in a thread of its own, which then waits or computes."""
    any_ends: Any = head
    ends = SharedEnds(any_ends)
    ends._thread_requests = asked = Asked()
    with ThreadPoolExecutor(80) as pool:

        def ask(*rows: float) -> Future[torch.Tensor]:
            scores = pool.submit(ends.logits, torch.tensor(rows)[:, None].repeat(1, 3))
            assert asked.came.acquire(timeout=WAIT_S)
            return scores

        yield ends, ask
        assert not ends._thread_requests
        assert ends._turn is None


def test_who_comes_while_others_are_scored_is_scored_with_those_who_wait_too() -> None:
    head = Head()
    with asking(head) as (_, ask):
        scores = [ask(1.0)]
        assert head.called.acquire(timeout=WAIT_S)
        scores += [ask(2.0), ask(3.0, 4.0), ask(5.0)]
        head.let.release(2)
        found = [each.result(WAIT_S)[:, 0].tolist() for each in scores]
    assert found == [[2.0], [4.0], [6.0, 8.0], [10.0]]
    assert head.calls == [[1.0], [2.0, 3.0, 4.0, 5.0]]


def test_who_comes_alone_is_scored_at_once() -> None:
    head = Head()
    with asking(head) as (ends, _):
        for number in (1.0, 2.0):
            head.let.release()
            assert ends.logits(torch.tensor([[number]])).tolist() == [[2 * number]]
    assert head.calls == [[1.0], [2.0]]


def test_an_error_is_of_one_thread_and_the_others_are_scored() -> None:
    head = Head()
    head.fails = lambda hidden: len(hidden) == 3
    with asking(head) as (_, ask):
        first = ask(1.0)
        assert head.called.acquire(timeout=WAIT_S)
        others = [ask(number) for number in (2.0, 3.0, 4.0)]
        head.let.release(3)
        assert first.result(WAIT_S).tolist() == [[2.0] * 3]
        errors = [each.exception(WAIT_S) for each in others]
        assert [type(error) for error in errors if error] == [RuntimeError]
        assert all(each.exception() or len(each.result()) == 1 for each in others)


@given(rows=st.lists(st.integers(1, 40), max_size=8))
def test_everybody_gets_their_own_scores_in_few_products_of_few_rows(rows: list[int]) -> None:
    head = Head()
    with asking(head) as (_, ask):
        blocking = ask(0.5)
        assert head.called.acquire(timeout=WAIT_S)
        asked = [[float(100 * number + row) for row in range(count)] for number, count in enumerate(rows)]
        scores = [ask(*each) for each in asked]
        head.let.release(1 + len(rows))
        blocking.result(WAIT_S)
        assert [each.result(WAIT_S)[:, 0].tolist() for each in scores] == [[2 * row for row in each] for each in asked]
    products = head.calls[1:]
    assert [row for each in products for row in each] == [row for each in asked for row in each]
    assert all(len(each) <= MOST_ROWS for each in products)
    assert all(len(each) + len(after) > MOST_ROWS for each, after in pairwise(products))


def test_who_is_interrupted_while_it_waits_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    with asking(head) as (ends, ask):
        first = ask(1.0)
        assert head.called.acquire(timeout=WAIT_S)

        def interrupted(_predicate: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(ends._change, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ends.logits(torch.tensor([[7.0]]))
        last = ask(2.0)
        head.let.release(2)
        assert [each.result(WAIT_S)[:, 0].tolist() for each in (first, last)] == [[2.0], [4.0]]
    assert head.calls == [[1.0], [2.0]]


# Tasks


class CountingHead(Head):
    """Lets every call through."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.let.release()
        return super().logits(hidden)


@in_trio
async def test_tasks_that_wait_are_served_together_in_one_thread() -> None:
    head: Any = Head()
    ends, found = SharedEnds(head), {}

    async def choose(number: int) -> None:
        found[number] = await ends.choose(torch.full((1, 3), float(number)), lambda scores: scores[0].item())

    async with trio.open_nursery() as nursery:
        for number in range(70):
            nursery.start_soon(choose, number)
        await trio.testing.wait_all_tasks_blocked()
        head.let.release(9)
    assert found == {number: 2.0 * number for number in range(70)}
    assert [len(call) for call in head.calls] in ([64, 6], [1, 64, 5])
    assert not ends._task_requests and ends._leader is None


@in_trio
async def test_an_error_in_a_choice_is_of_its_task_alone() -> None:
    head: Any = CountingHead()
    ends, found = SharedEnds(head), {}

    def choice(number: int, _scores: torch.Tensor) -> int:
        if number == 2:
            raise ValueError("no")
        return number

    async def choose(number: int) -> None:
        try:
            found[number] = await ends.choose(torch.zeros(1, 3), partial(choice, number))
        except ValueError:
            found[number] = -1

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(choose, number)
    assert found == {0: 0, 1: 1, 2: -1, 3: 3, 4: 4}


@in_trio
async def test_scores_that_fail_are_an_error_of_one_task_and_the_others_have_theirs() -> None:
    head: Any = CountingHead()
    head.fails = lambda _hidden: len(head.calls) == 1
    ends, found = SharedEnds(head), {}

    async def choose(number: int) -> None:
        try:
            found[number] = await ends.choose(torch.full((1, 3), float(number)), lambda scores: scores[0].item())
        except RuntimeError:
            found[number] = -1

    async with trio.open_nursery() as nursery:
        for number in range(1, 5):
            nursery.start_soon(choose, number)
    assert sorted(found) == [1, 2, 3, 4]
    assert sum(value == -1 for value in found.values()) == 1
    assert all(value in (-1, 2 * number) for number, value in found.items())


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_task_that_is_cancelled_holds_nobody_up(cancelled: int) -> None:
    head: Any = Head()

    async def use() -> None:
        ends, found, scopes = SharedEnds(head), {}, [trio.CancelScope() for _ in range(3)]

        async def choose(number: int) -> None:
            with scopes[number]:
                found[number] = await ends.choose(torch.full((1, 3), float(number)), lambda scores: scores[0].item())

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(choose, number)
                await trio.testing.wait_all_tasks_blocked()
            scopes[cancelled].cancel()
            await trio.testing.wait_all_tasks_blocked()
            head.let.release(3)
        others = {number: 2.0 * number for number in range(3) if number != cancelled}
        assert {number: found[number] for number in others} == others
        assert not ends._task_requests and ends._leader is None

    trio.run(use)
