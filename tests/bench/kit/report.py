"""What every benchmark prints: a table for people and, on request, one JSON object for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


FILE_COLUMNS = 240
"""A table that goes to a file need not be cut to fit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    low: float
    high: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that we want to reach; `aim` says in words which values do."""

    name: str
    value: float
    aim: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.2g} ({self.low:+.2g} to {self.high:+.2g})"


Row = dict[str, "str | int | float | Spread | Interval"]


def environment(threads: int) -> dict[str, object]:
    import torch
    import transformers

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": threads,
    }


def print_report(
    name: str,
    environment: Mapping[str, object],
    rows: Sequence[Row],
    aims: Sequence[Aim],
    *,
    as_json: bool,
    legend: str = "median (lowest-highest)",
) -> None:
    """The table and the aims on stderr or stdout; with `as_json` the object of all of it on stdout's last line.

    `legend` says what a cell is.
    """
    console = Console(stderr=as_json, soft_wrap=not as_json)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=f"bench {name}: {legend}", title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    console.print(table)
    for aim in aims:
        verdict = "[green]holds[/]" if aim.holds else "[red]missed[/]"
        console.print(f"{aim.name}: {aim.value:.3g}, aim {aim.aim}: {verdict}")
    if as_json:
        report = {
            "name": name,
            "environment": dict(environment),
            "rows": [{key: _plain(value) for key, value in row.items()} for row in rows],
            "aims": [asdict(aim) for aim in aims],
        }
        print(json.dumps(report))


def _cell(value: str | float | Spread | Interval) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _plain(value: str | float | Spread | Interval) -> object:
    return asdict(value) if isinstance(value, (Spread, Interval)) else value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor()
