"""The speed of a worker is measured by sessions that are closed afterwards, whatever KV there is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.compute.thread_worker import ThreadWorker
from llmnode.core.ids import SessionId
from llmnode.core.model import ModelInfo, Precision
from llmnode.core.operations import Close, Forward, Open
from llmnode.core.span import Span
from llmnode.core.speed import LEAST_FORWARDS, SHARED_SESSIONS, ComputeSpeed, ForwardsSeen
from llmnode.errors import ConfigError, ModelError, WorkerLost
from llmnode.node.commands.speed import progress
from llmnode.node.serve import speed_cache
from llmnode.node.serve.speed import (
    PROMPT,
    QUICK_SHARED_STEPS,
    STEPS,
    WorkerSpeed,
    first_step,
    measure_compute,
    measure_speed,
)
from llmnode.node.serve.speed_cache import AGAIN_MS, KEEPS_MS, MOST, NOTE_S, SpeedCache
from llmnode.swarm.membership import wall_clock_ms
from llmnode.testing.worker import ExactExecutor
from unit.hanging import gone_on, hanging
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmnode.core.operations import Buffer, Control, Slice
    from llmnode.ports import Worker

MODEL = ModelInfo("exact", b"d" * 32, blocks=4, hidden_size=4, context_tokens=4096)
SPAN = Span(0, 4)
PAGE = 256
MODEL_KEY = SpeedCache().key(MODEL, "0:4")


class PagedExecutor(ExactExecutor):
    """Reserves KV in whole pages, as a GPU does."""

    def apply(self, operation: Control) -> bool:
        if isinstance(operation, Open):
            pages = -(-operation.max_length // PAGE)
            operation = replace(operation, max_length=pages * PAGE)
        return super().apply(operation)


@pytest.mark.parametrize("rounds", [1, 3])
@in_trio
async def test_every_round_is_announced_by_its_number_after_one_that_does_not_count(rounds: int) -> None:
    told: list[str] = []
    await measure_speed(worker_with(4096), MODEL, rounds, lambda number: told.append(progress(number, rounds)))
    first, *others = told
    assert "does not count" in first
    assert others == [f"measuring round {number} of {rounds}" for number in range(1, rounds + 1)]


def worker_with(kv_tokens: int) -> ThreadWorker:
    return ThreadWorker(ExactExecutor(SPAN, MODEL.row_bytes, kv_tokens))


@pytest.mark.parametrize(
    ("kv_tokens", "context", "sessions", "prompt"),
    [
        (32_768, 4096, SHARED_SESSIONS, PROMPT),
        (3 * STEPS, 4096, 3, 3 * STEPS),
        (5, 4096, 1, 5),
        (32_768, 8, SHARED_SESSIONS, 8),
    ],
)
def test_it_measures_as_many_sessions_and_as_long_a_prompt_as_fit(
    kv_tokens: int, context: int, sessions: int, prompt: int
) -> None:
    async def main() -> None:
        worker, rounds = worker_with(kv_tokens), []
        speed = await measure_speed(worker, replace(MODEL, context_tokens=context), 3, rounds.append)
        assert (speed.sessions, speed.prompt) == (sessions, prompt)
        assert rounds == [0, 1, 2, 3]
        for rates in (speed.decode, speed.decode_shared, speed.prefill):
            assert len(rates) == 3
            assert all(rate > 0 for rate in rates)
        assert worker.kv_tokens_free == kv_tokens, "its sessions are closed"

    trio.run(main)


@pytest.mark.parametrize("pages", [1, 3])
def test_sessions_take_whole_pages_of_kv(pages: int) -> None:
    """A GPU with less free KV than pages for all sessions measures fewer of them, and starts all the same."""

    async def main() -> None:
        executor = PagedExecutor(SPAN, MODEL.row_bytes, pages * PAGE)
        executor.kv_page = PAGE
        worker = ThreadWorker(executor)
        assert (await measure_speed(worker, MODEL, 1)).sessions == pages
        assert (await measure_compute(worker, MODEL)).decode_tokens_per_s > 0
        assert worker.kv_tokens_free == pages * PAGE, "its sessions are closed"

    trio.run(main)


def test_without_kv_it_says_so_and_a_server_announces_no_speed() -> None:
    async def main() -> None:
        worker, taken = worker_with(64), SessionId(bytes(16))
        assert await worker.do(Open(taken, SPAN, 64))
        with pytest.raises(ConfigError, match="no KV for"):
            await measure_speed(worker, MODEL, 1)
        assert await measure_compute(worker, MODEL) == ComputeSpeed()
        await first_step(worker, MODEL)
        await worker.do(Close(taken))
        speed = await measure_compute(worker, MODEL)
        assert 0 < speed.decode_tokens_per_s <= min(speed.shared_tokens_per_s, speed.prefill_tokens_per_s)
        assert worker.kv_tokens_free == 64, "its sessions are closed"

    trio.run(main)


class FailingExecutor(ExactExecutor):
    """Its forwards fail while sessions hold this many positions."""

    def __init__(self, positions: int, error: Exception) -> None:
        super().__init__(SPAN, MODEL.row_bytes, 1000)
        self._positions = positions
        self._error = error

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        if self.reserved >= self._positions:
            raise self._error
        return super().forward(slices)


@pytest.mark.parametrize("sessions", [1, SHARED_SESSIONS])
@pytest.mark.parametrize("error", [RuntimeError("as told"), MemoryError("as told")], ids=repr)
def test_blocks_that_cannot_compute_are_told_so_in_one_error(sessions: int, error: Exception) -> None:
    async def main() -> None:
        worker = ThreadWorker(FailingExecutor(1 if sessions == 1 else sessions * QUICK_SHARED_STEPS, error))
        with pytest.raises(ModelError, match=r"blocks \[0, 4\) cannot compute: as told"):
            await measure_compute(worker, MODEL)
        assert worker.kv_tokens_free == 1000, "its sessions are closed"
        if sessions == 1:
            with pytest.raises(ModelError, match="cannot compute: as told"):
                await first_step(worker, MODEL)

    trio.run(main)


def test_a_worker_that_is_lost_under_several_sessions_is_lost_in_one_error() -> None:
    async def main() -> None:
        with pytest.raises(WorkerLost, match="as told"):
            await measure_compute(
                ThreadWorker(FailingExecutor(SHARED_SESSIONS * QUICK_SHARED_STEPS, WorkerLost("as told"))), MODEL
            )

    trio.run(main)


def test_what_forwards_took_is_known_for_each_block_whatever_spans_sessions_have() -> None:
    async def main() -> None:
        worker = worker_with(64)
        assert worker.seen == ForwardsSeen()
        for span in (SPAN, Span(1, 2)):
            session = SessionId(bytes([span.start]) * 16)
            assert await worker.do(Open(session, span, 8))
            for step in range(3):
                await worker.do(Forward(session, step, 1, bytes(MODEL.row_bytes)))
            await worker.do(Close(session))
        assert worker.seen.decodes == 6
        assert worker.seen.decode_s > 0

    trio.run(main)


def test_a_speed_is_measured_once_for_each_span_precision_and_setting(tmp_path: Path) -> None:
    measured: list[Span] = []

    async def measure(worker: Worker, _model: ModelInfo) -> ComputeSpeed:
        measured.append(worker.span)
        return ComputeSpeed(1.0 + len(measured), 2.0, 3.0)

    async def main() -> None:
        cache = SpeedCache("4 threads", tmp_path / "speeds.json")
        worker = worker_with(4096)
        first = await cache.measured_once(measure)(worker, MODEL)
        assert await SpeedCache("4 threads", cache.path).measured_once(measure)(worker, MODEL) == first
        assert len(measured) == 1
        assert worker.seen.decodes == 1, "a worker whose speed is known does one step all the same"
        others = [(cache, replace(MODEL, digest=b"e" * 32)), (cache, replace(MODEL, precision=Precision("bfloat16")))]
        for other, model in [*others, (SpeedCache("1 thread", cache.path), MODEL)]:
            assert await other.measured_once(measure)(worker, model) != first
        assert len(measured) == 4

    trio.run(main)


def test_the_speed_of_a_block_is_known_by_whatever_span_was_measured_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, now_ms = SpeedCache("cuda:0, 4 threads", tmp_path / "speeds.json"), wall_clock_ms()
    other = replace(MODEL, precision=Precision("bfloat16"))
    for days, (span, model) in enumerate([("0:4", MODEL), ("1:4", MODEL), ("0:1", other)]):
        at_ms = now_ms + days * AGAIN_MS
        monkeypatch.setattr("llmnode.node.serve.speed_cache.wall_clock_ms", lambda at_ms=at_ms: at_ms)
        cache.keep(cache.key(model, span), ComputeSpeed(10.0, 20.0, 30.0))

    async def rates() -> list[Mapping[Precision, float]]:
        caches = (cache, SpeedCache("cpu, 4 threads", cache.path))
        precisions = [MODEL.precision, other.precision, Precision("float16")]
        return [await each.block_rates(MODEL, precisions) for each in caches]

    assert trio.run(rates) == [{MODEL.precision: 60.0, other.precision: 20.0}, {}]
    monkeypatch.setattr("llmnode.node.serve.speed_cache.wall_clock_ms", lambda: now_ms + 2 * KEEPS_MS)
    assert trio.run(rates) == [{}, {}]


def test_old_damaged_and_false_speeds_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, speed = SpeedCache(path=tmp_path / "speeds.json"), ComputeSpeed(1.0, 2.0, 3.0)
    cache.keep("one", speed)
    assert cache.read("one") == speed
    text = (tmp_path / "speeds.json").read_text()
    for damaged in ("", "{}", "[]", text[:-9], text.replace("2.0", "1e99"), text.replace("2.0", '"fast"')):
        (tmp_path / "speeds.json").write_text(damaged)
        assert cache.read("one") is None
    for number in range(MOST + 5):
        cache.keep(f"{number:04}", speed)
    assert len(json.loads((tmp_path / "speeds.json").read_text())["speeds"]) == MOST
    later_ms = wall_clock_ms() + KEEPS_MS + 1
    monkeypatch.setattr("llmnode.node.serve.speed_cache.wall_clock_ms", lambda: later_ms)
    assert cache.read(f"{MOST:04}") is None


def test_a_machine_that_has_become_slower_is_believed_at_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, now_ms = SpeedCache(path=tmp_path / "speeds.json"), wall_clock_ms()

    def keep_after(days: float, rate: float) -> float:
        at_ms = now_ms + int(days * AGAIN_MS)
        monkeypatch.setattr("llmnode.node.serve.speed_cache.wall_clock_ms", lambda: at_ms)
        assert cache.read("one") is None, "it is measured again"
        return cache.keep("one", speed_of(rate)).decode_tokens_per_s

    assert keep_after(0, 10.0) == 10.0
    assert keep_after(1, 40.0) == 40.0, "it was busy at first"
    assert keep_after(2, 40.0) == 40.0
    assert keep_after(3, 20.0) == 40.0, "it may be busy"
    assert keep_after(3.1, 20.0) == 20.0, "it was measured again before a day was over, and it is slower"
    assert cache.read("one") == speed_of(20.0), "there is no doubt"
    assert keep_after(4.5, 15.0) == 20.0
    assert keep_after(30 + 4.6, 12.0) == 12.0, "more than a month ago the machine was another one"


def test_two_servers_that_keep_their_speeds_at_once_lose_none(tmp_path: Path) -> None:
    cache, keys = SpeedCache(path=tmp_path / "speeds.json"), [str(number) for number in range(16)]
    with ThreadPoolExecutor(len(keys)) as pool:  # a lock of a file keeps threads apart as it does programs
        list(pool.map(lambda key: cache.keep(key, speed_of(10.0)), keys))
    assert [cache.read(key) for key in keys] == [speed_of(10.0)] * len(keys)


def test_a_speed_of_another_span_than_start_and_end_says_nothing_of_a_block(tmp_path: Path) -> None:
    cache = SpeedCache(path=tmp_path / "speeds.json")
    cache.keep(MODEL_KEY, speed_of(10.0))
    for span in ("", ":", "4", "a:b", "0:1:2", "0:²", "0:" + 5000 * "9"):
        cache.keep(cache.key(MODEL, span), speed_of(1e6))
    assert block_rate(cache) == 40.0


@pytest.mark.parametrize("observed", [20.0, 60_000.0])
def test_what_sessions_see_has_the_next_start_measure_and_never_counts_itself(tmp_path: Path, observed: float) -> None:
    """Clients choose their contexts and batches, and so what sessions see."""
    cache, key = SpeedCache(path=tmp_path / "speeds.json"), MODEL_KEY
    assert cache.keep(key, speed_of(observed), is_observed=True) == speed_of(observed)
    assert cache.read(key) is None, "there is no measurement beside it"
    for _ in range(4):
        assert cache.keep(key, speed_of(100.0)) == speed_of(100.0) == cache.read(key), "a measurement ends the doubt"
        for _ in range(4):
            assert cache.keep(key, speed_of(observed), is_observed=True) == speed_of(100.0)
        assert cache.read(key) is None, "the next start measures"
        assert block_rate(cache) == 400.0
    assert cache.keep(key, speed_of(50.0)) == speed_of(100.0), "all measurements are still there"
    assert cache.keep(key, speed_of(50.0)) == speed_of(50.0)


def test_what_sessions_see_as_it_was_measured_is_no_new_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, now_ms = SpeedCache(path=tmp_path / "speeds.json"), wall_clock_ms()
    cache.keep("one", speed_of(100.0))
    for days, known in [(0.6, speed_of(100.0)), (1.2, None), (31, None)]:
        at_ms = now_ms + int(days * AGAIN_MS)
        monkeypatch.setattr("llmnode.node.serve.speed_cache.wall_clock_ms", lambda at_ms=at_ms: at_ms)
        cache.keep("one", speed_of(90.0), is_observed=True)
        assert cache.read("one") == known


def test_a_server_keeps_what_sessions_see_each_hour_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, kept = SpeedCache(path=tmp_path / "speeds.json"), list[tuple[str, ComputeSpeed, bool]]()

    def note(_cache: SpeedCache, key: str, speed: ComputeSpeed, *, is_observed: bool = False) -> ComputeSpeed:
        kept.append((key, speed, is_observed))
        return speed

    monkeypatch.setattr(SpeedCache, "keep", note)

    async def decode(worker: ThreadWorker, session: SessionId, steps: range) -> None:
        for step in steps:
            await worker.do(Forward(session, step, 1, bytes(MODEL.row_bytes)))

    async def main() -> None:
        worker, session = worker_with(2 * LEAST_FORWARDS), SessionId(bytes(16))
        speed = WorkerSpeed(worker, speed_of(1.0))
        assert await worker.do(Open(session, SPAN, 2 * LEAST_FORWARDS))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.note_observed, lambda: speed, MODEL)
            await decode(worker, session, range(LEAST_FORWARDS - 1))
            await trio.sleep(1.5 * NOTE_S)
            assert not kept, "there were too few forwards"
            await decode(worker, session, range(LEAST_FORWARDS - 1, LEAST_FORWARDS))
            await trio.sleep(2 * NOTE_S)
            assert kept == [(cache.key(MODEL, "0:4"), speed.now, True)], "once: nothing new was seen since"
            await decode(worker, session, range(LEAST_FORWARDS, LEAST_FORWARDS + 1))
            nursery.cancel_scope.cancel()
        assert len(kept) == 2
        assert kept[1] == (cache.key(MODEL, "0:4"), speed.observed, True)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


@in_trio
async def test_a_disk_that_hangs_holds_up_neither_the_start_of_a_server_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def measure(_worker: Worker, _model: ModelInfo) -> ComputeSpeed:
        return speed_of(7.0)

    caplog.set_level("INFO", "llmnode")
    cache, worker = SpeedCache(path=tmp_path / "speeds.json"), worker_with(2 * LEAST_FORWARDS)
    speed, session = WorkerSpeed(worker, speed_of(1.0)), SessionId(bytes(16))
    with hanging(monkeypatch, speed_cache, "write_in_cache") as hung:
        assert await cache.measured_once(measure)(worker, MODEL) == speed_of(7.0), "it cannot be written"
        assert await cache.block_rates(MODEL, [MODEL.precision]) == {}
        assert hung.count == 1, "no second thread hangs"
    await gone_on()
    with hanging(monkeypatch, speed_cache, "read_file") as hung:
        assert await cache.measured_once(measure)(worker, MODEL) == speed_of(7.0), "it cannot be read"
    await gone_on()
    assert await worker.do(Open(session, SPAN, LEAST_FORWARDS))
    for step in range(LEAST_FORWARDS):
        await worker.do(Forward(session, step, 1, bytes(MODEL.row_bytes)))
    with hanging(monkeypatch, speed_cache, "read_file") as hung:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.note_observed, lambda: speed, MODEL)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert hung.count == 1
    assert "neither read nor remembered: the cache has not answered" in caplog.text
    await gone_on()
    assert await cache.measured_once(measure)(worker, MODEL) == speed_of(7.0) == cache.read(MODEL_KEY), "it goes on"


def block_rate(cache: SpeedCache) -> float:
    return trio.run(cache.block_rates, MODEL, [MODEL.precision])[MODEL.precision]


def speed_of(rate: float) -> ComputeSpeed:
    return ComputeSpeed(rate, rate, rate)


def test_a_speed_that_is_not_to_be_kept_may_be_known(tmp_path: Path) -> None:
    rates = iter([10.0, 20.0, 30.0])

    async def measure(_worker: Worker, _model: ModelInfo) -> ComputeSpeed:
        rate = next(rates)
        return ComputeSpeed(rate, rate, rate)

    async def main() -> list[float]:
        cache, worker = SpeedCache(path=tmp_path / "speeds.json"), worker_with(4096)
        beside, alone = cache.measured_once(measure, keeps=False), cache.measured_once(measure)
        return [(await each(worker, MODEL)).decode_tokens_per_s for each in (beside, alone, beside, alone)]

    assert trio.run(main) == [10.0, 20.0, 20.0, 20.0]
