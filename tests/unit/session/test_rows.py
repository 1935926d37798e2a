"""Rows that wait for each other have to fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.session.rows import Rows

if TYPE_CHECKING:
    from llmnode.session.hops import SessionHops

SPAN = Span(0, 4)


def announced(peer: str, kv_tokens: int, page: int) -> Announcement:
    offer = Offer(
        "model", Profile(b"d" * 32, Precision()), 4, SPAN, PeerState.ONLINE, 0, kv_tokens, kv_tokens, kv_page=page
    )
    return Announcement(PeerId(peer), (), 1, 2, "llmnode", offer)


def row(length: int, *peers: str) -> SessionHops:
    hops = [SimpleNamespace(hop=Hop(PeerId(peer), SPAN)) for peer in peers]
    made: Any = SimpleNamespace(hops=hops, terms=SimpleNamespace(max_length=length))
    return cast("SessionHops", made)


@pytest.mark.parametrize(("page", "fit"), [(1, 20), (16, 16), (256, 4)])
def test_rows_fit_a_server_by_its_pages(page: int, fit: int) -> None:
    rows, servers = Rows(), [announced("a", 1024, page), announced("b", 1024, 1)]
    for _ in range(fit - 1):
        rows.add(row(50, "a"))
    assert not rows.too_small(servers, 50)
    rows.add(row(50, "a"))
    assert set(rows.too_small(servers, 50)) == {"a"}, "no row is at the other one"
    rows.lengths_are_guesses = True
    assert not rows.too_small(servers, 50)


def test_a_row_that_is_being_opened_counts_until_it_is_open_or_not() -> None:
    rows, servers = Rows(), [announced("a", 100, 1)]
    with rows.opening((Hop(PeerId("a"), SPAN),), 50):
        assert not rows.too_small(servers, 50)
        assert set(rows.too_small(servers, 51)) == {"a"}
    assert not rows.too_small(servers, 51)
