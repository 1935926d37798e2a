"""Work on many bytes goes to a thread: other sessions and links go on meanwhile.

A client chooses how many positions it sends at once. To round 50 MB of hidden states to bf16 takes a quarter of a
second. numpy and our extension let go of Python's lock for such work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

IN_THREAD_BYTES = 1 << 20
"""Work on this many bytes takes a third of a millisecond or more. A decode has always fewer."""
_THREADS = trio.CapacityLimiter(2)
"""More of them would take the cores from the event loop and the worker."""


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`. It is waited for even if the task is cancelled."""
    return await trio.to_thread.run_sync(work, limiter=_THREADS)


async def run(work: Callable[[], T], size_bytes: int) -> T:
    """The result of `work` on that many bytes. Other tasks run meanwhile if these are many."""
    return await in_thread(work) if size_bytes >= IN_THREAD_BYTES else work()
