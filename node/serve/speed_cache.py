"""The measured speeds of this machine, on disk: a server that starts again need not measure itself anew.

A speed is kept for one hardware, one version of llmnode, and one span of a model as it is computed. While
the server runs, the times of sessions replace it (`core/speed.py`). A machine may be busy while it is measured. So it
is measured again after a day, and the faster result is kept. A result that other sessions have slowed is not kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from llmnode.core.model import ModelInfo
from llmnode.core.speed import SHARED_SESSIONS, ComputeSpeed
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.machine.cache_folder import cache_folder, write_in_cache
from llmnode.node.serve.speed import first_step, measure_compute
from llmnode.ports import Worker
from llmnode.swarm.membership import software, wall_clock_ms

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

Measure: TypeAlias = Callable[[Worker, ModelInfo], Awaitable[ComputeSpeed]]

FILE = "speeds.json"
VERSION = 2
MOST = 256
"""Speeds that are kept; those that were measured longest ago go first."""
MOST_BYTES = 1 << 20
AGAIN_MS = 86_400_000
KEEPS_MS = 30 * AGAIN_MS
FASTEST = 1e12
"""No rate in the file is higher."""


@dataclass(frozen=True, slots=True)
class SpeedCache:
    """Speeds of one machine. `settings` are its hardware, threads and devices in words."""

    settings: str = ""
    path: Path | None = None

    def measured_once(self, measure: Measure = measure_compute, *, keeps: bool = True) -> Measure:
        """`measure`, unless the speed is known: then the worker does one step. If it `keeps`, a result is kept."""

        async def measure_or_read(worker: Worker, model: ModelInfo) -> ComputeSpeed:
            key = self._key(model, worker)
            if (known := await trio.to_thread.run_sync(self.read, key)) is not None:
                await first_step(worker, model)
                return known
            speed = await measure(worker, model)
            if keeps and speed.decode_tokens_per_s:
                speed = await trio.to_thread.run_sync(self.keep, key, speed)
            return speed

        return measure_or_read

    def _key(self, model: ModelInfo, worker: Worker) -> str:
        return self.key(model, f"{worker.span.start}:{worker.span.end}")

    def key(self, model: ModelInfo, span: str) -> str:
        """The name of a speed in the file, with the digest of `model` and the `span` as START:END."""
        return "; ".join((software(), model.digest.hex(), model.precision.name, span, self.settings))

    def read(self, key: str) -> ComputeSpeed | None:
        """None if it is not known, or has to be measured again. A file that is damaged or not ours counts as none."""
        entry = self._entries().get(key)
        if entry is None or _age_ms(entry["tried_ms"]) >= AGAIN_MS or _age_ms(entry["measured_ms"]) >= KEEPS_MS:
            return None
        return ComputeSpeed(**entry["speed"])

    async def block_rate(self, model: ModelInfo) -> float:
        """The tokens a second of one block with several sessions, by the span that was measured last; 0 without any."""
        return await trio.to_thread.run_sync(self._block_rate, model)

    def _block_rate(self, model: ModelInfo) -> float:
        before, _, after = self.key(model, "\0").partition("\0")
        found: list[tuple[int, float]] = []
        for key, entry in self._entries().items():
            if key.startswith(before) and key.endswith(after) and _age_ms(entry["measured_ms"]) < KEEPS_MS:
                start, end = map(int, key[len(before) : -len(after)].split(":"))
                found.append((entry["measured_ms"], entry["speed"]["shared_tokens_per_s"] * (end - start)))
        return max(found, default=(0, 0.0))[1]

    def keep(self, key: str, speed: ComputeSpeed) -> ComputeSpeed:
        """Keep it for the next run, unless a faster one is kept already: the faster one is returned.

        A file that cannot be written is logged.
        """
        entries, now_ms = self._entries(), wall_clock_ms()
        entry: dict[str, Any] = {"measured_ms": now_ms, "speed": asdict(speed)}  # Any: JSON
        if (former := entries.get(key)) is not None and _age_ms(former["measured_ms"]) < KEEPS_MS:
            entry = max(former, entry, key=lambda each: each["speed"]["decode_tokens_per_s"])
        self._write(entries | {key: {**entry, "tried_ms": now_ms}})
        return ComputeSpeed(**entry["speed"])

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:  # Any: JSON
        try:
            latest = sorted(entries, key=lambda each: -entries[each]["tried_ms"])[:MOST]
            text = json.dumps({"version": VERSION, "speeds": {each: entries[each] for each in latest}})
            write_in_cache(self.path or cache_folder(FILE), text)
        except (OSError, ConfigError) as error:
            log.info("the speed of this machine is not remembered: %s", error)

    def _entries(self) -> dict[str, dict[str, Any]]:  # Any: JSON
        try:
            content = json.loads(read_file(self.path or cache_folder(FILE), FILE, MOST_BYTES))
            if content["version"] != VERSION:
                return {}
            return {key: entry for key, entry in content["speeds"].items() if _is_whole(entry)}
        except (ConfigError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def _age_ms(at_ms: int) -> int:
    """The time since then. A time of the future, from before the clock was set, counts as old."""
    age_ms = wall_clock_ms() - at_ms
    return age_ms if age_ms >= 0 else KEEPS_MS


def _is_whole(entry: Any) -> bool:  # Any: JSON
    match entry:
        case {"measured_ms": int(), "tried_ms": int(), "speed": {"shared_sessions": int(sessions), **rates}}:
            names = asdict(ComputeSpeed()).keys() - {"shared_sessions"}
            are_rates = all(type(rate) is float and 0 < rate < FASTEST for rate in rates.values())
            return rates.keys() == names and are_rates and 1 <= sessions <= SHARED_SESSIONS
    return False
