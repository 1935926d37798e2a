"""A table where it fits, and else its rows in several lines each: rich would leave the first letters of each word."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

INDENT = 2
"""Columns before the lines of a row after its first one."""


class FittedTable:
    """Shows a `table` whose cells are texts of one line. The first column names the row."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Measurement.get(console, options.update_width(_WIDEST), self._table).maximum <= options.max_width:
            yield self._table
            return
        if self._table.title is not None:
            yield Text.from_markup(str(self._table.title))
        names = [_in_one_line(str(each.header)) for each in self._table.columns]
        for row in zip(*(each.cells for each in self._table.columns), strict=True):
            yield from _lines(names, [Text.from_markup(str(cell)) for cell in row], options.max_width)


_WIDEST = 10_000


def _in_one_line(header: str) -> str:
    """The parts of a name in one line: "tokens" over "/s" is "tokens/s", and "sess-" over "ions" is "sessions"."""
    return header.replace("-\n", "").replace("\n/", "/").replace("\n", " ").strip()


def _lines(names: list[str], cells: list[Text], columns: int) -> Iterator[Text]:
    """The cells of a row with their names, in lines of at most `columns`."""
    line = Text()
    for number, name, cell in zip(count(), names, cells, strict=False):
        if not cell.plain:
            continue
        piece = cell if not number or not name else Text(f"{name} ").append_text(cell)
        if line.plain.strip() and line.cell_len + INDENT + piece.cell_len > columns:
            yield line
            line = Text(" " * INDENT)
        elif line.plain:
            line.append(" " * INDENT)
        line.append_text(piece)
    yield line
