"""A client knows which sessions it opens, and has opened lately, at each peer."""

from __future__ import annotations

import pytest
import trio

from llmnode.core.ids import PeerId
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.session.openings import LATELY_S, Openings
from llmnode.testing import simulated

ONE, TWO = PeerId("one"), PeerId("two")
ROUTE = [Hop(ONE, Span(0, 2)), Hop(TWO, Span(2, 4))]


@simulated
async def test_sessions_count_while_they_are_opened_and_for_some_time_after() -> None:
    openings = Openings()
    with openings.at(ROUTE), openings.at(ROUTE[:1]):
        assert openings.beside({TWO: 3}) == {ONE: 2, TWO: 4}
        assert openings.lately() == {ONE: 2, TWO: 1}
    openings.note(ROUTE)
    await trio.sleep(LATELY_S / 2)
    openings.note(ROUTE[1:])
    assert openings.beside({}) == {} and openings.lately() == {ONE: 1, TWO: 2}
    await trio.sleep(LATELY_S * 0.75)
    assert openings.lately() == {TWO: 1}
    await trio.sleep(LATELY_S)
    assert not openings.lately()


@simulated
async def test_a_session_that_could_not_be_opened_counts_no_more() -> None:
    openings = Openings()
    with pytest.raises(ValueError, match="refused"), openings.at(ROUTE):
        raise ValueError("refused")
    assert not openings.lately()
