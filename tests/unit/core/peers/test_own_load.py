"""A client's own part of a load is averaged as peers average theirs, for any moment of the last minute."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.peers.own_load import KEPT_S, PEERS, OwnLoad
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


def test_it_keeps_little() -> None:
    own = OwnLoad()
    for number in range(3 * PEERS):
        own.note(PeerId(str(number)), 1.0, 0.0)
    assert len([*own.peers()]) == PEERS
    for number in range(10_000):
        own.note(PEER, 1.0, number / 10)
    assert own.at(PEER, 0.0) == 0 < own.at(PEER, 1000.0)
