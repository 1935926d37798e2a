"""The scheduler computes everything, once, in order; decodes first; nobody starves; clients get equal shares."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Fork, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.scheduling import Batch, Scheduler
from llmnode.core.span import Span

POLICY = BatchPolicy()
PREFILL = 512
START = 7
FORWARD_S, POSITION_S = 0.050, 0.003


def name(session: int) -> SessionId:
    return SessionId(session.to_bytes(16, "big"))


def client(number: int) -> PeerId:
    return PeerId(f"client {number}")


def seconds(batch: Batch, lengths: dict[int, int], spans: dict[int, Span], blocks: int) -> float:
    """The time that a forward takes here, by the span of each ticket's session; the longest has `blocks`."""
    decodes = [ticket for ticket in batch.slices if lengths[ticket] <= POLICY.decode_positions]
    passed = [(part.length, len(part.blocks(spans[ticket]))) for ticket, part in batch.slices.items()]
    share = max((each for _, each in passed), default=blocks) / blocks
    through = sum(length * each for length, each in passed) / blocks
    return share * FORWARD_S + FORWARD_S / 10 * max(0, len(decodes) - 1) + POSITION_S * (through - len(decodes))


@dataclass
class Shop:
    """A scheduler, and what has come of all that it was asked for."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(POLICY))
    blocks: int = 1
    now_s: float = 0.0
    owners: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    through: dict[int, Span] = field(default_factory=dict)
    half_way: dict[int, tuple[int, int]] = field(default_factory=dict)
    """How many positions have been through how many blocks."""
    ended: list[int] = field(default_factory=list)

    def open(self, session: int, of: int, priority: Priority = Priority.INTERACTIVE, span: Span | None = None) -> None:
        self.spans[session] = span or Span(0, self.blocks)
        self.scheduler.admit(Open(name(session), self.spans[session], 0, client(of), priority))
        self.owners[session] = of

    def ask(self, session: int, length: int, at_s: float | None = None) -> int:
        forward = Forward(name(session), START, length, bytes(each % 256 for each in range(length)))
        ticket = self.scheduler.add(forward, self.now_s if at_s is None else at_s)
        self.through[ticket] = self.spans[session]
        self.lengths[ticket] = length
        self.computed[ticket] = 0
        return ticket

    def control(self, session: int, *others: int) -> int:
        (source,) = others or (None,)
        truncate = Truncate(name(session), 0)
        operation = truncate if source is None else Fork(name(session), name(source), 0, 0)
        return self.scheduler.add(operation, self.now_s)

    def run(self) -> Batch:
        """The next batch, at once."""
        batch = self.scheduler.take(self.now_s)
        took_s = seconds(batch, self.lengths, self.through, self.blocks)
        self.now_s += took_s
        self.scheduler.done(batch, took_s, self.now_s)
        for ticket in batch.operations:
            self._end(ticket)
        for ticket, part in batch.slices.items():
            start = self.computed[ticket]
            assert part.start == START + start
            assert (part.length, part.first) == self.half_way.pop(ticket, (part.length, 0))
            assert bytes(part.hidden) == (b"" if part.first else bytes((start + i) % 256 for i in range(part.length)))
            if part.end is not None:
                assert 0 <= part.first < part.end < len(self.through[ticket])
                self.half_way[ticket] = (part.length, part.end)
                continue
            assert 0 <= part.first < len(self.through[ticket])
            self.computed[ticket] += part.length
            if self.computed[ticket] == self.lengths[ticket]:
                self._end(ticket)
        return batch

    def finish(self, ticket: int) -> None:
        while ticket not in self.ended:
            self.run()

    def _end(self, ticket: int) -> None:
        self.ended.append(ticket)
        self.scheduler.remove(ticket)


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


def test_a_prefill_hardly_slows_who_reads_along_and_has_the_forward_to_itself_if_nobody_does() -> None:
    shop = Shop()
    shop.open(0, 0)
    shop.open(1, 1)
    for length in (1, 1, 64):  # so it is known what they take
        shop.finish(shop.ask(length > 1, length))
    prefill = shop.ask(1, PREFILL)
    while prefill not in shop.ended:
        decode, asked_s = shop.ask(0, 1), shop.now_s
        shop.run()
        assert decode in shop.ended
        assert shop.now_s - asked_s <= POLICY.stretch * FORWARD_S
    shop.now_s += 2 * POLICY.decoding_s
    shop.ask(1, PREFILL)
    (part,) = shop.run().slices.values()
    assert 0.9 * POLICY.prefill_s <= part.length * POSITION_S <= POLICY.prefill_s


def shop_of(blocks: int, sessions: int) -> Shop:
    """Where it is known how long forwards take; each session is of a client of its own."""
    shop = Shop(blocks=blocks)
    for session in range(sessions):
        shop.open(session, session)
    for length in (1, 1, 64):
        shop.finish(shop.ask(length > 1, length))
    return shop


@pytest.mark.parametrize("blocks", [8, 30])
def test_beside_decodes_a_prefill_goes_through_a_few_blocks_at_a_time_in_chunks_as_large_as_fit(blocks: int) -> None:
    shop = shop_of(blocks, 2)
    prefill, chunks, began_s = shop.ask(1, PREFILL), [], shop.now_s
    while prefill not in shop.ended:
        decode, asked_s = shop.ask(0, 1), shop.now_s
        while decode not in shop.ended:
            chunks += [
                part.length for ticket, part in shop.run().slices.items() if ticket == prefill and part.end is None
            ]
        assert shop.now_s - asked_s <= (POLICY.stretch + 0.2) * FORWARD_S
    fitting = (POLICY.stretch - 1) * FORWARD_S / POSITION_S * blocks
    assert min(chunks[:-1], default=PREFILL) >= 0.7 * min(PREFILL, fitting)
    share = (POLICY.stretch - 1) / POLICY.stretch
    assert PREFILL * POSITION_S / (shop.now_s - began_s) > 0.75 * share, "what decodes leave is used"


def test_where_half_the_time_of_decodes_is_next_to_no_positions_through_one_block_they_go_through_all() -> None:
    shop = shop_of(2, 2)
    prefill = shop.ask(1, PREFILL)
    while prefill not in shop.ended:
        shop.ask(0, 1)
        assert all(part.is_whole for part in shop.run().slices.values())


def test_where_even_the_fewest_take_too_long_through_all_blocks_as_many_as_there_is_time_for_go_through_one() -> None:
    shop = Shop(Scheduler(BatchPolicy(stretch=1.1)), blocks=30)
    for session in range(2):
        shop.open(session, session)
    for length in (1, 1, 64):
        shop.finish(shop.ask(length > 1, length))
    prefill = shop.ask(1, PREFILL)
    while prefill not in shop.ended:
        shop.ask(0, 1)
        began_s, batch = shop.now_s, shop.run()
        assert shop.now_s - began_s <= 1.2 * FORWARD_S
        assert all((part.end or 30) - part.first == 1 for ticket, part in batch.slices.items() if ticket == prefill)


def test_short_prompts_go_through_a_few_blocks_together_as_far_as_they_get_cheaper_by_that() -> None:
    shop = shop_of(30, 6)
    prompts = [shop.ask(session, 40) for session in range(2, 6)]
    batches = []
    while not set(prompts) <= set(shop.ended):
        shop.ask(0, 1)
        batches.append([ticket for ticket in shop.run().slices if ticket in prompts])
    assert prompts[:3] in batches
    assert max(map(len, batches)) * 40 <= POLICY.fast_prefill


def test_a_short_prompt_waits_for_no_long_ones_of_lower_rank() -> None:
    shop = shop_of(30, 3)
    for session in range(3, 7):
        shop.open(session, 3, Priority.TRAINING)
        shop.ask(session, PREFILL)
    shop.ask(0, 1)
    shop.run()
    prompt, asked_s = shop.ask(2, 20), shop.now_s
    while prompt not in shop.ended:
        shop.ask(0, 1)
        shop.run()
    assert shop.now_s - asked_s < 10 * FORWARD_S


def test_clients_with_short_prompts_have_their_share_beside_long_ones() -> None:
    shop = shop_of(30, 2)
    long_ones = {}
    for session in range(2, 5):
        shop.open(session, session)
        long_ones[shop.ask(session, PREFILL)] = session
    shop.open(5, 5)
    took_s = []
    for _ in range(20):
        turn, asked_s = shop.ask(5, 30), shop.now_s
        while turn not in shop.ended:
            shop.ask(0, 1)
            for ticket in shop.run().slices:
                if ticket in shop.ended and ticket in long_ones:
                    session = long_ones.pop(ticket)
                    long_ones[shop.ask(session, PREFILL)] = session
        took_s.append(shop.now_s - asked_s)
        shop.now_s += 0.2
    assert sorted(took_s)[10] < 1.5
    assert max(took_s) < 4.0


def test_more_who_decode_do_not_starve_prefills_and_no_forward_is_larger_than_the_most() -> None:
    """The time of a decode was seen with one alone; each further one takes a tenth of it here."""
    shop = shop_of(30, 30)
    for _ in range(3):
        prefills, asked_s = {shop.ask(session, PREFILL) for session in range(1, 13)}, shop.now_s
        while not prefills <= set(shop.ended):
            for session in range(13, 29):
                shop.ask(session, 1)
            parts = [part for ticket, part in shop.run().slices.items() if ticket in prefills]
            assert sum(part.length for part in parts) <= POLICY.most_prefill
        alone_s = 12 * PREFILL * POSITION_S
        assert shop.now_s - asked_s < 5 * alone_s


def test_sessions_whose_blocks_end_alike_go_through_the_same_ones_together() -> None:
    shop = shop_of(30, 2)
    shop.open(2, 2, span=Span(12, 30))
    prompts = [shop.ask(1, 60)]
    batches = []
    while not set(prompts) <= set(shop.ended):
        if shop.half_way.get(prompts[0], (0, 0))[1] >= 12 and len(prompts) == 1:
            prompts.append(shop.ask(2, 40))
        shop.ask(0, 1)
        batches.append([each for each in shop.run().slices.items() if each[0] in prompts])
    together = [each for each in batches if len(each) == 2]
    assert together
    for (one_ticket, one), (other_ticket, other) in together:
        assert one.blocks(shop.through[one_ticket]) == other.blocks(shop.through[other_ticket])


def test_a_forward_through_all_blocks_has_time_for_those_that_each_piece_goes_through() -> None:
    shop = shop_of(30, 20)
    for session in range(20, 40):
        shop.open(session, session, span=Span(3, 4))
    for _ in range(5):
        short, long_ones = [shop.ask(session, 20) for session in range(20, 40)], [shop.ask(s, 512) for s in range(1, 5)]
        while not {*short, *long_ones} <= set(shop.ended):
            shop.ask(0, 1)
            began_s = shop.now_s
            shop.run()
            assert shop.now_s - began_s < (POLICY.stretch + 0.5) * FORWARD_S


def test_nobody_is_waited_for_before_prefills_that_go_by_themselves() -> None:
    shop = shop_of(30, 3)
    for _ in range(5):
        for session in (0, 1):
            shop.ask(session, 1)
        shop.run()
        shop.now_s += 0.001
    shop.ask(2, PREFILL)
    assert shop.scheduler.waits_until_s(shop.now_s) is None
    assert next(iter(shop.run().slices.values())).end is not None


def test_decodes_are_alone_now_and_then_so_that_it_is_known_how_long_they_take() -> None:
    shop = shop_of(1, 40)
    prefill = shop.ask(1, 100 * PREFILL)
    alone = []
    for _ in range(100):
        for session in range(2, 40):
            shop.ask(session, 1)
        alone.append(prefill not in shop.run().slices)
    assert 4 <= sum(alone) <= 10


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


@dataclass(frozen=True)
class Served:
    """Decodes of clients that each send the next one `think_s` after the answer."""

    per_s: float
    slowest_s: float


def serve_decoders(thinks_s: list[float], policy: BatchPolicy, for_s: float = 8.0) -> Served:
    shop = Shop(Scheduler(policy))
    coming: list[tuple[float, int]] = []
    session_of: dict[int, int] = {}
    asked_s: dict[int, float] = {}
    took_s: list[float] = []
    for session, think_s in enumerate(thinks_s):
        shop.open(session, session)
        heapq.heappush(coming, (think_s, session))
    while shop.now_s < for_s:
        until_s = shop.scheduler.waits_until_s(shop.now_s)
        if not len(shop.scheduler) or (until_s is not None and coming and coming[0][0] <= until_s):
            shop.now_s = max(shop.now_s, coming[0][0])
        elif until_s is not None:
            shop.now_s = until_s
        while coming and coming[0][0] <= shop.now_s:
            at_s, session = heapq.heappop(coming)
            ticket = shop.ask(session, 1, at_s)
            session_of[ticket], asked_s[ticket] = session, at_s
        if len(shop.scheduler) and shop.scheduler.waits_until_s(shop.now_s) is None:
            for ticket in shop.run().slices:
                took_s.append(shop.now_s - asked_s[ticket])
                session = session_of[ticket]
                heapq.heappush(coming, (shop.now_s + thinks_s[session], session))
    return Served(len(took_s) / for_s, max(took_s[len(took_s) // 2 :]))


NO_WAIT = BatchPolicy(gather_share=0.0)


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_waiting_for_who_decodes_in_step_answers_more_and_sooner(clients: int) -> None:
    thinks_s = [0.002 + 0.001 * number for number in range(clients)]
    waits, does_not = serve_decoders(thinks_s, POLICY), serve_decoders(thinks_s, NO_WAIT)
    assert waits.per_s > 1.25 * does_not.per_s
    assert waits.slowest_s < 0.8 * does_not.slowest_s


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=8))
@example([0.0, 1.5 * POLICY.gather_share * FORWARD_S])  # it could be expected, and is never in time
@example([0.0] + 3 * [1.9 * POLICY.gather_share * FORWARD_S])
def test_waiting_never_costs_much(thinks_s: list[float]) -> None:
    """Some are in step by chance, and stay so though they were better off apart: the worst of 13,000 draws had 0.86."""
    waits, does_not = serve_decoders(thinks_s, POLICY), serve_decoders(thinks_s, NO_WAIT)
    assert waits.per_s > 0.85 * does_not.per_s


@given(st.integers(1, 8), st.floats(0.0, 0.2))
def test_waiting_costs_nothing_if_all_are_away_for_as_long(clients: int, think_s: float) -> None:
    waits, does_not = (
        serve_decoders([think_s] * clients, POLICY, 4.0),
        serve_decoders([think_s] * clients, NO_WAIT, 4.0),
    )
    assert waits.per_s >= 0.99 * does_not.per_s


def test_a_client_alone_never_waits() -> None:
    shop = Shop()
    shop.open(0, 0)
    for length in (PREFILL, 1, 1, 1, 8, PREFILL, 1, 1):
        ticket = shop.ask(0, length)
        while ticket not in shop.ended:
            assert shop.scheduler.waits_until_s(shop.now_s) is None
            shop.run()
        shop.now_s += 0.001


def test_who_has_gone_is_waited_for_once_and_shortly() -> None:
    shop = Shop()
    for session in range(2):
        shop.open(session, session)
    for _ in range(5):
        both = [shop.ask(session, 1) for session in range(2)]
        shop.run()
        assert set(both) <= set(shop.ended)
        shop.now_s += 0.001
    shop.ask(0, 1)
    until_s = shop.scheduler.waits_until_s(shop.now_s)
    assert until_s is not None
    assert 0 < until_s - shop.now_s <= POLICY.gather_share * 1.2 * FORWARD_S
    shop.now_s = until_s
    for _ in range(5):
        assert shop.scheduler.waits_until_s(shop.now_s) is None
        shop.run()
        shop.now_s += 0.001
        shop.ask(0, 1)


def test_a_session_that_is_dismissed_is_not_waited_for() -> None:
    shop = Shop()
    for session in range(2):
        shop.open(session, session)
    for _ in range(5):
        for session in range(2):
            shop.ask(session, 1)
        shop.run()
        shop.now_s += 0.001
    shop.scheduler.dismiss(name(1))
    shop.ask(0, 1)
    assert shop.scheduler.waits_until_s(shop.now_s) is None
