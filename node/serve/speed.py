"""Measures the speed of a worker, through the same operations as sessions use."""

from __future__ import annotations

import secrets
import statistics
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Close, Forward, Open
from llmnode.core.speed import PROMPT_POSITIONS, SHARED_SESSIONS, ComputeSpeed, seen
from llmnode.errors import ConfigError, ModelError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.core.speed import ForwardsSeen
    from llmnode.ports import Worker

QUICK_STEPS = 9
QUICK_SHARED_STEPS = 4
"""A server measures itself by this little before it serves, and a prompt of `PROMPT_POSITIONS`."""
PATIENCE_S = 1.5
"""After this time the rest of it is left out: a slow device shows how slow it is in a few steps."""
STEPS = 16
PROMPT = 512


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second through all blocks of a worker; each is a list of measurements, one a round."""

    decode: Sequence[float]
    """One session alone, token by token."""
    decode_shared: Sequence[float]
    """The sum over `sessions` that decode at once."""
    sessions: int
    prefill: Sequence[float]
    """A prompt of `prompt` tokens."""
    prompt: int


class WorkerSpeed:
    """The speed of a worker: as it was `measured` before it had sessions, and as they have seen it since."""

    def __init__(self, worker: Worker, measured: ComputeSpeed) -> None:
        self.measured = measured
        self.worker = worker
        self._decodes_before = worker.seen.decodes

    @property
    def since(self) -> ForwardsSeen:
        """The forwards since then. Their times count those before too, until there are enough of them."""
        forwards = self.worker.seen
        return replace(forwards, decodes=forwards.decodes - self._decodes_before)

    @property
    def span(self) -> Span:
        return self.worker.span

    @property
    def blocks(self) -> int:
        return len(self.span)

    @property
    def now(self) -> ComputeSpeed:
        """It is what sessions have seen lately, and what was measured while they were few."""
        return seen(self.measured, self.since, self.blocks)

    @property
    def observed(self) -> ComputeSpeed | None:
        """The same, once sessions have had enough forwards; None before."""
        now = self.now
        return None if now is self.measured else now


async def first_step(worker: Worker, model: ModelInfo) -> None:
    """One decode, if there is KV for it: it takes the memory that later ones take.

    Raises WorkerLost, or ModelError if the blocks cannot compute.
    """
    async with _sessions(worker, 1, 1) as sessions:
        for session in sessions:
            await worker.do(Forward(session, 0, 1, bytes(model.row_bytes)))


async def measure_compute(worker: Worker, model: ModelInfo) -> ComputeSpeed:
    """The rates of a worker as it will serve: its blocks in their precision, its threads, and all else that runs here.

    It takes a few seconds. On a slow device there is no time for some rates: they count as no faster than one decode
    after the other. Without KV for it, all rates are 0.

    Raises WorkerLost, or ModelError if the blocks cannot compute, mostly for want of memory.
    """
    began_s = trio.current_time()
    async with _sessions(worker, 1, QUICK_STEPS + 1) as sessions:
        if not sessions:
            return ComputeSpeed()
        times_us: list[int] = []
        while len(times_us) <= QUICK_STEPS and (len(times_us) < 2 or trio.current_time() < began_s + PATIENCE_S):
            step = Forward(sessions[0], len(times_us), 1, bytes(model.row_bytes))
            times_us.append((await worker.do(step)).compute_us)
    decode = 1e6 / max(1.0, statistics.median(times_us[1:]))  # the first one warms caches up
    shared = prefill = 0.0
    count = _sessions_that_fit(worker, QUICK_SHARED_STEPS)
    if count > 1 and trio.current_time() < began_s + PATIENCE_S:
        shared = await _decode(worker, model, count, QUICK_SHARED_STEPS)
    prompt = min(PROMPT_POSITIONS, model.context_tokens, worker.kv_tokens_free)
    if prompt > 1 and trio.current_time() < began_s + 2 * PATIENCE_S:
        prefill = await _prefill(worker, model, prompt)
    return ComputeSpeed(decode, max(decode, shared), max(decode, prefill), count if shared else 1)


async def measure_speed(
    worker: Worker, model: ModelInfo, rounds: int, report: Callable[[int], None] = lambda _round: None
) -> Speed:
    """Measure in turn, `rounds` times, after one round that warms caches up. `report` is told the number of each.

    Raises ConfigError if there is no KV for it, and as `measure_compute`.
    """
    prompt = max(1, min(PROMPT, model.context_tokens, worker.kv_tokens_free))
    steps = min(STEPS, prompt)
    sessions = max(1, _sessions_that_fit(worker, steps))
    decode, shared, prefill = [], [], []
    for number in range(rounds + 1):
        report(number)
        decode.append(await _decode(worker, model, 1, steps))
        shared.append(await _decode(worker, model, sessions, steps))
        prefill.append(await _prefill(worker, model, prompt))
    return Speed(decode[1:], shared[1:], sessions, prefill[1:], prompt)


def is_short_of_kv(worker: Worker, model: ModelInfo) -> bool:
    """Whether there is too little KV for all that `measure_compute` does, even without sessions."""
    prompt = min(PROMPT_POSITIONS, model.context_tokens)
    return worker.kv_tokens < max(prompt, SHARED_SESSIONS * _whole_pages(worker, QUICK_SHARED_STEPS))


def _sessions_that_fit(worker: Worker, length: int) -> int:
    """Up to `SHARED_SESSIONS` of this `length`, each of which takes whole pages of KV."""
    return min(SHARED_SESSIONS, worker.kv_tokens_free // _whole_pages(worker, length))


def _whole_pages(worker: Worker, length: int) -> int:
    return ceil(length / worker.kv_page) * worker.kv_page


async def _decode(worker: Worker, model: ModelInfo, count: int, steps: int) -> float:
    row = bytes(model.row_bytes)

    async def decode(session: SessionId) -> None:
        for step in range(steps):
            await worker.do(Forward(session, step, 1, row))

    async with _sessions(worker, count, steps) as sessions:
        _require(len(sessions) == count, count * steps)
        started_s = trio.current_time()
        failed: list[Exception] = []
        try:
            async with trio.open_nursery() as nursery:
                for session in sessions:
                    nursery.start_soon(decode, session)
        except* (WorkerLost, RuntimeError, MemoryError) as group:  # all sessions of a batch may fail alike
            failed.extend(group.exceptions)
        if failed:
            raise failed[0]
        return len(sessions) * steps / (trio.current_time() - started_s)


async def _prefill(worker: Worker, model: ModelInfo, prompt: int) -> float:
    async with _sessions(worker, 1, prompt) as sessions:
        _require(len(sessions) == 1, prompt)
        started_s = trio.current_time()
        await worker.do(Forward(sessions[0], 0, prompt, bytes(prompt * model.row_bytes)))
        return prompt / (trio.current_time() - started_s)


@asynccontextmanager
async def _sessions(worker: Worker, count: int, length: int) -> AsyncIterator[list[SessionId]]:
    """Up to `count` sessions of `length` positions: fewer if KV is short. They are closed with the context."""
    opened: list[SessionId] = []
    try:
        for _ in range(count):
            session = SessionId(secrets.token_bytes(SESSION_ID_BYTES))
            if await worker.do(Open(session, worker.span, length)):
                opened.append(session)
        yield opened
    except (RuntimeError, MemoryError) as error:  # torch's own
        raise ModelError(f"blocks {worker.span} cannot compute: {error}") from error
    finally:
        with trio.CancelScope(shield=True):
            for session in opened:
                await worker.do(Close(session))


def _require(is_open: bool, positions: int) -> None:
    if not is_open:
        raise ConfigError(f"there is no KV for {positions} positions: give a higher --kv-tokens")
