"""A client's own part of a load is averaged as peers average theirs, for any moment of the last minute."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.peers.own_load import AROUND_S, KEPT_S, PEERS, OwnLoad
from llmnode.core.serving.load_average import LoadAverage

PEER = PeerId("peer")


def test_it_is_the_average_that_the_peer_makes() -> None:
    rng, own, peers, now_s = random.Random(1), OwnLoad(), LoadAverage(), 0.0
    announced: list[tuple[float, float]] = []
    while now_s < 2 * KEPT_S:
        now_s += rng.uniform(0, 0.6)
        spent_s = rng.uniform(0, 0.5)
        own.note(PEER, spent_s, now_s)
        peers.note(spent_s, now_s)
        announced.append((now_s, peers.at(now_s)))
    for then_s, load in announced[-40:]:
        assert own.at(PEER, then_s) == pytest.approx(load, rel=0.1)
    assert own.at(PEER, now_s + KEPT_S + 1) == 0


def test_an_announced_load_has_no_more_of_it_whatever_the_clocks_say() -> None:
    rng, own, peers, now_s = random.Random(2), OwnLoad(), LoadAverage(), 0.0
    announced: list[tuple[float, float]] = []
    for _ in range(40):  # steps of many sessions end together
        now_s += rng.uniform(0.1, 2.0)
        spent_s = rng.choice((0.0, 0.3, 6.0))
        peers.note(spent_s, now_s)
        own.note(PEER, spent_s, now_s + rng.uniform(0, 0.1))
        announced.append((now_s, peers.at(now_s)))
    for then_s, load in announced[-20:]:
        for apart_s in (-AROUND_S + 0.2, 0.0, AROUND_S - 0.2):
            most = own.most_around(PEER, then_s + apart_s)
            assert load <= 1.05 * most
            assert most <= 1.05 * max(each for at_s, each in announced if abs(at_s - then_s) <= 3 * AROUND_S)
    assert own.most_around(PEER, now_s + KEPT_S + AROUND_S + 1) == 0


def test_it_keeps_little() -> None:
    own = OwnLoad()
    for number in range(3 * PEERS):
        own.note(PeerId(str(number)), 1.0, 0.0)
    assert len([*own.peers()]) == PEERS
    for number in range(10_000):
        own.note(PEER, 1.0, number / 10)
    assert own.at(PEER, 0.0) == 0 < own.at(PEER, 1000.0)
