"""Takes items from several lists in turn."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")


def alternating(lists: Iterable[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on. None is no item."""
    return [each for turn in zip_longest(*lists) for each in turn if each is not None]
