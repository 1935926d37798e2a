"""A client knows which sessions it opens at each peer."""

from __future__ import annotations

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.session.openings import Openings

ONE, TWO = PeerId("one"), PeerId("two")
ROUTE = [Hop(ONE, Span(0, 2)), Hop(TWO, Span(2, 4))]


def test_sessions_count_while_they_are_opened() -> None:
    openings = Openings()
    with openings.at(ROUTE), openings.at(ROUTE[:1]):
        assert openings.beside({TWO: 3}) == {ONE: 2, TWO: 4}
    assert not openings.beside({})


def test_a_session_that_could_not_be_opened_counts_no_more() -> None:
    openings = Openings()
    with pytest.raises(ValueError, match="refused"), openings.at(ROUTE):
        raise ValueError("refused")
    assert not openings.beside({})
