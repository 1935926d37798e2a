"""The cost of a decision in calls of functions: it is the same on every machine."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def calls_counted() -> Iterator[list[int]]:
    """The calls of functions meanwhile, those of Python and of C."""
    calls = [0]

    def note(_frame: object, event: str, _about: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
