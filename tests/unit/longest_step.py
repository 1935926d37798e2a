"""The longest step of trio's event loop, in processor time: others of this machine do not count."""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator


class Steps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.longest_s = 0.0
        self.began_s = time.thread_time()  # the first step is under way

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.began_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self.began_s)


@contextmanager
def measured_steps() -> Iterator[Steps]:
    """Garbage collections, which look through all that the tests before have left, come before and after."""
    gc.collect()
    gc.disable()
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)
        gc.enable()
