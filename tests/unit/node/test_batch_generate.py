"""Several texts at once: in order, none left behind, and their progress is shown."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llmnode.node.batch_generate import in_order, metered, run_at_once
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Iterator


@given(texts=st.integers(0, 12), at_once=st.integers(1, 20))
def test_as_many_as_asked_are_under_way_and_begin_in_order(texts: int, at_once: int) -> None:
    begun: list[int] = []
    under_way = most = 0

    async def work(number: int) -> None:
        nonlocal under_way, most
        begun.append(number)
        under_way += 1
        most = max(most, under_way)
        await trio.testing.wait_all_tasks_blocked()
        under_way -= 1

    trio.run(run_at_once, [partial(work, number) for number in range(texts)], at_once)
    assert begun == list(range(texts))
    assert most == min(texts, at_once)


@in_trio
async def test_one_that_fails_ends_the_others() -> None:
    begun: list[int] = []

    async def wait(number: int) -> None:
        begun.append(number)
        await trio.sleep_forever()

    async def fail() -> None:
        await trio.testing.wait_all_tasks_blocked()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_at_once([fail, *(partial(wait, number) for number in range(10))], 3)
    assert begun == [0, 1], "those that waited have not begun"


@in_trio
async def test_texts_before_one_that_fails_go_on_and_the_first_error_in_order_is_raised() -> None:
    done: list[int] = []
    later_has_failed = trio.Event()

    async def fail_later() -> None:
        await later_has_failed.wait()
        raise ValueError("the first in order")

    async def be_done() -> None:
        await later_has_failed.wait()
        done.append(1)

    async def fail_now() -> None:
        later_has_failed.set()
        raise ValueError("the first in time")

    with pytest.raises(ValueError, match="the first in order"):
        await run_at_once([fail_later, be_done, fail_now, trio.sleep_forever], 4)
    assert done == [1]


@given(made=st.permutations(range(8)))
def test_results_come_in_order_whatever_their_order_was(made: list[int]) -> None:
    assert list(in_order((number, str(number)) for number in made)) == [(number, str(number)) for number in range(8)]


@given(
    made=st.permutations(range(8)),
    fails_after=st.integers(0, 8),
    error=st.sampled_from([ValueError, KeyboardInterrupt]),
)
def test_what_is_done_comes_in_order_before_an_error(
    error: type[BaseException], made: list[int], fails_after: int
) -> None:
    def results() -> Iterator[tuple[int, str]]:
        for number in made[:fails_after]:
            yield number, str(number)
        raise error

    came: list[int] = []
    with pytest.raises(error):
        came.extend(number for number, _ in in_order(results()))
    assert came == sorted(made[:fails_after])


def test_a_meter_counts_texts_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with metered(2) as meter:
        for number, tokens in enumerate((3, 4)):
            meter.begin(number, f"prompt {number + 1}", 8)
            for _ in range(tokens):
                meter.count(number)
            meter.end(number, f"prompt {number + 1}", tokens)
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["prompt 1: 3 tokens; 1 of 2 texts", "prompt 2: 4 tokens; 2 of 2 texts"]
    assert printed[2].startswith("2 texts, 7 tokens in ")


def test_on_a_terminal_each_text_under_way_has_a_bar_and_none_is_left() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with suppress(ValueError), metered(3, console) as meter:
        meter.begin(0, "prompt 1", 8)
        meter.begin(1, "prompt 2", 8)
        assert {"texts", "prompt 1", "prompt 2"} == bars(console)
        meter.end(0, "prompt 1", 8)
        meter.end(1, "prompt 2", 8)
        meter.begin(2, "prompt 3", 8)
        assert {"texts", "prompt 3"} == bars(console)
        raise ValueError("it fails")
    assert "2/3" in "".join(frames(console)[-4:]), "one has failed"


def frames(console: Console) -> list[str]:
    """The frames that the terminal showed, in order. Each begins where the one before is erased."""
    written: Any = console.file
    return re.split(r"(?:\x1b\[1A|\r|\x1b\[2K)+", written.getvalue())


def bars(console: Console) -> set[str]:
    """The names of the bars in the last frame."""
    return set(re.findall(r"^(texts|prompt \d)", frames(console)[-1], re.MULTILINE))


def test_texts_that_are_printed_into_a_file_are_not_shown_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with metered(1, console):
        print("once upon a time")
    assert capsys.readouterr().out == "once upon a time\n"
