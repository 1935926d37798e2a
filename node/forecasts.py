"""The forecasts of `llmnode plan` on this machine, and the measurements since: `llmnode status` shows both.

They are in a file of the cache, for one model in one precision each. A forecast is for a client on this machine. So the
texts that are generated here measure it, and the server that runs here. The latest text counts. The file does not say
for which swarm a forecast was.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import MISSING, asdict, astuple, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from llmnode.core.ids import PeerId
from llmnode.core.server_figures import error_of
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.machine.cache_disk import in_time, in_time_or
from llmnode.machine.cache_folder import alone_with, cache_folder, write_in_cache
from llmnode.node.text import counted
from llmnode.swarm.membership import wall_clock_ms
from llmnode.swarm.own_nodes import running_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.model import ModelInfo
    from llmnode.core.server_figures import ServerFigures
    from llmnode.node.plan import Plan

log = logging.getLogger(__name__)
T = TypeVar("T", "Forecast", "Measured")

FILE = "forecasts.json"
VERSION = 1
MOST = 32
"""Forecasts that are kept; the oldest go first."""
MOST_BYTES = 1 << 17
LEAST_TOKENS = 16
"""The speed of a text with fewer tokens is not noted."""
ALIKE = 2.0
"""A prompt, or a number of sessions, that differs by more than this factor from the forecast's is not compared."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The figures of one `llmnode plan`. 0 stands for what it could not know."""

    at_ms: int
    session_tokens_per_s: float
    first_token_s: float
    prompt_tokens: int
    swarm_tokens_per_s: float
    sessions: int
    """The number of sessions whose sum that is."""
    blocks: int
    """The number of blocks of this machine."""
    base_bytes: int
    """The memory of its server without any positions in the KV."""
    kv_position_bytes: float
    upload_bytes_per_s: float
    model_blocks: int = 0
    """The number of blocks of the model; 0 in files of earlier versions."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The latest texts of this machine since the forecast. 0 stands for what was not measured yet."""

    session_tokens_per_s: float = 0.0
    first_token_s: float = 0.0
    prompt_tokens: int = 0
    swarm_tokens_per_s: float = 0.0
    """The sum of `sessions` texts at once."""
    sessions: int = 0


Entries: TypeAlias = dict[str, tuple[Forecast, Measured]]


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Those of this machine, with what came of them, and the peers of a swarm that run here."""

    entries: Mapping[str, tuple[Forecast, Measured]]
    own: Mapping[PeerId, float]
    """When each of these peers was started, in seconds since 1970."""


NO_FORECASTS = Forecasts({}, {})


async def read_forecasts(swarm_key: bytes | None) -> Forecasts:
    """For the swarm of this key. There are none if the disk of the cache hangs."""

    def read() -> Forecasts:
        return Forecasts(_read(), {each.peer: each.began_s for each in running_nodes(swarm_key)})

    return await in_time_or(read, NO_FORECASTS, "no forecasts are shown")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a forecast beside its measurement. None stands for what is not known, or not measured yet."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    beside: str = ""
    """How the measured case differs from the predicted one, if they cannot be compared."""

    @property
    def error(self) -> float | None:
        """By which share of the measured value the predicted one is off."""
        return None if self.beside else error_of(self.predicted or 0.0, self.measured or 0.0)


async def keep_forecast(plan: Plan) -> None:
    """The latest forecast takes the place of the one before, and of what was measured since that."""
    node, with_it = plan.node, plan.with_it
    session = with_it.session
    forecast = Forecast(
        at_ms=wall_clock_ms(),
        session_tokens_per_s=session.tokens_per_s if session else 0.0,
        first_token_s=session.first_token_s if session else 0.0,
        prompt_tokens=plan.prompt_tokens,
        swarm_tokens_per_s=with_it.tokens_per_s,
        sessions=with_it.sessions,
        blocks=len(node.span),
        base_bytes=node.base_bytes + node.weights_bytes,
        kv_position_bytes=node.kv_bytes / node.kv_tokens if node.kv_tokens else 0.0,
        upload_bytes_per_s=node.network.upload_bytes_per_s,
        model_blocks=plan.model.blocks,
    )
    await _change(lambda entries: entries | {_key_of(plan.model): (forecast, Measured())})


async def note_text(
    model: ModelInfo, tokens: int, tokens_per_s: float | None, first_token_s: float, prompt_tokens: int
) -> None:
    """One text that was alone has ended. It counts if there is a forecast for the `model`.

    It had this number of new `tokens`, and of tokens that were computed before the first one.
    """

    def noted(measured: Measured) -> Measured:
        rate = tokens_per_s if tokens >= LEAST_TOKENS and tokens_per_s else measured.session_tokens_per_s
        return replace(measured, session_tokens_per_s=rate, first_token_s=first_token_s, prompt_tokens=prompt_tokens)

    if tokens > 0:
        await _note(model, noted)


async def note_texts(model: ModelInfo, tokens: int, tokens_per_s: float, sessions: int) -> None:
    """Several texts have ended, `sessions` of them at once. `tokens` and the rate are those of all together."""
    if tokens >= LEAST_TOKENS * sessions:
        await _note(model, lambda measured: replace(measured, swarm_tokens_per_s=tokens_per_s, sessions=sessions))


async def _note(model: ModelInfo, noted: Callable[[Measured], Measured]) -> None:
    key = _key_of(model)

    def change(entries: Entries) -> Entries:
        if key not in entries:
            return entries
        forecast, measured = entries[key]
        return entries | {key: (forecast, noted(measured))}

    await _change(change)


def compared(
    forecasts: Forecasts,
    key: tuple[str, str, int],
    servers: Sequence[Announcement],
    figures: Mapping[PeerId, ServerFigures],
) -> tuple[int, list[Compared]] | None:
    """When the forecast was made (in ms), and its figures beside the measured ones; None without a forecast.

    `key` is the digest of a model, its precision and its number of blocks. Memory and upload are compared with those
    of one of its `servers`: see `_own_server`.
    """
    digest, dtype, blocks = key
    if (found := forecasts.entries.get(f"{digest}; {dtype}")) is None:
        return None
    forecast, measured = found
    if forecast.model_blocks not in (0, blocks):
        return None
    used_bytes = memory_bytes = upload_bytes_per_s = 0.0
    if (own := _own_server(forecast, forecasts.own, servers, figures)) is not None:
        used_bytes = (own.offer.kv_tokens - own.offer.kv_tokens_free) * forecast.kv_position_bytes
        upload_bytes_per_s = own.offer.speed.upload_bytes_per_s
        told = figures.get(own.peer)
        memory_bytes = told.measured_bytes if told and told.predicted_bytes else 0
    prompt = _unlike(measured.prompt_tokens, forecast.prompt_tokens, "token")
    sessions = _unlike(measured.sessions, forecast.sessions, "session")
    return forecast.at_ms, [
        _compared("one session", "tokens/s", forecast.session_tokens_per_s, measured.session_tokens_per_s),
        _compared(
            f"first token of {forecast.prompt_tokens}", "s", forecast.first_token_s, measured.first_token_s, prompt
        ),
        _compared(
            f"{forecast.sessions} sessions",
            "tokens/s",
            forecast.swarm_tokens_per_s,
            measured.swarm_tokens_per_s,
            sessions,
        ),
        _compared("memory", "bytes", forecast.base_bytes + used_bytes, memory_bytes),
        _compared("upload", "bytes/s", forecast.upload_bytes_per_s, upload_bytes_per_s),
    ]


def _own_server(
    forecast: Forecast,
    began_s: Mapping[PeerId, float],
    servers: Sequence[Announcement],
    figures: Mapping[PeerId, ServerFigures],
) -> Announcement | None:
    """The server of this machine that the forecast was made for: the first one with its number of blocks that was
    started after it. If there is none, it is the last one before. One that tells its figures goes first.
    """

    def distance(each: Announcement) -> tuple[bool, bool, float]:
        after_ms = 1000 * began_s[each.peer] - forecast.at_ms
        return each.peer not in figures, after_ms < 0, abs(after_ms)

    own = [each for each in servers if each.peer in began_s and len(each.offer.span) == forecast.blocks]
    return min(own, key=distance, default=None)


def _compared(name: str, unit: str, predicted: float, measured: float, beside: str = "") -> Compared:
    return Compared(name, unit, predicted or None, measured or None, beside if measured else "")


def _unlike(measured: int, forecast: int, what: str) -> str:
    """In words, how many it was for; "" if that is about the same."""
    is_alike = max(measured, forecast) <= ALIKE * min(measured, forecast)
    return "" if is_alike else f"for {counted(measured, what)}"


def _key_of(model: ModelInfo) -> str:
    return f"{model.digest.hex()}; {model.precision.name}"


async def _change(change: Callable[[Entries], Entries]) -> None:
    """Change the file. One that cannot be written, or not in time, is logged."""
    try:
        await in_time(partial(_change_now, change))
    except (OSError, ConfigError) as error:
        log.info("`llmnode status` will not show this beside a forecast: %s", error)


def _change_now(change: Callable[[Entries], Entries]) -> None:
    """Raises OSError and ConfigError."""
    if change(before := _read()) == before:
        return
    with alone_with(file := cache_folder(FILE)):
        before = _read()
        entries = before | {key: entry for key, entry in change(before).items() if _is_finite(entry)}
        latest = sorted(entries, key=lambda key: -entries[key][0].at_ms)[:MOST]
        kept = {key: [asdict(each) for each in entries[key]] for key in latest}
        write_in_cache(file, json.dumps({"version": VERSION, "forecasts": kept}))


def _is_finite(entry: tuple[Forecast, Measured]) -> bool:
    return all(0 <= value < math.inf for part in entry for value in astuple(part))


def _read() -> Entries:
    """A file that is damaged or not ours counts as none, and so does an entry."""
    try:
        content = json.loads(read_file(cache_folder(FILE), FILE, MOST_BYTES))
        if content["version"] != VERSION:
            return {}
        entries = {key: _entry(kept) for key, kept in content["forecasts"].items()}
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return {key: entry for key, entry in entries.items() if entry}


def _entry(kept: Any) -> tuple[Forecast, Measured] | None:  # Any: JSON
    """One entry of the file; None if it is damaged, or has a figure that is not finite."""
    try:
        made, since = kept
        return _whole(Forecast, made), _whole(Measured, since)
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _whole(kind: type[T], values: dict[str, Any]) -> T:  # Any: JSON
    """Raises ValueError, TypeError, KeyError or OverflowError."""
    for each in fields(kind):
        value = values[each.name] if each.default is MISSING else values.get(each.name, each.default)
        is_number = type(value) is int or (type(value) is float and "float" in str(each.type))
        if not is_number or value < 0 or not math.isfinite(value):
            raise ValueError(f"{each.name} is {value!r}")
    return kind(**values)
