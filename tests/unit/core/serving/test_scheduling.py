"""The scheduler computes everything, once, in order; decodes first; nobody starves; clients get equal shares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import SessionId
from llmnode.core.operations import Forward, Open
from llmnode.core.priority import Priority
from llmnode.core.serving.scheduling import Batch, Scheduler
from llmnode.core.span import Span
from unit.scheduled import POLICY, POSITION_S, PREFILL, Shop, shop_of

SESSIONS = 6
ASKED = st.one_of(
    st.tuples(st.just("forward"), st.integers(0, SESSIONS - 1), st.sampled_from([1, 1, 8, 9, 100, 512])),
    st.tuples(st.just("control"), st.integers(0, SESSIONS - 1), st.integers(0, SESSIONS - 1)),
    st.tuples(st.just("run"), st.just(0), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 99), st.just(0)),
)


@given(
    script=st.lists(ASKED, max_size=60),
    priorities=st.lists(st.sampled_from(Priority), min_size=6, max_size=6),
    blocks=st.sampled_from([1, 2, 7, 30]),
    measured=st.booleans(),
)
def test_everything_is_done_once_and_in_the_order_of_its_sessions(
    script: list[tuple[str, int, int]], priorities: list[Priority], blocks: int, measured: bool
) -> None:
    shop = Shop(blocks=blocks)
    of_session: dict[int, list[int]] = {session: [] for session in range(SESSIONS)}
    for session in range(SESSIONS):
        ends = Span(blocks - 1, blocks), Span(blocks // 2, blocks), Span(0, max(1, blocks // 2)), Span(0, 1)
        shop.open(session, session // 2, priorities[session], [*ends, None, None][session])
    for length in measured * [1, 64]:
        shop.finish(shop.ask(5, length))
    asked: list[int] = []
    for what, one, other in script:
        if what == "forward":
            asked.append(shop.ask(one, other))
            of_session[one].append(asked[-1])
        elif what == "control":
            asked.append(shop.control(*{one, other}))
            for session in {one, other}:
                of_session[session].append(asked[-1])
        elif what == "run":
            shop.run()
        elif left := [ticket for ticket in asked if ticket not in shop.ended]:
            shop.scheduler.remove(gone := left[one % len(left)])
            asked.remove(gone)
            for tickets in of_session.values():
                if gone in tickets:
                    tickets.remove(gone)
    while len(shop.scheduler):
        assert shop.run() != Batch({}, {}), "something is left, and nothing is done"
    assert sorted(shop.ended[2 * measured :]) == sorted(asked)
    for tickets in of_session.values():
        assert [ticket for ticket in shop.ended if ticket in tickets] == tickets
    assert shop.run() == Batch({}, {})


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 8, 9, 512])), max_size=200))
def test_whatever_decodes_are_ready_are_in_the_next_batch_as_far_as_it_goes(pieces: list[tuple[int, int]]) -> None:
    shop = Shop()
    for session, (of, length) in enumerate(pieces):
        shop.open(session, of)
        shop.ask(session, length)
    decodes = sum(length for _, length in pieces if length <= POLICY.decode_positions)
    batch = shop.run()
    in_batch = sum(
        part.length for ticket, part in batch.slices.items() if shop.lengths[ticket] <= POLICY.decode_positions
    )
    assert in_batch == min(decodes, POLICY.decodes)
    prefills = [ticket for ticket in batch.slices if shop.lengths[ticket] > POLICY.decode_positions]
    assert bool(prefills) == any(length > POLICY.decode_positions for _, length in pieces), "they are not held up"


@pytest.mark.parametrize("spans", [[Span(0, 8)], [Span(0, 4), Span(4, 8)], [Span(0, 2), Span(2, 5), Span(5, 8)]])
def test_decodes_through_different_blocks_are_timed_for_all_of_these_blocks(spans: list[Span]) -> None:
    scheduler = Scheduler(POLICY)
    for number, span in enumerate(spans):
        session = SessionId(bytes([number]) * 16)
        scheduler.admit(Open(session, span, 8))
        scheduler.add(Forward(session, 0, 1, b""), 0.0)
    batch = scheduler.take(0.0)
    assert len(batch.slices) == len(spans)
    scheduler.done(batch, 0.8, 1.0)
    assert scheduler.seen.decode_s == pytest.approx(0.1), "each of eight blocks has run once, with one decode"


def test_who_has_waited_long_has_its_turn_until_positions_are_computed() -> None:
    shop = shop_of(30, 2)
    shop.open(2, 2, Priority.TRAINING)
    patient = shop.ask(2, PREFILL)
    rival, until_s = shop.ask(1, 100 * PREFILL), shop.now_s + (Priority.TRAINING + 1) * POLICY.ageing_s + 4.0
    while not shop.computed[patient]:
        shop.ask(0, 1)
        shop.run()
        assert shop.now_s < until_s
    assert rival not in shop.ended


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([9, 40, 512])), min_size=1, max_size=40))
def test_nothing_of_low_priority_waits_for_ever(rivals: list[tuple[int, int]]) -> None:
    """However many sessions of others have the next piece ready when one is done, and new clients come all the time."""
    shop = Shop()
    shop.open(999, 999, Priority.TRAINING)
    lengths = {}
    for session, (of, length) in enumerate(rivals):
        shop.open(session, of)
        lengths[shop.ask(session, length)] = session
    shop.run()
    patient, asked_s, newcomer, given_since = shop.ask(999, PREFILL), shop.now_s, 1000, 0
    while not shop.computed[patient]:
        shop.open(newcomer, newcomer)
        lengths[shop.ask(newcomer, PREFILL)] = newcomer
        newcomer += 1
        batch = shop.run()
        if shop.now_s - asked_s > Priority.TRAINING * POLICY.ageing_s:
            given_since += sum(part.length for part in batch.slices.values())
        for ticket in batch.slices:
            if ticket in shop.ended and ticket != patient:
                session = lengths[ticket]
                lengths[shop.ask(session, shop.lengths[ticket])] = session
        assert given_since <= (len({of for of, _ in rivals}) + 2) * POLICY.most_prefill


def test_low_priority_waits_for_high_one_at_first() -> None:
    shop = Shop()
    for session, priority in enumerate((Priority.TRAINING, Priority.BATCH, Priority.INTERACTIVE)):
        shop.open(session, session, priority)
    training, batch, interactive = (shop.ask(session, 200) for session in range(3))
    shop.run()  # until it has seen how long positions take
    while interactive not in shop.ended:
        assert not shop.computed[training]
        assert not shop.computed[batch]
        shop.run()
    while batch not in shop.ended:
        assert not shop.computed[training]
        shop.run()


@given(
    st.lists(st.sampled_from([9, 40, 300, 512]), min_size=1, max_size=8),
    st.lists(st.sampled_from([9, 40, 300, 512]), min_size=1, max_size=8),
)
def test_clients_get_equal_shares_however_many_sessions_they_have_and_however_long_their_pieces_are(
    one: list[int], other: list[int]
) -> None:
    """As long as either wants all that there is."""
    shop = Shop()
    owner_of = {}
    wanted = [lengths * math.ceil(2 * POLICY.most_prefill / sum(lengths)) for lengths in (one, other)]
    both = [(0, length) for length in wanted[0]] + [(1, length) for length in wanted[1]]
    for session, (of, length) in enumerate(both):
        shop.open(session, of)
        owner_of[shop.ask(session, length)] = session
    shares = [0, 0]
    for _ in range(40):
        for ticket, part in shop.run().slices.items():
            session = owner_of[ticket]
            shares[shop.owners[session]] += part.length
            if ticket in shop.ended:
                owner_of[shop.ask(session, shop.lengths[ticket])] = session
        assert abs(shares[0] - shares[1]) <= POLICY.most_prefill


def test_who_comes_back_has_saved_up_nothing_and_who_was_alone_owes_nothing() -> None:
    shop = Shop()
    for session in range(3):
        shop.open(session, session)
    shop.finish(shop.ask(0, PREFILL))
    for _ in range(20):
        shop.finish(shop.ask(1, PREFILL))  # it is alone: nobody else wants anything
    long_served, newcomer, back = shop.ask(1, PREFILL), shop.ask(2, PREFILL), shop.ask(0, PREFILL)
    while len(shop.scheduler):
        shop.run()
        computed = [shop.computed[ticket] for ticket in (long_served, newcomer, back)]
        assert max(computed) - min(computed) <= POLICY.prefill_s / POSITION_S + 1
