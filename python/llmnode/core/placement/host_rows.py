"""Rows of CSV files about hosts, which users write. The first line of a file names its columns.

An error names the file, the line, and what to write there.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.user_input import decode, read_file, split_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MOST_BYTES = 64 << 20
MOST_BLOCKS = 1000
"""The most that a host may have: more than any model has."""
LEAST_SPEED, MOST_SPEED = 1e-3, 1e9
"""Tokens a second. Others are mistakes, and sums of them are not exact."""
HOST, SPEED, BLOCKS = "host", "tokens_per_s", "blocks"


@dataclass(frozen=True, slots=True)
class HostRow:
    """A line of a file, by the names of its columns. `place` names it in errors."""

    place: str
    fields: Mapping[str, str]

    @property
    def host(self) -> str:
        if not (name := self.fields[HOST]):
            raise ConfigError(f"{self.place}: there is no name of a host: write one in the column {HOST}")
        return name

    @property
    def speed(self) -> float:
        return self.number(SPEED, f"a number from {LEAST_SPEED:g} to {MOST_SPEED:g}", LEAST_SPEED, MOST_SPEED)

    @property
    def blocks(self) -> int:
        what = f"a whole number from 1 to {MOST_BLOCKS}"
        if not (number := self.number(BLOCKS, what, 1, MOST_BLOCKS)).is_integer():
            raise ConfigError(f"{self.place}: {BLOCKS} is {self.fields[BLOCKS]!r}: write {what}")
        return int(number)

    def number(self, name: str, what: str, least: float = 0.0, most: float = math.inf) -> float:
        text = self.fields[name]
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most or math.isinf(number):
            raise ConfigError(f"{self.place}: {name} is {text!r}: write {what}")
        return number


def host_rows(file: Path, needed: tuple[str, ...], further: tuple[str, ...] = ()) -> Iterator[HostRow]:
    """The lines below the first one, but for empty ones. There is at least one."""
    reader = csv.reader(split_lines(decode(read_file(file, str(file), MOST_BYTES), str(file))), skipinitialspace=True)
    columns, is_empty = list[str](), True
    try:
        for line in reader:
            place, fields = f"{file}, line {reader.line_num}", [each.strip() for each in line]
            if not any(fields):
                continue
            if not columns:
                columns = fields
                _check_columns(place, columns, needed, further)
                continue
            if len(fields) != len(columns):
                raise ConfigError(
                    f"{place}: there are {len(fields)} values for {len(columns)} columns: write {','.join(columns)}"
                )
            yield HostRow(place, dict(zip(columns, fields, strict=True)))
            is_empty = False
    except csv.Error as error:
        raise ConfigError(f"{file}, line {reader.line_num}: no CSV ({error}): write values with commas") from error
    if is_empty:
        raise ConfigError(f"{file}: has no host: write {','.join(needed)} in its first line, and a host in each other")


def _check_columns(place: str, columns: list[str], needed: tuple[str, ...], further: tuple[str, ...]) -> None:
    known = (*needed, *further)
    fix = f"the columns are {', '.join(needed)}" + (f", and if wanted {', '.join(further)}" if further else "")
    for name in needed:
        if name not in columns:
            raise ConfigError(f"{place}: there is no column {name}: {fix}")
    for name in columns:
        if name not in known or columns.count(name) > 1:
            why = "is not known" if name not in known else "is there twice"
            raise ConfigError(f"{place}: the column {name!r} {why}: {fix}")
