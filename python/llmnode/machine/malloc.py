"""Memory of the system: taken as it is written, and given back when nobody uses it any more."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor whose pages are backed one by one as they are written, and given back when it ends.

    Never by huge pages, as the allocator's would be on a system that has them `always`: of a slab of KV each head has
    then 2 MiB as soon as one position is written.
    """
    if sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages knows no such advice
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def give_back() -> None:
    """Give the memory of past forwards and rounding back to the system. It does nothing where libc cannot.

    glibc keeps most of it by itself, and more with each session: aligned blocks seldom fit where equal ones were.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], object]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(libc, "malloc_trim", None) or (lambda _keep_bytes: 0)
