"""Decides which session each row of a batch continues, when rows continue one another's sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def sessions_of_rows(sources: Sequence[int]) -> list[int]:
    """For each row the session that is to be its own, if row `i` goes on from what row `sources[i]` was.

    The first row that goes on from a session gets that session; further ones get those from which nobody goes on, to be
    made copies. So what is copied is never what is overwritten, and a mere permutation copies nothing.
    """
    unused = (session for session in range(len(sources)) if session not in set(sources))
    return [source if source not in sources[:row] else next(unused) for row, source in enumerate(sources)]


def first_alike(rows: Sequence[Sequence[int]]) -> list[int]:
    """For each row the first one that is equal to it."""
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(row), index) for index, row in enumerate(rows)]
