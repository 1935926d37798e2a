"""Memory that two processes see: one writes, the other reads when it is told to. It has no name to be left behind."""

from __future__ import annotations

import mmap
import os
import sys
from tempfile import TemporaryFile

LEAST_BYTES = 1 << 20
"""A few decodes of any model. Pages that nobody has touched cost nothing."""


class SharedMemory:
    """Behind an open file, whose descriptor a child process inherits. It grows and never shrinks."""

    def __init__(self, file: int) -> None:
        """Owns the descriptor."""
        self.file = file
        self._size = 0
        self._mapped = memoryview(bytearray())

    def grow(self, size: int) -> None:
        """Make it hold `size` bytes. Only one of the two processes does this, while the other does not look."""
        if size > self._size:
            self._size = max(size, 2 * self._size, LEAST_BYTES)
            os.ftruncate(self.file, self._size)

    def view(self, size: int) -> memoryview:
        """The first `size` bytes, which it has grown to. Views from before it grew stay valid."""
        if len(self._mapped) < size:
            self._mapped = memoryview(mmap.mmap(self.file, os.fstat(self.file).st_size))
        return self._mapped[:size]

    def close(self) -> None:
        """The memory stays mapped until the last view of it is gone."""
        self._mapped = memoryview(bytearray())
        os.close(self.file)
        self.file = -1


def make_shared_memory() -> SharedMemory:
    if sys.platform == "linux":
        return SharedMemory(os.memfd_create("llmnode"))
    else:
        with TemporaryFile() as file:  # has no name, or loses it at once
            return SharedMemory(os.dup(file.fileno()))
