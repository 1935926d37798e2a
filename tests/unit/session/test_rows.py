"""Rows that wait for each other have to fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import ClientPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import SessionClosed
from llmnode.session.rows import Rows

if TYPE_CHECKING:
    from llmnode.session.hops import SessionHops

SPAN = Span(0, 4)


def announced(peer: str, kv_tokens: int, page: int, free: int | None = None) -> Announcement:
    profile, free = Profile(b"d" * 32, Precision()), kv_tokens if free is None else free
    offer = Offer("model", profile, 4, SPAN, PeerState.ONLINE, 0, kv_tokens, free, kv_page=page)
    return Announcement(PeerId(peer), (), 1, 2, "llmnode", offer)


def row(length: int, *peers: str) -> SessionHops:
    hops = [SimpleNamespace(hop=Hop(PeerId(peer), SPAN)) for peer in peers]
    terms = SimpleNamespace(max_length=length, policy=ClientPolicy())
    made: Any = SimpleNamespace(hops=hops, terms=terms, ended=None, state=SimpleNamespace(lost=None, position=0))
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


def test_rows_move_only_to_a_server_with_kv_for_all_of_them() -> None:
    """For the greatest lengths of all at some time, and now for what they hold and the piece that they begin with."""
    rows, long, batch = Rows(), 1000, [row(1000, "a") for _ in range(3)]
    for each in batch:
        rows.add(each)
    first = ClientPolicy().route.first_positions
    enough = announced("enough", 3 * long, 1, free=3 * first)
    servers = [
        enough,
        announced("small", 3 * long - 1, 1),
        announced("full", 4 * long, 1, free=3 * first - 1),
        announced("paged", 3 * 1024 - 1, 1024),
    ]
    assert rows.without_kv(servers, batch) == {"small", "full", "paged"}
    assert rows.without_kv([announced("small", long, 1)], batch[:1]) == set()
    rows.add(row(long, "enough"))
    assert rows.without_kv([enough], batch) == {"enough"}, "a row is there already"
    rows.lengths_are_guesses = True
    assert rows.without_kv(servers, batch) == {"full", "paged"}


def test_rows_move_with_those_that_go_on_at_the_same_hops() -> None:
    rows = Rows()
    one, same, elsewhere, ended, lost = (row(50, *peers) for peers in ("ab", "ab", "ac", "ab", "ab"))
    ended.ended, lost.state = SessionClosed("closed"), cast("Any", SimpleNamespace(lost=object(), position=0))
    for each in (one, same, elsewhere, ended, lost):
        rows.add(each)
    assert rows.at_peers_of(one) == [one, same]
    assert rows.at_peers_of(same) == [same, one]
