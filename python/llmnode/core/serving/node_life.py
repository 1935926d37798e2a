"""The life of a serving node, as a state machine: what it is, what may happen to it, and what it has to do then.

A node joins with a span, is online, and drains. After that it joins with another span, or leaves. Nothing here knows a
worker, a swarm or a clock: `llmnode.node.serve.role` reports events and carries the actions out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.policy import LifePolicy
    from llmnode.core.span import Span


@dataclass(frozen=True, slots=True)
class Joining:
    """The node loads the blocks of `span`, and takes no sessions."""

    span: Span
    former: Span | None = None
    """The span that the node served before. It serves that one again if `span` cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Online:
    """The node has the blocks of `span` loaded, and takes sessions."""

    span: Span


@dataclass(frozen=True, slots=True)
class Draining:
    """The node takes no new sessions, and waits for those that it has, at most until `until_s`."""

    span: Span
    until_s: float
    then: Span | None = None
    """The span that it joins with afterwards. With None it leaves."""


@dataclass(frozen=True, slots=True)
class Left:
    """The node has left the swarm. Nothing happens to it any more."""

    span: Span


State = Joining | Online | Draining | Left


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker for `span` is ready, at the first start or after a restart."""

    span: Span


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker has ended, and the KV of all sessions with it."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The blocks cannot be loaded: they do not fit, or the worker ended at every start."""


@dataclass(frozen=True, slots=True)
class SpanWanted:
    """The node is to serve `span`. Its sessions have `patience_s` to end; None is the policy's own patience."""

    span: Span
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """The node is to leave. Its sessions have `patience_s` to end."""

    patience_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """The time for sessions is over, or all but `sessions` of them have ended."""

    sessions: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """The program that runs the node ends it now."""


Event = Ready | Lost | GaveUp | SpanWanted | LeaveWanted | Drained | Stopped


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the swarm what the node is now."""


@dataclass(frozen=True, slots=True)
class Load:
    """Make a worker for `span`. The answer is `Ready`, `Lost` or `GaveUp`."""

    span: Span


@dataclass(frozen=True, slots=True)
class TakeSessions:
    """Open new sessions with the worker that was loaded."""


@dataclass(frozen=True, slots=True)
class RefuseSessions:
    """Open no new sessions. Those that are open go on."""


@dataclass(frozen=True, slots=True)
class EndSessions:
    """The worker is of no use to any session any more. Clients are told so at their next step, and move."""


@dataclass(frozen=True, slots=True)
class AwaitSessions:
    """Wait until no session is left, at most until `until_s`. The answer is `Drained`."""

    until_s: float


@dataclass(frozen=True, slots=True)
class DropWorker:
    """End the worker, and give back all memory that it held."""


@dataclass(frozen=True, slots=True)
class SayFarewell:
    """Tell the neighbours that the node has left."""


Action = Announce | Load | TakeSessions | RefuseSessions | EndSessions | AwaitSessions | DropWorker | SayFarewell


def join(span: Span) -> tuple[Joining, Sequence[Action]]:
    """How the life of a node begins."""
    return Joining(span), [Announce(), Load(span)]


def announced(state: State) -> PeerState:
    """The word that the swarm hears for it."""
    match state:
        case Joining():
            return PeerState.JOINING
        case Online():
            return PeerState.ONLINE
        case Draining():
            return PeerState.DRAINING
        case Left():
            return PeerState.LEFT


def transition(state: State, event: Event, now: float, policy: LifePolicy) -> tuple[State, Sequence[Action]]:
    """The state after `event`, and what to do, in order. Raises LocalProtocolError for an event that is impossible."""
    match state, event:
        case Joining() | Online() | Draining(), Stopped():
            return Left(state.span), [RefuseSessions(), SayFarewell()]
        case Joining(span), Ready(loaded) if loaded == span:
            return Online(span), [TakeSessions(), Announce()]
        case Joining(span), Lost():
            return state, [Load(span)]
        case Joining(span, former), GaveUp():
            return (Left(span), [SayFarewell()]) if former is None else _join_instead(former, None)
        case Online(span), Lost():
            return Joining(span), [EndSessions(), Announce(), Load(span)]
        case Online(span), SpanWanted(wanted, patience_s):
            until_s = now + (policy.drain_s if patience_s is None else patience_s)
            return (state, []) if wanted == span else _drain(span, until_s, wanted)
        case Joining(span) | Online(span), LeaveWanted(patience_s):
            return _drain(span, now + patience_s, None)
        case Draining(span, until_s, then), LeaveWanted(patience_s):
            asked_s = now + patience_s
            return _drain(span, asked_s if then is not None else min(until_s, asked_s), None)
        case Draining(), Lost():
            return state, [EndSessions()]
        case Draining(then=None), Ready() | GaveUp():
            return state, []  # the load had begun before the node was told to leave
        case Draining(span, until_s, then), Drained(sessions) if not sessions or now >= until_s:
            return (Left(span), [SayFarewell()]) if then is None else _join_instead(then, span)
    raise LocalProtocolError(f"a node that is {state} cannot have {event}")


def _drain(span: Span, until_s: float, then: Span | None) -> tuple[Draining, Sequence[Action]]:
    return Draining(span, until_s, then), [RefuseSessions(), Announce(), AwaitSessions(until_s)]


def _join_instead(span: Span, former: Span | None) -> tuple[Joining, Sequence[Action]]:
    """With another span than that of the worker that is there."""
    return Joining(span, former), [EndSessions(), Announce(), DropWorker(), Load(span)]
