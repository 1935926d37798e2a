"""The clock of the benchmarks' proxies: it wakes a loop on time, and the loop does not spin meanwhile."""

from __future__ import annotations

import select
import sys
import time

import pytest
import trio

from bench.kit.precise_clock import PreciseClock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such timers")


def test_sleeps_end_and_none_too_soon() -> None:
    clock = PreciseClock()
    late_s: list[float] = []

    async def main() -> None:
        async def sleep(seconds: float) -> None:
            due_s = trio.current_time() + seconds
            await trio.sleep_until(due_s)
            late_s.append(trio.current_time() - due_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clock.keep_waking)
            async with trio.open_nursery() as sleeping:
                for seconds in (0.0024, 0.0004, 0.0014):
                    sleeping.start_soon(sleep, seconds)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert len(late_s) == 3 and min(late_s) >= 0


def test_the_timer_fires_for_the_latest_deadline_that_was_told() -> None:
    clock = PreciseClock()
    assert clock.deadline_to_sleep_time(clock.current_time() + 1000) == pytest.approx(1000, abs=1)
    due_s = time.perf_counter() + 0.0005
    clock.deadline_to_sleep_time(due_s)
    assert select.select([clock.timer], [], [], 10) == ([clock.timer], [], [])
    assert time.perf_counter() >= due_s
