"""What the allocator keeps of memory that nobody uses any more."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def give_back() -> None:
    """To the system: KV of sessions that have ended, and what forwards worked with. Does nothing where libc cannot.

    glibc keeps most of it by itself, and more with each session: aligned blocks seldom fit where like ones have been.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], object]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(libc, "malloc_trim", None) or (lambda _keep_bytes: 0)
