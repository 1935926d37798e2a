"""How much memory this program takes. Loads no torch."""

from __future__ import annotations

from contextlib import suppress

import psutil


def resident_bytes() -> int:
    """The memory of this process and of those that it has started, as far as it is resident on the CPU's side.

    Memory that several of them share counts for each. It looks at all processes of the machine: not on the event loop.
    """
    own, total = psutil.Process(), 0
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            total += each.memory_info().rss
    return total
