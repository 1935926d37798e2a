"""Texts that are generated at once: in order, none left behind, and each as if it were alone."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import GenerationConfig

from llmnode.node.batch_generate import AT_ONCE_PER_STAGE, all_at_once, metered
from llmnode.node.sampling import Sampling

WAIT_S = 20


class Model:
    """The part of a session that `all_at_once` uses: it has two hops, and ends running steps when it is closed."""

    route = ("hop", "hop")

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@given(texts=st.integers(1, 12), at_once=st.none() | st.integers(1, 20))
def test_what_is_made_comes_in_order(texts: int, at_once: int | None) -> None:
    model: Any = Model()
    assert list(all_at_once(model, [partial(int, number) for number in range(texts)], at_once)) == list(range(texts))
    assert not model.closed.is_set()


def test_by_default_every_stage_has_some_to_compute_and_some_that_wait() -> None:
    model: Any = Model()
    together = threading.Barrier(AT_ONCE_PER_STAGE * len(model.route))
    places = list(all_at_once(model, together.parties * [lambda: together.wait(WAIT_S)], None))
    assert sorted(places) == list(range(together.parties)), "all were under way at the same time"


def test_one_that_fails_ends_the_others() -> None:
    model: Any = Model()
    begun: list[int] = []

    def wait_for_the_end(number: int) -> None:
        begun.append(number)
        assert model.closed.wait(WAIT_S)

    def fail() -> None:
        raise ValueError("no")

    work: list[Any] = [fail, *(partial(wait_for_the_end, number) for number in range(10))]
    with pytest.raises(ValueError, match="no"):
        list(all_at_once(model, work, 3))
    assert len(begun) <= 3, "those that waited have not begun"


def test_what_is_done_comes_in_order_before_the_error() -> None:
    model: Any = Model()
    two_are_done = threading.Barrier(3)  # two others have begun in their threads

    def fail() -> str:
        two_are_done.wait(WAIT_S)
        raise ValueError("no")

    def wait_for_the_end() -> str:
        two_are_done.wait(WAIT_S)
        return too_late()

    def too_late() -> str:
        assert model.closed.wait(WAIT_S)
        return "too late"

    work = [fail, lambda: "1", lambda: "2", wait_for_the_end, wait_for_the_end, too_late]
    came: list[str] = []
    with pytest.raises(ValueError, match="no"):
        came.extend(all_at_once(model, work, 3))
    assert came == ["1", "2"]
    assert model.closed.is_set()


def test_who_wants_no_more_ends_the_others() -> None:
    model: Any = Model()
    made = all_at_once(model, [lambda: "1", lambda: str(model.closed.wait(WAIT_S))], 2)
    assert next(made) == "1"
    made.close()  # type: ignore[attr-defined]  # a generator
    assert model.closed.is_set()


def test_a_meter_counts_tokens_but_not_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with metered(2) as meter:
        for name, tokens in (("prompt 1", 3), ("prompt 2", 4)):
            with meter.text(name, max_new_tokens=8) as counter:
                for _ in range(1 + tokens):  # transformers hands over the prompt first
                    counter.put(torch.tensor([1]))
                counter.end()
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["prompt 1: 3 tokens; 1 of 2 texts", "prompt 2: 4 tokens; 2 of 2 texts"]
    assert printed[2].startswith("2 texts, 7 tokens in ")


def test_on_a_terminal_each_text_under_way_has_a_bar_and_none_is_left() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with metered(3, console) as meter:
        with meter.text("prompt 1", max_new_tokens=8), meter.text("prompt 2", max_new_tokens=8):
            assert {"texts", "prompt 1", "prompt 2"} == bars(console)
        with suppress(ValueError), meter.text("prompt 3", max_new_tokens=8):
            assert {"texts", "prompt 3"} == bars(console)
            raise ValueError("it fails")
    assert bars(console) == {"texts"}
    assert "2/3" in frames(console)[-1], "one has failed"


def frames(console: Console) -> list[str]:
    """What the terminal showed, one after another: each begins where the former is erased."""
    written: Any = console.file
    return re.split(r"(?:\x1b\[1A|\r|\x1b\[2K)+", written.getvalue())


def bars(console: Console) -> set[str]:
    """The names of those that it shows now."""
    return set(re.findall(r"^(texts|prompt \d)", frames(console)[-1], re.MULTILINE))


def test_texts_that_are_printed_into_a_file_are_not_shown_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with metered(1, console):
        print("once upon a time")
    assert capsys.readouterr().out == "once upon a time\n"


def drawn(sampling: Sampling, scores: torch.Tensor, number: int = 0) -> list[int]:
    """scores: (rows, vocabulary). What `generate` takes of each row: the highest of what it is handed back."""
    choices: list[int] = (
        sampling.of(GenerationConfig()).options(number)["logits_processor"](None, scores).argmax(dim=-1).tolist()
    )
    return choices


def test_tokens_are_drawn_from_the_softmax_of_what_top_p_leaves() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
    rows = 20_000
    found = torch.bincount(torch.tensor(drawn(sampling, shares.log().repeat(rows, 1))), minlength=4) / rows
    left = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert found[3] == 0
    assert (found - left).abs().max() < 5 * 0.5 / rows**0.5, "five standard deviations"


def test_each_text_is_drawn_with_a_seed_of_its_own_and_repeats() -> None:
    sampling = Sampling(temperature=0.7, top_p=1.0, seed=11)
    scores = torch.zeros(64, 1000)
    first, second = drawn(sampling, scores), drawn(sampling, scores, number=1)
    assert first == drawn(sampling, scores)
    assert first != second
    assert drawn(Sampling(0.7, 1.0), scores) != drawn(Sampling(0.7, 1.0), scores)
