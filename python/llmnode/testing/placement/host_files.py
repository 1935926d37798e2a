"""Hosts of a simulated swarm from CSV files of a user: their speeds, and a measured trace of when they were on.

The files are as `core/placement/host_rows.py` reads them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.placement.host_rows import BLOCKS, HOST, SPEED, HostRow, host_rows
from llmnode.core.placement.servers import one_speed
from llmnode.errors import ConfigError
from llmnode.testing.placement.hosts import Host, Uptime, apart, uneven

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Speeds = tuple[float, ...]

FROM, TO = "from_s", "to_s"


def read_hosts(file: Path) -> dict[str, Speeds]:
    """Speeds as in `PlacedServer`, by host. The columns are `host`, `tokens_per_s` and `blocks`. Raises ConfigError."""
    speeds: dict[str, Speeds] = {}
    for row in host_rows(file, (HOST, SPEED, BLOCKS)):
        if (name := row.host) in speeds:
            raise ConfigError(f"{row.place}: the host {name!r} is in an earlier line: write one line for each host")
        speeds[name] = _speeds(row)
    return speeds


def read_trace(file: Path, seed: int = 0, speeds: Mapping[str, Speeds] | None = None) -> list[Host]:
    """Hosts from a trace with the columns `host`, `from_s` and `to_s`, and one row an uptime. Raises ConfigError.

    Their `speeds` are those of `read_hosts`. Without these, a trace may have `tokens_per_s` and `blocks`. Speeds that
    are in neither are drawn as in the paper.
    """
    rng, hosts = random.Random(seed), dict[str, Host]()
    for row in host_rows(file, (HOST, FROM, TO), (SPEED, BLOCKS)):
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
        hosts[name] = replace(known, uptimes=(*known.uptimes, _uptime(row)))
    return [replace(host, uptimes=apart(host.uptimes)) for host in hosts.values()]


def _speeds(row: HostRow) -> Speeds:
    return one_speed(row.speed, row.blocks)


def _speeds_or(row: HostRow, otherwise: Speeds) -> Speeds:
    """Those of the row; a part that it leaves out is as `otherwise`."""
    speed = row.speed if row.fields.get(SPEED) else otherwise[0]
    return one_speed(speed, row.blocks if row.fields.get(BLOCKS) else len(otherwise))


def _uptime(row: HostRow) -> Uptime:
    from_s, to_s = (row.number(name, "seconds from the start, 0 or more") for name in (FROM, TO))
    if to_s <= from_s:
        raise ConfigError(f"{row.place}: {TO} is {to_s:g}, and {FROM} is {from_s:g}: write a later {TO}")
    return Uptime(from_s, to_s)
