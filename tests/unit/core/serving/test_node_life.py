"""The life of a serving node: laws that hold whatever happens to it, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import PeerState
from llmnode.core.policy import LifePolicy
from llmnode.core.serving.node_life import (
    TAKES_SESSIONS,
    AbandonLoad,
    Announce,
    AwaitSessions,
    Drained,
    Draining,
    DropWorker,
    EndSessions,
    GaveUp,
    Joining,
    JoinsAt,
    LeaveFormer,
    LeaveWanted,
    Left,
    Load,
    LoadBeside,
    Lost,
    Moving,
    NoSpace,
    Online,
    Ready,
    RefuseSessions,
    SayFarewell,
    Settling,
    SpanUnwanted,
    SpanWanted,
    Stopped,
    TakeSessions,
    announced,
    join,
    moves_to,
    transition,
)
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.serving.node_life import Action, Event, State

POLICY = LifePolicy(drain_s=10.0, settle_s=20.0)
FIRST, SECOND, THIRD = Span(0, 2), Span(2, 4), Span(4, 6)
SPANS = st.sampled_from([FIRST, SECOND, THIRD])
PATIENCE_S = st.floats(0, 100)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Ready, SPANS),
    st.just(Lost()),
    st.just(GaveUp()),
    st.builds(SpanWanted, SPANS, st.none() | PATIENCE_S, st.booleans()),
    st.builds(JoinsAt, SPANS),
    st.just(NoSpace()),
    st.just(SpanUnwanted()),
    st.builds(LeaveWanted, PATIENCE_S),
    st.builds(Drained, st.integers(0, 2)),
    st.just(Stopped()),
)
HAPPENINGS = st.lists(st.tuples(EVENTS, st.floats(0, 20)), max_size=30)
"""Each event, and how long after the one before it comes."""


@dataclass
class Edge:
    """Does what it is told, as values, and checks what must hold at any time. `worker` is what is loaded, and `former`
    what was before, while it goes on.
    """

    state: State = field(init=False)
    now_s: float = 0.0
    worker: Span | None = None
    former: Span | None = None
    loading: Span | None = None
    beside: Span | None = None
    """It is loaded while `worker` serves."""
    takes: bool = False
    said: tuple[PeerState, Span, Span | None] | None = None
    farewells: int = 0

    def __post_init__(self) -> None:
        self.state, actions = join(FIRST)
        self.do(actions)

    def happen(self, event: Event) -> bool:
        """Whether it could. An event that cannot happen changes nothing."""
        if isinstance(event, Ready) and event.span not in (self.loading, self.beside):
            return False  # nobody loads anything but what was asked for
        if isinstance(event, GaveUp) and self.loading is None and self.beside is None:
            return False
        if isinstance(event, NoSpace) and self.beside is None:
            return False
        if isinstance(event, Lost) and self.worker is None and self.loading is None:
            return False
        try:
            after, actions = transition(self.state, event, self.now_s, POLICY)
        except LocalProtocolError:
            return False
        match event:
            case Ready(span) if self.loading is not None:
                self.worker, self.loading = span, None
            case Ready(span):
                self.former, self.worker, self.beside = self.worker, span, None
            case Lost():
                self.worker = self.loading = self.former = None
            case GaveUp() | NoSpace():
                self.loading = self.beside = None
            case Drained() if isinstance(self.state, Settling):
                self.former = None
        self.state = after
        self.do(actions)
        return True

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Announce():
                    self.said = announced(self.state), self.state.span, moves_to(self.state)
                case Load(span):
                    assert self.worker is self.former is self.beside is None, "there may be no memory for two"
                    assert self.loading is None
                    self.loading = span
                case LoadBeside(span):
                    assert self.worker is not None
                    assert self.former is None, "there are never three"
                    self.beside = span
                case AbandonLoad():
                    self.beside = None
                case LeaveFormer(until_s):
                    assert isinstance(self.state, Settling)
                    assert self.former is not None
                    assert until_s == self.state.until_s
                case TakeSessions():
                    assert self.worker is not None
                    self.takes = True
                case RefuseSessions() | EndSessions():
                    self.takes = False
                case DropWorker():
                    assert not self.takes
                    self.worker = self.former = self.loading = None
                case SayFarewell():
                    self.farewells += 1
                    self.said = PeerState.LEFT, self.state.span, None
                case AwaitSessions(until_s):
                    assert isinstance(self.state, Draining)
                    assert until_s == self.state.until_s

    def check(self) -> None:
        assert self.said == (announced(self.state), self.state.span, moves_to(self.state)), "it announces what it is"
        assert self.takes == isinstance(self.state, TAKES_SESSIONS)
        assert self.takes == (announced(self.state) is PeerState.ONLINE)
        assert self.farewells == isinstance(self.state, Left)
        assert (self.beside is not None) == isinstance(self.state, Moving), "nothing is loaded for nothing"
        if isinstance(self.state, TAKES_SESSIONS):
            assert self.worker == self.state.span, "never online without its span"
        if isinstance(self.state, Joining):
            assert self.loading == self.state.span, "it is never left waiting for nothing"


def lived(happenings: Sequence[tuple[Event, float]]) -> Edge:
    edge = Edge()
    for event, after_s in happenings:
        edge.now_s += after_s
        edge.happen(event)
        edge.check()
    return edge


@given(HAPPENINGS)
def test_it_announces_what_it_is_and_is_online_only_with_the_span_loaded_that_it_announces(
    happenings: list[tuple[Event, float]],
) -> None:
    lived(happenings)


@given(HAPPENINGS, PATIENCE_S)
def test_from_anywhere_it_leaves_when_told_to_and_stays_away(
    happenings: list[tuple[Event, float]], patience_s: float
) -> None:
    edge = lived(happenings)
    if not isinstance(edge.state, Left):
        assert edge.happen(LeaveWanted(patience_s))
        edge.check()
        assert isinstance(edge.state, Draining)
        assert edge.state.until_s <= edge.now_s + patience_s, "asked again, it does not wait for longer"
        assert edge.happen(Drained())
    assert isinstance(edge.state, Left)
    edge.check()
    for event in (Lost(), GaveUp(), SpanWanted(SECOND), LeaveWanted(0.0), Drained(), Stopped(), Ready(FIRST)):
        with pytest.raises(LocalProtocolError):
            transition(edge.state, event, edge.now_s, POLICY)


@given(HAPPENINGS)
def test_from_anywhere_it_can_be_stopped_at_once(happenings: list[tuple[Event, float]]) -> None:
    edge = lived(happenings)
    was_there = not isinstance(edge.state, Left)
    assert edge.happen(Stopped()) == was_there
    assert isinstance(edge.state, Left)
    edge.check()


@given(HAPPENINGS, SPANS, st.booleans())
def test_from_anywhere_but_where_it_leaves_it_comes_online_with_any_span(
    happenings: list[tuple[Event, float]], wanted: Span, holds_two: bool
) -> None:
    edge = lived(happenings)
    if isinstance(edge.state, Moving):
        assert edge.happen(SpanUnwanted())
    if isinstance(edge.state, (Draining, Settling)):
        assert edge.happen(Drained())
    if isinstance(edge.state, Left):
        return
    if isinstance(edge.state, Joining):
        assert edge.happen(Ready(edge.state.span))
    assert edge.happen(SpanWanted(wanted))
    if edge.state != Online(wanted) and not holds_two:
        assert edge.happen(NoSpace())
        assert edge.happen(Drained())
    if edge.state != Online(wanted):
        assert edge.happen(Ready(wanted))
    if isinstance(edge.state, Settling):
        assert edge.happen(Drained())
    edge.check()
    assert edge.state == Online(wanted)


@given(HAPPENINGS)
def test_it_takes_sessions_from_when_it_begins_to_move_beside_until_it_is_told_otherwise_or_loses_its_worker(
    happenings: list[tuple[Event, float]],
) -> None:
    edge = lived(happenings)
    if not isinstance(edge.state, Moving):
        return
    for event in (GaveUp(), SpanUnwanted(), Ready(edge.state.then)):
        state, actions = transition(edge.state, event, edge.now_s, POLICY)
        assert isinstance(state, TAKES_SESSIONS)
        assert not {RefuseSessions(), EndSessions(), DropWorker()} & {*actions}


@given(HAPPENINGS)
def test_a_drain_ends_in_joining_or_left_and_never_before_its_time_while_sessions_are_there(
    happenings: list[tuple[Event, float]],
) -> None:
    edge = lived(happenings)
    if not isinstance(edge.state, Draining):
        return
    then, until_s = edge.state.then, edge.state.until_s
    if edge.now_s < until_s:
        assert not edge.happen(Drained(sessions=1))
    edge.now_s = max(edge.now_s, until_s)
    assert edge.happen(Drained(sessions=1))
    edge.check()
    assert isinstance(edge.state, Left) if then is None else edge.state.span == then
    assert isinstance(edge.state, (Joining, Left))


def after(*events: Event) -> State:
    edge = Edge()
    for event in events:
        assert edge.happen(event), event
    return edge.state


def test_a_lost_worker_is_loaded_again_and_the_node_is_joining_meanwhile() -> None:
    assert after(Ready(FIRST), Lost()) == Joining(FIRST)
    assert after(Ready(FIRST), Lost(), Lost(), Ready(FIRST)) == Online(FIRST)


def test_a_node_that_loads_takes_other_blocks_instead_and_one_that_serves_does_not() -> None:
    state, actions = transition(Joining(FIRST), JoinsAt(SECOND), 0.0, POLICY)
    assert state == Joining(SECOND)
    assert [*actions][-2:] == [DropWorker(), Load(SECOND)]
    assert transition(Joining(FIRST), JoinsAt(FIRST), 0.0, POLICY) == (Joining(FIRST), []), "it goes on"
    assert after(JoinsAt(SECOND), Ready(SECOND)) == Online(SECOND)
    assert not Edge().happen(Ready(SECOND))
    with pytest.raises(LocalProtocolError):
        transition(Online(FIRST), JoinsAt(SECOND), 0.0, POLICY)


def test_another_span_has_the_policys_patience_unless_its_own_is_given() -> None:
    for second in (NoSpace(), Ready(SECOND)):
        drains = isinstance(second, NoSpace)
        for patience_s in (None, 3.0):
            state = after(Ready(FIRST), SpanWanted(SECOND, patience_s), second)
            until_s = patience_s or (POLICY.drain_s if drains else POLICY.settle_s)
            assert state == (Draining(FIRST, until_s, SECOND) if drains else Settling(SECOND, until_s))
    assert after(Ready(FIRST), SpanWanted(SECOND, in_haste=True), NoSpace()) == Draining(FIRST, 0.0, SECOND)
    assert after(Ready(FIRST), SpanWanted(FIRST)) == Online(FIRST), "it serves that already"


def test_a_span_that_cannot_be_loaded_gives_way_to_the_one_before_but_once() -> None:
    changing = (Ready(FIRST), SpanWanted(SECOND), NoSpace(), Drained(), GaveUp())
    assert after(*changing) == Joining(FIRST)
    assert after(*changing, Ready(FIRST)) == Online(FIRST)
    assert after(*changing, GaveUp()) == Left(FIRST)
    assert after(GaveUp()) == Left(FIRST), "the first of all has none before it"


def test_to_leave_overrides_another_span_and_may_be_hurried_but_not_put_off() -> None:
    changing = (Ready(FIRST), SpanWanted(SECOND, 50.0), NoSpace())
    assert after(*changing, LeaveWanted(60.0)) == Draining(FIRST, 60.0, None)
    assert after(*changing, LeaveWanted(60.0), LeaveWanted(5.0)) == Draining(FIRST, 5.0, None)
    assert after(*changing, LeaveWanted(5.0), LeaveWanted(60.0)) == Draining(FIRST, 5.0, None)


def test_whatever_becomes_of_the_second_span_the_first_one_is_served_or_loaded_again() -> None:
    moving = (Ready(FIRST), SpanWanted(SECOND, 50.0))
    for event in (GaveUp(), SpanUnwanted()):
        assert after(*moving, event) == Online(FIRST)
    assert after(*moving, Lost()) == Joining(FIRST)
    assert after(*moving, LeaveWanted(5.0)) == Draining(FIRST, 5.0, None)
    assert after(*moving, Stopped()) == Left(FIRST)


def test_with_two_workers_both_are_lost_and_the_second_is_loaded_again() -> None:
    settling = (Ready(FIRST), SpanWanted(SECOND, 50.0), Ready(SECOND))
    assert after(*settling, Lost()) == Joining(SECOND)
    assert after(*settling, Drained()) == Online(SECOND)
    assert after(*settling, LeaveWanted(5.0)) == Draining(SECOND, 5.0, None)


def test_what_was_being_loaded_when_it_was_told_to_leave_is_not_served() -> None:
    for outcome in (Ready(FIRST), Lost(), GaveUp()):
        assert after(LeaveWanted(5.0), outcome) == Draining(FIRST, 5.0, None)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (Joining(FIRST), Ready(SECOND)),
        (Joining(FIRST), SpanWanted(SECOND)),
        (Joining(FIRST), Drained()),
        (Online(FIRST), Ready(FIRST)),
        (Online(FIRST), GaveUp()),
        (Online(FIRST), Drained()),
        (Online(FIRST), NoSpace()),
        (Online(FIRST), SpanUnwanted()),
        (Moving(FIRST, SECOND), Ready(FIRST)),
        (Moving(FIRST, SECOND), SpanWanted(THIRD)),
        (Moving(FIRST, SECOND), Drained()),
        (Settling(SECOND, 5.0), Ready(FIRST)),
        (Settling(SECOND, 5.0), SpanWanted(THIRD)),
        (Settling(SECOND, 5.0), Drained(sessions=1)),
        (Draining(FIRST, 5.0, SECOND), Ready(SECOND)),
        (Draining(FIRST, 5.0, SECOND), SpanWanted(THIRD)),
        (Draining(FIRST, 5.0), Drained(sessions=1)),
    ],
    ids=str,
)
def test_what_cannot_happen_is_a_bug(state: State, event: Event) -> None:
    with pytest.raises(LocalProtocolError, match="cannot have"):
        transition(state, event, 4.0, POLICY)
