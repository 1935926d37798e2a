"""Prefills beside decodes: which chunks go through which blocks, and what that costs those that decode."""

from __future__ import annotations

import pytest

from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.scheduling import Scheduler
from llmnode.core.span import Span
from unit.scheduled import FORWARD_S, POLICY, POSITION_S, PREFILL, Shop, shop_of


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


@pytest.mark.parametrize("length", [32, 65, 128])
def test_rows_of_a_batch_are_whole_in_their_forwards_and_leave_one_after_the_other(length: int) -> None:
    shop, rows = Shop(), 16
    for session in range(rows):
        shop.open(session, 0)
    shop.finish(shop.ask(0, 64))  # so it is known what they take
    asked = [shop.ask(session, length) for session in range(rows)]
    while shop.ended[-1] != asked[-1]:
        slices = shop.run().slices.values()
        assert all(part.length == length for part in slices)
        assert length * len(slices) >= POLICY.fast_prefill, "a position is cheap"
        assert length * len(slices) * POSITION_S <= POLICY.prefill_s
    assert shop.ended[-rows:] == asked


@pytest.mark.parametrize("length", [100, 300])
def test_a_row_is_cut_where_a_forward_would_have_too_few_positions_or_too_many(length: int) -> None:
    shop = Shop()
    for session in range(2):
        shop.open(session, 0)
    shop.finish(shop.ask(0, 64))
    rows = [shop.ask(session, length) for session in range(2)]
    slices = [part.length for part in shop.run().slices.values()]
    assert POLICY.fast_prefill <= sum(slices) <= POLICY.prefill_s / POSITION_S
    assert slices[-1] < length
    shop.finish(rows[-1])
    assert shop.ended[-2:] == rows


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
    decodes: dict[int, int] = {}
    answered = list(range(13, 29))
    for _ in range(3):
        prefills, asked_s = {shop.ask(session, PREFILL) for session in range(1, 13)}, shop.now_s
        while not prefills <= set(shop.ended):
            decodes |= {shop.ask(session, 1): session for session in answered}
            slices = shop.run().slices
            answered = [decodes.pop(ticket) for ticket in slices if ticket in decodes]  # and each asks again at once
            parts = [part for ticket, part in slices.items() if ticket in prefills]
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
