"""The life of a serving node, as a state machine: what it is, what may happen to it, and what it has to do then.

A node joins with a span, is online, and drains. After that it joins with another span, or leaves. Where memory allows
two workers, it goes to another span without a pause: it moves, and then settles. Nothing here knows a worker, a swarm
or a clock: `llmnode.node.serve.role` reports events and carries the actions out.
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
class Moving:
    """The node serves `span`, takes sessions, and loads the blocks of `then` beside it."""

    span: Span
    then: Span
    patience_s: float | None = None
    """The time that its sessions have to end; None is the policy's own."""
    in_haste: bool = False
    """If there is no memory for both, sessions have no time to end."""


@dataclass(frozen=True, slots=True)
class Settling:
    """The node serves `span`, takes sessions, and goes on with those of its former span, at most until `until_s`."""

    span: Span
    until_s: float


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


State = Joining | Online | Moving | Settling | Draining | Left
TAKES_SESSIONS = (Online, Moving, Settling)
"""The states in which a node is announced as online."""


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
    """The node is to serve `span`. Its sessions have `patience_s` to end; None is the policy's own patience.

    If it is `in_haste`, they have no time to end where that would put off the load.
    """

    span: Span
    patience_s: float | None = None
    in_haste: bool = False


@dataclass(frozen=True, slots=True)
class JoinsAt:
    """The node is to load the blocks of `span`, and not those that it is loading."""

    span: Span


@dataclass(frozen=True, slots=True)
class NoSpace:
    """There is no memory for two workers."""


@dataclass(frozen=True, slots=True)
class SpanUnwanted:
    """The node is to stay with the span that it serves."""


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """The node is to leave. Its sessions have `patience_s` to end."""

    patience_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """The time for sessions is over, or all but `sessions` of them have ended. If it settles: of the former span."""

    sessions: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """The program that runs the node ends it now."""


Event = Ready | Lost | GaveUp | SpanWanted | JoinsAt | NoSpace | SpanUnwanted | LeaveWanted | Drained | Stopped


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the swarm what the node is now."""


@dataclass(frozen=True, slots=True)
class Load:
    """Make a worker for `span`. The answer is `Ready`, `Lost` or `GaveUp`."""

    span: Span


@dataclass(frozen=True, slots=True)
class LoadBeside:
    """Make a second worker for `span`, while the first one serves. The answer is `Ready`, `GaveUp` or `NoSpace`."""

    span: Span


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """The second worker is of no use any more, whether it is loaded or not."""


@dataclass(frozen=True, slots=True)
class TakeSessions:
    """Open new sessions with the worker that was loaded, and with no other."""


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
class LeaveFormer:
    """Wait until no session of the former worker is left, at most until `until_s`. Then end that worker, and give back
    the memory that it alone held. The answer is `Drained`.
    """

    until_s: float


@dataclass(frozen=True, slots=True)
class DropWorker:
    """End the worker, and give back all memory that it held."""


@dataclass(frozen=True, slots=True)
class SayFarewell:
    """Tell the neighbours that the node has left."""


Action = (
    Announce
    | Load
    | LoadBeside
    | AbandonLoad
    | TakeSessions
    | RefuseSessions
    | EndSessions
    | AwaitSessions
    | LeaveFormer
    | DropWorker
    | SayFarewell
)


def join(span: Span) -> tuple[Joining, Sequence[Action]]:
    """How the life of a node begins."""
    return Joining(span), [Announce(), Load(span)]


def announced(state: State) -> PeerState:
    """The word that the swarm hears for it."""
    match state:
        case Joining():
            return PeerState.JOINING
        case Online() | Moving() | Settling():
            return PeerState.ONLINE
        case Draining():
            return PeerState.DRAINING
        case Left():
            return PeerState.LEFT


def moves_to(state: State) -> Span | None:
    """The span that the node is going to serve instead; None if it stays, or has it already."""
    return state.then if isinstance(state, (Moving, Draining)) else None


def transition(state: State, event: Event, now: float, policy: LifePolicy) -> tuple[State, Sequence[Action]]:
    """The state after `event`, and what to do, in order. Raises LocalProtocolError for an event that is impossible."""
    match state, event:
        case Left(), _:
            pass
        case Moving(span), Stopped() | LeaveWanted():
            state, actions = transition(Online(span), event, now, policy)
            return state, [AbandonLoad(), *actions]
        case _, Stopped():
            return Left(state.span), [RefuseSessions(), SayFarewell()]
        case Joining(span), Ready(loaded) if loaded == span:
            return Online(span), [TakeSessions(), Announce()]
        case Joining(span, former), JoinsAt(wanted):
            return (state, []) if wanted == span else _join_instead(wanted, former)
        case Joining(span), Lost():
            return state, [Load(span)]
        case Joining(span, former), GaveUp():
            return (Left(span), [SayFarewell()]) if former is None else _join_instead(former, None)
        case Online(span) | Settling(span), Lost():
            return Joining(span), [EndSessions(), Announce(), Load(span)]
        case Online(span), SpanWanted(wanted, patience_s, in_haste):
            moving = Moving(span, wanted, patience_s, in_haste)
            return (state, []) if wanted == span else (moving, [Announce(), LoadBeside(wanted)])
        case Joining(span) | Online(span) | Settling(span), LeaveWanted(patience_s):
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
        case Moving() | Settling(), _:
            return _on_the_way(state, event, now, policy)
    raise _impossible(state, event)


def _on_the_way(
    state: Moving | Settling, event: Event, now: float, policy: LifePolicy
) -> tuple[State, Sequence[Action]]:
    """From one span to another while sessions go on."""
    match state, event:
        case Moving(span), Lost():
            return Joining(span), [AbandonLoad(), EndSessions(), Announce(), Load(span)]
        case Moving(span, then, patience_s, in_haste), NoSpace():
            until_s = now + (0.0 if in_haste else policy.drain_s if patience_s is None else patience_s)
            return _drain(span, until_s, then)
        case Moving(span), GaveUp() | SpanUnwanted():
            return Online(span), [AbandonLoad(), Announce()]
        case Moving(_, then, patience_s), Ready(loaded) if loaded == then:
            until_s = now + (policy.settle_s if patience_s is None else patience_s)
            return Settling(then, until_s), [TakeSessions(), Announce(), LeaveFormer(until_s)]
        case Settling(span, until_s), Drained(sessions) if not sessions or now >= until_s:
            return Online(span), []
    raise _impossible(state, event)


def _impossible(state: State, event: Event) -> LocalProtocolError:
    return LocalProtocolError(f"a node that is {state} cannot have {event}")


def _drain(span: Span, until_s: float, then: Span | None) -> tuple[Draining, Sequence[Action]]:
    return Draining(span, until_s, then), [RefuseSessions(), Announce(), AwaitSessions(until_s)]


def _join_instead(span: Span, former: Span | None) -> tuple[Joining, Sequence[Action]]:
    """With another span than that of the worker that is there, or is being loaded."""
    return Joining(span, former), [EndSessions(), Announce(), DropWorker(), Load(span)]
