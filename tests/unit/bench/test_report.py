"""The report of a benchmark: rows that measure something else have a table of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.kit.report import Report, print_report, tables

if TYPE_CHECKING:
    import pytest

    from bench.kit.report import Row

SPEEDS: list[Row] = [{"variant": "a", "tokens/s": 1.0}, {"variant": "b", "tokens/s": 2.0, "moves": 3}]
TIMES: list[Row] = [{"variant": "c", "plan, ms": 4.0}]


def test_rows_without_a_common_quantity_are_in_separate_tables() -> None:
    assert tables([*SPEEDS, *TIMES, *SPEEDS]) == [SPEEDS, TIMES, SPEEDS]


def test_rows_of_one_column_are_a_table() -> None:
    assert tables([{"variant": "a"}]) == [[{"variant": "a"}]] and tables([]) == []


def test_a_table_has_the_columns_of_its_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_report("name", 1, Report([*SPEEDS, *TIMES]), as_json=False)
    heads = [line for line in capsys.readouterr().out.splitlines() if "variant" in line]
    assert ["moves" in head for head in heads] == [True, False]
    assert ["plan, ms" in head for head in heads] == [False, True]
