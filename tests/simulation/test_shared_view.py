"""A view that is kept up to date is the one that would be built anew, and its nodes share what follows from it."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.placement.claims import believed
from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds, one_speed
from llmnode.core.span import Span
from llmnode.testing.placement.shared_view import SharedView
from llmnode.testing.simulate import seeds

BLOCKS = 12
POLICY = RebalancePolicy()


def drawn(rng: random.Random, peer: PeerId) -> PlacedServer:
    """Some claim nothing, some the same, and some more than is believed."""
    length = rng.randint(1, 5)
    start = rng.randrange(BLOCKS - length + 1)
    speed = rng.choice((0.0, 10.0, rng.uniform(0, 100), rng.uniform(0, 1000)))
    return PlacedServer(peer, Span(start, start + length), one_speed(speed, length), online=rng.random() < 0.7)


@pytest.mark.parametrize("seed", seeds(100))
def test_a_view_after_any_news_is_the_one_that_would_be_built_anew(seed: int) -> None:
    rng, view = random.Random(seed), SharedView(BLOCKS, POLICY, PlanPolicy())
    heard: dict[PeerId, PlacedServer] = {}
    newest: dict[PeerId, int] = {}
    for _news in range(rng.choice((3, 30, 200))):
        peer, sequence = PeerId(f"{rng.randrange(12):02}"), rng.randrange(300)
        server = drawn(rng, peer) if rng.random() < 0.7 else None
        view.hear(peer, server, sequence)
        if sequence >= newest.get(peer, -1):
            newest[peer] = sequence
            if server is None:
                heard.pop(peer, None)
            else:
                heard[peer] = server
        if rng.random() < 0.5:
            anew = believed(heard.values(), POLICY)
            known = view.servers()
            assert list(known) == anew
            assert known.loading == sum(not each.online for each in anew)
            assert known.speeds == pytest.approx(block_speeds(BLOCKS, anew))
            served = {block for each in anew if each.speed for block in range(each.span.start, each.span.end)}
            assert [speed > 0.0 for speed in known.speeds] == [block in served for block in range(BLOCKS)]


def test_nodes_share_a_plan_until_news_come_unless_they_know_of_absent_servers() -> None:
    rng, view = random.Random(0), SharedView(BLOCKS, POLICY, PlanPolicy())
    for number in range(8):
        view.hear(PeerId(str(number)), drawn(rng, PeerId(str(number))), number)
    known = view.servers()
    assert view.servers().plan is known.plan
    assert known.without([PeerId("stranger")]) is known
    assert known.without([PeerId("3")]) is known.without([PeerId("3"), PeerId("stranger")])
    assert [each.peer for each in known.without([PeerId("3")])] == list("0124567")
    staying = known.where_stay([PeerId("3")])
    assert [each.peer for each in staying if not each.movable] == ["3"]
    view.hear(PeerId("3"), known.by_peer[PeerId("3")], 9)
    assert view.servers() is known, "nothing new"
    view.hear(PeerId("3"), None, 10)
    assert view.servers() is not known
