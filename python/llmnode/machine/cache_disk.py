"""Waits for the disk of the cache for a short time only: a home folder on a network may hang for ever.

The work goes on in its thread, which holds up neither the start of a program nor its end. There is one thread at a
time. While one hangs, further work fails at once. Otherwise each attempt would take a thread, and two seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
T = TypeVar("T")

DISK_S = 2.0
"""The time that a program waits for a file of the cache, also when it is told to end."""


@dataclass(slots=True)
class _Disk:
    in_turn: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    has_hung: bool = False
    """At the latest attempt."""


_DISK: trio.lowlevel.RunVar[_Disk] = trio.lowlevel.RunVar("_DISK")


async def in_time(work: Callable[[], T]) -> T:
    """The result of `work`, in a thread that is left behind after `DISK_S`, and at once if this is cancelled.

    Raises the errors of `work`, and TimeoutError, which is an OSError.
    """
    disk = _disk()
    if not (disk.has_hung and disk.in_turn.borrowed_tokens):
        with trio.move_on_after(DISK_S):
            result = await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=disk.in_turn)
            disk.has_hung = False
            return result
    disk.has_hung = True
    raise TimeoutError(f"the cache has not answered in {DISK_S:g} s")


async def in_time_or(work: Callable[[], T], otherwise: T, without: str) -> T:
    """The result of `work`; `otherwise` if the disk hangs. Then the log says what the program goes on `without`."""
    try:
        return await in_time(work)
    except TimeoutError as error:
        log.info("%s: %s", without, error)
        return otherwise


def _disk() -> _Disk:
    """That of this event loop: an earlier one may have left its thread behind."""
    try:
        return _DISK.get()
    except LookupError:
        _DISK.set(disk := _Disk())
        return disk
