"""An adapter as a server announces it: one that it holds for its blocks.

The digest is that of all of its numbers, so two adapters of one digest are the same. That a server holds it is the
server's word: a client without the adapter cannot check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.ids import AdapterId

MOST_ADAPTERS = 8
"""A server announces at most this many. An announcement has 4 KiB, and each adapter takes about 100 bytes."""
MOST_RANK = 256
"""A higher rank costs a small model's layer as much as its own weights."""
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


@dataclass(frozen=True, slots=True)
class AnnouncedAdapter:
    """An adapter as its server names it. `rank` is the largest of its layers. `name` matches `NAME_PATTERN`."""

    name: str
    digest: AdapterId
    rank: int
