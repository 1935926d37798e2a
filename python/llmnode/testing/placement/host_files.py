"""Hosts of a simulated swarm from CSV files of a user: their speeds, and a measured trace of when they were on.

The first line of a file names its columns. An error names the file, the line, and what to write there.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.placement.servers import one_speed
from llmnode.core.user_input import decode, read_file, split_lines
from llmnode.errors import ConfigError
from llmnode.testing.placement.hosts import Host, Uptime, apart, uneven

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Speeds = tuple[float, ...]

MOST_BYTES = 64 << 20
MOST_BLOCKS = 1000
"""The most that a host may have: more than any model has."""
HOST, SPEED, BLOCKS, FROM, TO = "host", "tokens_per_s", "blocks", "from_s", "to_s"


def read_hosts(file: Path) -> dict[str, Speeds]:
    """Speeds as in `PlacedServer`, by host. The columns are `host`, `tokens_per_s` and `blocks`. Raises ConfigError."""
    speeds: dict[str, Speeds] = {}
    for row in _rows(file, (HOST, SPEED, BLOCKS)):
        if (name := row.host) in speeds:
            raise ConfigError(f"{row.place}: the host {name!r} is in an earlier line: write one line for each host")
        speeds[name] = row.speeds
    return speeds


def read_trace(file: Path, seed: int = 0, speeds: Mapping[str, Speeds] | None = None) -> list[Host]:
    """Hosts from a trace with the columns `host`, `from_s` and `to_s`, and one row an uptime. Raises ConfigError.

    Their `speeds` are those of `read_hosts`. Without these, a trace may have `tokens_per_s` and `blocks`. Speeds that
    are in neither are drawn as in the paper.
    """
    rng, hosts = random.Random(seed), dict[str, Host]()
    for row in _rows(file, (HOST, FROM, TO), (SPEED, BLOCKS)):
        name = row.host
        if speeds is not None and name not in speeds:
            raise ConfigError(f"{row.place}: the host {name!r} has no speed: add it to the file of hosts")
        known = hosts.get(name)
        if known is None:
            own = speeds[name] if speeds is not None else _speeds_or(row, uneven(len(hosts), rng).speeds)
            known = Host(PeerId(name), own, ())
        elif speeds is None and _speeds_or(row, known.speeds) != known.speeds:
            raise ConfigError(
                f"{row.place}: the host {name!r} had other speeds in an earlier line: write the same, or leave them out"
            )
        hosts[name] = replace(known, uptimes=(*known.uptimes, row.uptime))
    return [replace(host, uptimes=apart(host.uptimes)) for host in hosts.values()]


def _speeds_or(row: _Row, otherwise: Speeds) -> Speeds:
    """Those of the row; a part that it leaves out is as `otherwise`."""
    speed = row.speed if row.fields.get(SPEED) else otherwise[0]
    return one_speed(speed, row.blocks if row.fields.get(BLOCKS) else len(otherwise))


@dataclass(frozen=True, slots=True)
class _Row:
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
        return self._number(SPEED, "a number above 0", math.ulp(0.0))

    @property
    def blocks(self) -> int:
        what = f"a whole number from 1 to {MOST_BLOCKS}"
        if not (number := self._number(BLOCKS, what, 1, MOST_BLOCKS)).is_integer():
            raise ConfigError(f"{self.place}: {BLOCKS} is {self.fields[BLOCKS]!r}: write {what}")
        return int(number)

    @property
    def speeds(self) -> Speeds:
        return one_speed(self.speed, self.blocks)

    @property
    def uptime(self) -> Uptime:
        from_s, to_s = (self._number(name, "seconds from the start, 0 or more") for name in (FROM, TO))
        if to_s <= from_s:
            raise ConfigError(f"{self.place}: {TO} is {to_s:g}, and {FROM} is {from_s:g}: write a later {TO}")
        return Uptime(from_s, to_s)

    def _number(self, name: str, what: str, least: float = 0.0, most: float = math.inf) -> float:
        text = self.fields[name]
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most or math.isinf(number):
            raise ConfigError(f"{self.place}: {name} is {text!r}: write {what}")
        return number


def _rows(file: Path, needed: tuple[str, ...], further: tuple[str, ...] = ()) -> Iterator[_Row]:
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
            yield _Row(place, dict(zip(columns, fields, strict=True)))
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
