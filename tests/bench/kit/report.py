"""The results of a benchmark, as rows and aims. They are printed as a table and as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FILE_COLUMNS = 240
"""A table that goes to a file may be this wide."""
NEAR_TIE_LIMIT = 0.001


# Values


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity. `low` and `high` are the extremes, or the quartiles."""

    median: float
    low: float
    high: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def quartiles(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * list(values)
    return Spread(median, low, high, len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The measured value that `share` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.2g} ({self.low:+.2g} to {self.high:+.2g})"


Cell = str | int | float | Spread | Interval
Row = dict[str, Cell]


class Series(defaultdict[str, list[float]]):
    """The values of one variant: for each quantity, a value a round. Quantities are columns of its row."""

    def __init__(self) -> None:
        super().__init__(list)

    def note(self, values: Mapping[str, float]) -> None:
        for quantity, value in values.items():
            self[quantity].append(value)

    def median(self, quantity: str) -> float:
        return statistics.median(self[quantity])

    def row(self) -> Row:
        return {quantity: spread(values) for quantity, values in self.items()}


def rounds(repeats: int, *, thin: bool = False) -> Iterator[int]:
    """The numbers of the rounds. Each is announced. Round -1 warms everything up and does not count.

    A `thin` run has none: what it measures is for nobody.
    """
    for number in range(0 if thin else -1, repeats):
        print(f"round {number + 1} of {repeats}", file=sys.stderr)
        yield number


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of the two values of each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def differences(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The difference of the two values of each round."""
    return [value - other for value, other in zip(values, others, strict=True)]


# Aims


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that we want to reach. `aim` says in words which values do."""

    name: str
    value: float
    aim: str
    holds: bool


def at_least(name: str, value: float, least: float) -> Aim:
    return Aim(name, value, f">= {least:g}", value >= least)


def at_most(name: str, value: float, most: float) -> Aim:
    return Aim(name, value, f"<= {most:g}", value <= most)


def below(name: str, value: float, limit: float, whose: str = "") -> Aim:
    return Aim(name, value, f"< {limit:g}{f' ({whose})' if whose else ''}", value < limit)


def exactly(name: str, value: float, wanted: float = 0) -> Aim:
    return Aim(name, value, f"= {wanted:g}", value == wanted)


def exact_tokens(wrong: int) -> Aim:
    return exactly("tokens that are not transformers', and no near tie", wrong)


def few_near_ties(ties: int, choices: int) -> Aim:
    return at_most("near ties, of all choices", ties / max(1, choices), NEAR_TIE_LIMIT)


# The report


@dataclass(frozen=True, slots=True)
class Report:
    """`conditions` are what is needed to repeat the measurement. `legend` explains the cells."""

    rows: Sequence[Row]
    aims: Iterable[Aim] = ()
    conditions: Mapping[str, object] = field(default_factory=dict)
    legend: str = "median (lowest-highest)"


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


def tables(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows in their order. A new table begins with a row that has no column but the first in common with the one
    before.
    """
    found = list[list[Row]]()
    for row in rows:
        before = found[-1][-1] if found else {}
        if before.keys() & list(row)[1:]:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def print_report(name: str, threads: int, report: Report, *, as_json: bool) -> None:
    """Print the table and the aims on stderr or stdout. `as_json` puts all of it as an object on stdout's last line."""
    console = Console(stderr=as_json, soft_wrap=not as_json)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    console.print(f"bench {name}: {report.legend}", style="italic", markup=False)
    for rows in tables(report.rows):
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = Table(*columns)
        for row in rows:
            table.add_row(*(_text(row.get(column, "")) for column in columns))
        console.print(table)
    aims = list(report.aims)
    for aim in aims:
        verdict = "[green]holds[/]" if aim.holds else "[red]missed[/]"
        console.print(f"{aim.name}: {aim.value:.3g}, aim {aim.aim}: {verdict}")
    if as_json:
        whole = {
            "name": name,
            "environment": environment(threads) | dict(report.conditions),
            "rows": [{key: _plain(value) for key, value in row.items()} for row in report.rows],
            "aims": [asdict(aim) for aim in aims],
        }
        print(json.dumps(whole))
    elif report.conditions:
        console.print(", ".join(f"{key}: {value}" for key, value in report.conditions.items()), markup=False)


def _text(value: Cell) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _plain(value: Cell) -> object:
    return asdict(value) if isinstance(value, (Spread, Interval)) else value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # this is not Linux
    return platform.processor()
