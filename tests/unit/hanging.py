"""A disk that hangs, as a home folder on a network may."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.machine import cache_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import pytest


@dataclass
class Hung:
    """The number of calls that hang."""

    count: int = 0


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Iterator[Hung]:
    """In the body, calls of the function `name` of `module` hang, and nobody waits long for the cache."""
    goes_on, hung, here = threading.Event(), Hung(), threading.get_ident()

    def hang(*_: object) -> None:
        assert threading.get_ident() != here, "it would hang the event loop"
        hung.count += 1
        goes_on.wait()
        hung.count -= 1

    with monkeypatch.context() as patch:
        patch.setattr(module, name, hang)
        patch.setattr(cache_disk, "DISK_S", 0.1)
        try:
            yield hung
        finally:
            goes_on.set()


async def gone_on() -> None:
    """Wait for the thread that has hung to end."""
    async with cache_disk._disk().in_turn:
        return
