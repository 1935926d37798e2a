"""Decides which session each row of a batch continues, when rows continue one another's sessions."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def sessions_of_rows(sources: Sequence[int], kinds: Sequence[object] | None = None) -> list[int]:
    """For each row the session that is to be its own, if row `i` goes on from what row `sources[i]` was.

    The first row that goes on from a session gets that session; further ones get those from which nobody goes on, to be
    made copies. So what is copied is never what is overwritten, and a mere permutation copies nothing. `kinds` are
    those of the sessions that there are: none is made a copy of one of another kind. Sessions to be opened are
    counted from there. Without `kinds` there is one session for each row, and all are alike.
    """
    kinds = [None] * len(sources) if kinds is None else kinds
    unused = [session for session in range(len(kinds)) if session not in set(sources)]
    opened = count(len(kinds))
    found: list[int] = []
    for source in sources:
        own = source
        if source in found:
            own = next((each for each in unused if kinds[each] == kinds[source]), -1)
            if own < 0:
                own = next(opened)
            else:
                unused.remove(own)
        found.append(own)
    return found


def first_alike(rows: Sequence[Sequence[int]]) -> list[int]:
    """For each row the first one that is equal to it."""
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(row), index) for index, row in enumerate(rows)]
