"""The measured speeds of this machine, on disk: a server that starts again need not measure itself anew.

A speed is kept for one hardware, one version of llmnode, and one span of a model as it is computed. It has the latest
three measurements, and `core/speed.py: believed` says which of them counts. The machine is measured again if that was
not done for a day, or if the newest measurement is much slower than the one that counts. A measurement that other
sessions have slowed is not kept.

While the server runs, the times of sessions replace it (`core/speed.py: seen`). Clients shape those. So the file has
them beside the measurements, until the next one: if they differ much, the next start measures. They never count
themselves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import trio

from llmnode.core.model import ModelInfo
from llmnode.core.span import parse_span
from llmnode.core.speed import LATEST, SHARED_SESSIONS, ComputeSpeed, believed, is_doubtful
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.machine.cache_disk import in_time_or
from llmnode.machine.cache_folder import alone_with, cache_folder, write_in_cache
from llmnode.node.serve.speed import first_step, is_short_of_kv, measure_compute
from llmnode.ports import Worker
from llmnode.swarm.membership import software, wall_clock_ms

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.core.model import Precision
    from llmnode.core.span import Span
    from llmnode.node.serve.speed import WorkerSpeed

log = logging.getLogger(__name__)
T = TypeVar("T")

Measure: TypeAlias = Callable[[Worker, ModelInfo], Awaitable[ComputeSpeed]]
Entries: TypeAlias = dict[str, list[dict[str, Any]]]  # Any: JSON

UNKNOWN = "the speed of this machine is neither read nor remembered"
FILE = "speeds.json"
VERSION = 3
MOST = 256
"""Speeds that are kept; those that were measured or observed longest ago go first."""
MOST_BYTES = 1 << 20
AGAIN_MS = 86_400_000
KEEPS_MS = 30 * AGAIN_MS
NOTE_S = 3600.0
"""A server that is killed loses what it has observed in this time."""
FASTEST = 1e12
"""No rate in the file is higher."""


@dataclass(frozen=True, slots=True)
class SpeedCache:
    """Speeds of one machine. `settings` are its hardware, threads and devices in words."""

    settings: str = ""
    path: Path | None = None

    def measured_once(self, measure: Measure = measure_compute, *, keeps: bool = True) -> Measure:
        """`measure`, unless the speed is known: then the worker does one step. If it `keeps`, a result is kept.

        With less KV than a measurement takes, a worker may be slower: its speed is neither read nor kept.
        """

        async def measure_or_read(worker: Worker, model: ModelInfo) -> ComputeSpeed:
            if is_short_of_kv(worker, model):
                return await measure(worker, model)
            key = self._key(model, worker.span)
            if (known := await in_time_or(partial(self.read, key), None, UNKNOWN)) is not None:
                await first_step(worker, model)
                return known
            speed = await measure(worker, model)
            if keeps and speed.decode_tokens_per_s:
                speed = await in_time_or(partial(self.keep, key, speed), speed, UNKNOWN)
            return speed

        return measure_or_read

    async def note_observed(self, now: Callable[[], WorkerSpeed | None], model: ModelInfo) -> NoReturn:
        """Keep what sessions have seen of the worker that there is `now`, once an hour and when this is cancelled."""
        noted: tuple[WorkerSpeed | None, int] = None, 0  # the worker and its forwards, when it was kept last

        async def note() -> None:
            nonlocal noted
            speed = now()
            if speed is None or (observed := speed.observed) is None or (speed, speed.since.decodes) == noted:
                return
            if is_short_of_kv(speed.worker, model):
                return
            noted = speed, speed.since.decodes
            key = self._key(model, speed.span)
            await in_time_or(partial(self.keep, key, observed, is_observed=True), observed, UNKNOWN)

        try:
            while True:
                await trio.sleep(NOTE_S)
                await note()
        finally:
            with trio.CancelScope(shield=True):
                await note()

    def _key(self, model: ModelInfo, span: Span) -> str:
        return self.key(model, f"{span.start}:{span.end}")

    def key(self, model: ModelInfo, span: str) -> str:
        """The name of a speed in the file, with the digest of `model` and the `span` as START:END."""
        return "; ".join((software(), model.digest.hex(), model.precision.name, span, self.settings))

    def read(self, key: str) -> ComputeSpeed | None:
        """None if it is not known, or has to be measured again. A file that is damaged or not ours counts as none."""
        latest = self._entries().get(key, [])
        measured = _measured(latest)
        if not measured or _age_ms(measured[0]["at_ms"]) >= AGAIN_MS:
            return None
        newest, speeds = _speeds(latest)[0], _speeds(measured)  # the newest may be an observation
        return None if is_doubtful(speeds, newest) else believed(speeds)

    async def block_rates(self, model: ModelInfo, precisions: Sequence[Precision]) -> Mapping[Precision, float]:
        """The tokens a second of one block with several sessions, in those `precisions` that were measured.

        The span that was measured last tells them.
        """
        return await in_time_or(partial(self._block_rates, model, precisions), {}, UNKNOWN)

    def _block_rates(self, model: ModelInfo, precisions: Sequence[Precision]) -> Mapping[Precision, float]:
        entries = self._entries()
        rates = {each: self._block_rate(replace(model, precision=each), entries) for each in precisions}
        return {each: rate for each, rate in rates.items() if rate}

    def _block_rate(self, model: ModelInfo, entries: Entries) -> float:
        before, _, after = self.key(model, "\0").partition("\0")
        found: list[tuple[int, float]] = []
        for key, latest in entries.items():
            is_ours = key.startswith(before) and key.endswith(after)
            if is_ours and (measured := _measured(latest)):
                with suppress(ConfigError):
                    span = parse_span(key[len(before) : -len(after)], model.blocks)
                    rate = believed(_speeds(measured)).shared_tokens_per_s
                    found.append((measured[0]["at_ms"], rate * len(span)))
        return max(found, default=(0, 0.0))[1]

    def keep(self, key: str, speed: ComputeSpeed, *, is_observed: bool = False) -> ComputeSpeed:
        """Keep for the next run what was measured or observed now. Returns the speed that counts.

        An observation takes the place of one before it, and a measurement that of the observation. Without any
        measurement an observation is not kept. A file that cannot be written is logged.
        """
        entry: dict[str, Any] = {"at_ms": wall_clock_ms(), "observed": is_observed, "speed": asdict(speed)}  # Any: JSON
        try:
            file = self.path or cache_folder(FILE)
            with alone_with(file):
                entries = self._entries()
                latest = [entry, *_measured(entries.get(key, []))][: LATEST + is_observed]
                if measured := _measured(latest):
                    _write(file, entries | {key: latest})
        except (OSError, ConfigError) as error:
            log.info("the speed of this machine is not remembered: %s", error)
            measured = _measured([entry, *self._entries().get(key, [])][:LATEST])
        return believed(_speeds(measured)) if measured else speed

    def _entries(self) -> Entries:
        """The latest figures of each speed, the newest first, without those that are too old.

        The first one alone may be an observation.
        """
        try:
            content = json.loads(read_file(self.path or cache_folder(FILE), FILE, MOST_BYTES))
            if content["version"] != VERSION:
                return {}
            whole = {key: [each for each in latest if _is_whole(each)] for key, latest in content["speeds"].items()}
        except (ConfigError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
        young = {key: [each for each in latest if _age_ms(each["at_ms"]) < KEEPS_MS] for key, latest in whole.items()}
        return {key: [*latest[:1], *_measured(latest[1:])][: LATEST + 1] for key, latest in young.items() if latest}


def _write(file: Path, entries: Entries) -> None:
    latest = sorted(entries, key=lambda each: -entries[each][0]["at_ms"])[:MOST]
    write_in_cache(file, json.dumps({"version": VERSION, "speeds": {each: entries[each] for each in latest}}))


def _measured(latest: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:  # Any: JSON
    return [each for each in latest if not each["observed"]]


def _speeds(latest: Sequence[dict[str, Any]]) -> list[ComputeSpeed]:  # Any: JSON
    return [ComputeSpeed(**each["speed"]) for each in latest]


def _age_ms(at_ms: int) -> int:
    """The time since then. A time of the future, from before the clock was set, counts as old."""
    age_ms = wall_clock_ms() - at_ms
    return age_ms if age_ms >= 0 else KEEPS_MS


def _is_whole(entry: Any) -> bool:  # Any: JSON
    match entry:
        case {"at_ms": int(), "observed": bool(), "speed": {"shared_sessions": int(sessions), **rates}}:
            names = asdict(ComputeSpeed()).keys() - {"shared_sessions"}
            are_rates = all(type(rate) is float and 0 < rate < FASTEST for rate in rates.values())
            return rates.keys() == names and are_rates and 1 <= sessions <= SHARED_SESSIONS
    return False
