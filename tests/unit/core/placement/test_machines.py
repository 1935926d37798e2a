"""A file of an owner's machines: speeds between and below the numbers of blocks that were measured, and its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.errors import ConfigError
from llmnode.core.placement.machines import MOST_MACHINES, read_machines, speeds_of
from llmnode.core.placement.servers import shared_speed

if TYPE_CHECKING:
    from pathlib import Path

FIRST = "host,blocks,tokens_per_s\n"


def test_a_machine_with_one_row_is_as_fast_as_its_blocks_are_few() -> None:
    assert speeds_of({8: 10.0}) == pytest.approx(shared_speed(80.0, 8))


def test_between_two_rows_each_block_costs_the_same_time() -> None:
    speeds = speeds_of({2: 100.0, 6: 20.0})
    assert [1 / speed for speed in speeds] == pytest.approx([0.005, 0.01, 0.02, 0.03, 0.04, 0.05])


@given(st.dictionaries(st.integers(1, 40), st.floats(0.1, 1e6), min_size=1))
def test_speeds_are_those_that_were_measured_and_between_them(measured: dict[int, float]) -> None:
    speeds = speeds_of(measured)
    assert len(speeds) == max(measured)
    assert all(speeds[blocks - 1] == pytest.approx(speed) for blocks, speed in measured.items())
    later = [min(measured.values()) <= speed * (1 + 1e-9) for speed in speeds]
    assert all(later)


def test_no_machine_holds_more_than_the_model_has(tmp_path: Path) -> None:
    file = tmp_path / "machines.csv"
    file.write_text(f"{FIRST}b,9,10\na,2,100\na,4,50\n")
    assert {each.peer: len(each.speeds) for each in read_machines(file, 5)} == {"b": 5, "a": 4}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("host,blocks\na,1\n", "line 1: there is no column tokens_per_s"),
        (f"{FIRST}a,4,10\nb,4,10\na,4,20\n", "line 4: the host 'a' with 4 blocks is in an earlier line"),
        (f"{FIRST}a,0,10\n", "line 2: blocks is '0': write a whole number from 1"),
        (f"{FIRST}a,4,fast\n", "line 2: tokens_per_s is 'fast': write a number from 0.001 to 1e"),
        (f"{FIRST}a,4,1e-320\n", "line 2: tokens_per_s is '1e-320': write a number from 0.001 to 1e"),
        (f"{FIRST}a,4,1e300\n", "line 2: tokens_per_s is '1e300': write a number from 0.001 to 1e"),
        (FIRST, "has no host"),
        (FIRST + "".join(f"{each},1,1\n" for each in range(MOST_MACHINES + 1)), f"more than {MOST_MACHINES} hosts"),
    ],
)
def test_an_error_names_the_line_and_what_to_write(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "machines.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_machines(file, 8)
