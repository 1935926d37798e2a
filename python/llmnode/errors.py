"""Every error that a caller of llmnode can meet, and the side that is to blame.

`ConfigError`: the user can fix it. `LocalProtocolError`: a bug of ours, let it crash. `SwarmError`: the swarm as a
whole cannot do it now. `PeerError`: one peer failed, and is the only kind worth retrying elsewhere.

Those that the core raises are defined there (`core/errors.py`, `core/route.py`), since the core is below this file.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from llmnode.core.errors import ConfigError, LlmnodeError, LocalProtocolError, SwarmError
from llmnode.core.route import NoRoute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span

__all__ = [
    "AdapterError",
    "ConfigError",
    "EmbeddedModelMissing",
    "IntegrityError",
    "LlmnodeError",
    "LocalProtocolError",
    "ModelError",
    "NoRoute",
    "NumericOverflow",
    "PeerError",
    "PeerFull",
    "PeerRefused",
    "PeerTimeout",
    "PeerUnreachable",
    "RemoteProtocolError",
    "SessionClosed",
    "SessionLost",
    "SwarmError",
    "WorkerLost",
    "single_error",
]


class ModelError(LlmnodeError):
    """A model cannot be loaded or is not of a supported kind."""


class AdapterError(LlmnodeError):
    """An adapter is damaged, or does not fit the model that it is for."""


class EmbeddedModelMissing(ConfigError):
    """The package of the embedded model is not installed, or damaged. A model that is named needs none."""


class NumericOverflow(ConfigError):
    """The numbers that this client gives to blocks are too large to compute with, or not finite: its hidden states, its
    adapter or its prompts, as after a training that has diverged. No server is at fault.
    """


class WorkerLost(LlmnodeError):
    """The process that held the blocks has ended, and with it the KV of all sessions. Another may be started."""


class SessionLost(SwarmError):
    """A session cannot go on; `causes` are the failures of its peers, oldest first.

    The text has each cause once, with the number of times, and of many only the last `NAMED_CAUSES`.
    """

    NAMED_CAUSES = 4

    def __init__(self, causes: Sequence[PeerError]) -> None:
        self.causes = tuple(causes)
        times = Counter(str(cause) for cause in self.causes)
        named = list(times)[-self.NAMED_CAUSES :]
        texts = [f"{text} ({times[text]} times)" if times[text] > 1 else text for text in named]
        unnamed = len(times) - len(named)
        failures = "failure" if unnamed == 1 else "failures"
        before = f"after {unnamed} other {failures}, " if unnamed else ""
        super().__init__(f"session lost: {before}{'; '.join(texts)}")


class SessionClosed(SwarmError):
    """The session was closed before this call."""


class PeerError(LlmnodeError):
    """A peer failed. `peer` and `span` name the culprit as far as it is known where the error is raised."""

    def __init__(self, message: str, *, peer: PeerId | None = None, span: Span | None = None) -> None:
        self.message = message
        self.peer = peer
        self.span = span
        self.waited_s = 0.0
        """The time that we have waited for the peer, up to this failure: see `core/peers/bans.py`."""
        super().__init__(message)

    def after(self, waited_s: float) -> Self:
        """Say that we have waited for the peer for `waited_s` seconds. Returns the error itself."""
        self.waited_s = max(self.waited_s, waited_s)
        return self

    def blame(self, peer: PeerId, span: Span | None = None) -> Self:
        """Name the culprit, a `peer` and its `span`, unless it is known already. Returns the error itself.

        It is for errors that come from code which knows only bytes.
        """
        self.peer = self.peer or peer
        self.span = self.span or span
        return self

    def again(self) -> Self:
        """A fresh copy, so that no error object collects the tracebacks of all that wait for one event.

        It has no `waited_s`: each of them says how long it has waited itself.
        """
        return type(self)(self.message, peer=self.peer, span=self.span)

    def __str__(self) -> str:
        culprit = f"peer {self.peer}" if self.peer else "a peer"
        blocks = f" (blocks [{self.span.start}, {self.span.end}))" if self.span else ""
        return f"{culprit}{blocks}: {self.message}"


class PeerUnreachable(PeerError):
    """The peer cannot be dialled, or its connection ended."""


class PeerFull(PeerUnreachable):
    """The peer has ended our link since others need its place or its memory. It is busy: that is no fault."""


class PeerTimeout(PeerError):
    """The peer did not answer before the deadline."""


class PeerRefused(PeerError):
    """The peer said no: busy, no KV free, another model. It is a fault only if the refusal `breaks_promise`, and counts
    for the choice of peers if it `evicts` a session.

    `code` is one of `llmnode.wire.messages.RefusalCode`; `retry_after_s` is the peer's own estimate, if it gave one.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        peer: PeerId | None = None,
        span: Span | None = None,
    ) -> None:
        self.code = code
        self.reason = message
        self.retry_after_s = retry_after_s
        self.breaks_promise = False
        """The peer had accepted the session before. It is banned for a while."""
        self.evicts = False
        """The peer had accepted the session, and has freed its KV. It may have had to."""
        super().__init__(f"refused ({code}): {message}", peer=peer, span=span)


class RemoteProtocolError(PeerError):
    """The peer sent something that the protocol forbids."""


class IntegrityError(PeerError):
    """The received bytes differ from the sent ones, or from the signed ones.

    `suspects` are all peers that may have done it, if that is not certain.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: PeerId | None = None,
        span: Span | None = None,
        suspects: Sequence[PeerId] = (),
    ) -> None:
        self.suspects = tuple(suspects)
        super().__init__(message, peer=peer, span=span)


@contextmanager
def single_error() -> Iterator[None]:
    """Around nurseries at a public edge: raise the one error that matters, not trio's group of them.

    An error that is no peer's or user's fault (a bug, Ctrl-C) comes first; several of those stay a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        ours = [error for error in leaves if _is_bug(error)]
        if len(ours) > 1:
            raise
        error = (ours or leaves)[0]
        raise error from error.__cause__


def _is_bug(error: BaseException) -> bool:
    return isinstance(error, LocalProtocolError) or not isinstance(error, LlmnodeError)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
