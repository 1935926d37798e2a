"""A clock for trio programs whose sleeps have to end on time: those of the proxies, which imitate links.

Polls take whole milliseconds, so trio's sleeps end up to one too late. On Linux a timer of the kernel wakes the loop.
Elsewhere the clock spins through the last millisecond, which costs CPU time.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import time

import trio

CLOCK_GRAIN_S = 0.001
_MONOTONIC = 1
"""`CLOCK_MONOTONIC`, by which Python's `perf_counter` counts on Linux."""
_ABSOLUTE = 1
"""`TFD_TIMER_ABSTIME`: a time of the clock, and not from now on."""
_NANOSECONDS = 10**9


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSetting(ctypes.Structure):
    _fields_ = [("interval", _Time), ("due", _Time)]


class PreciseClock(trio.abc.Clock):
    """Counts as `time.perf_counter` does. `keep_waking` has to run in the loop meanwhile."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self.timer = -1 if self._libc is None else self._libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        """The file of the kernel's timer, -1 if there is none."""
        self._armed_s = math.inf

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return time.perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        left_s = max(0.0, deadline - self.current_time())
        if self.timer < 0:
            return max(0.0, left_s - CLOCK_GRAIN_S)
        if not left_s or deadline == math.inf:
            return left_s
        self._arm(deadline)
        return left_s + CLOCK_GRAIN_S  # the timer is sooner

    async def keep_waking(self) -> None:
        """Have the loop look at its deadlines whenever the timer fires, until cancelled."""
        while self.timer >= 0:
            await trio.lowlevel.wait_readable(self.timer)
            with contextlib.suppress(BlockingIOError):  # it was set again meanwhile
                os.read(self.timer, 8)

    def _arm(self, deadline: float) -> None:
        if deadline == self._armed_s:
            return
        assert self._libc is not None, "there is a timer"
        seconds, nanoseconds = divmod(math.ceil(deadline * _NANOSECONDS), _NANOSECONDS)
        setting = _TimerSetting(_Time(0, 0), _Time(seconds, nanoseconds))
        if self._libc.timerfd_settime(self.timer, _ABSOLUTE, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "the timer cannot be set")
        self._armed_s = deadline
