"""A forward that waits in the scheduler's queue, and what of it comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmnode.core.operations import Slice
from llmnode.core.span import Span

if TYPE_CHECKING:
    from llmnode.core.operations import Forward
    from llmnode.core.priority import Priority
    from llmnode.core.serving.client_counters import Client


class Lane(NamedTuple):
    """Forwards that are served in the order in which they came, except those that their sessions hold back."""

    client: Client
    priority: Priority
    is_decode: bool


@dataclass(slots=True, eq=False)
class Queued:
    """A forward that is not done yet: `given` of its positions are computed.

    Another `chunk` of them have been through `passed` of the blocks of its session's `span`.
    """

    ticket: int
    operation: Forward
    lane: Lane
    span: Span
    given: int = 0
    chunk: int = 0
    passed: int = 0

    @property
    def left(self) -> int:
        """Positions that have not begun."""
        return self.operation.length - self.given - self.chunk

    @property
    def ahead(self) -> Span:
        """The blocks that its next positions go through."""
        return Span(self.span.start + self.passed, self.span.end)

    def slice(self, length: int, end: int | None = None) -> Slice:
        """Its next `length` positions, through the blocks up to `end`, or through all that are left."""
        forward = self.operation
        until = None if end is None or end == len(self.span) else end
        if length == forward.length and not self.passed:
            return Slice(forward.session, forward.start, length, forward.hidden, 0, until)
        hidden = b"" if self.passed else forward.rows(self.given, length)
        return Slice(forward.session, forward.start + self.given, length, hidden, self.passed, until)
