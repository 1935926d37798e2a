"""Each connected peer is asked for news before announcements are old, however many strangers are connected."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.peers.exchanges import Exchanges
from llmnode.core.policy import SwarmPolicy

POLICY = SwarmPolicy()
MOST = int(POLICY.exchanges * POLICY.announce_every_s / POLICY.exchange_every_s)


@pytest.mark.parametrize("number", [1, 2, 5, 17, MOST])
def test_each_has_its_turn_before_announcements_are_old(number: int) -> None:
    exchanges, peers = Exchanges(POLICY, random.Random(number)), [PeerId(f"peer {each}") for each in range(number)]
    asked_s, now_s = dict.fromkeys(peers, 0.0), 0.0
    while now_s < 120.0:
        chosen = exchanges.take_next(peers, 1, now_s)
        assert 1 <= len(chosen) <= POLICY.exchanges
        asked_s.update(dict.fromkeys(chosen, now_s))
        assert max(now_s - each for each in asked_s.values()) <= POLICY.announce_every_s + POLICY.exchange_every_s
        now_s += POLICY.exchange_every_s


def test_those_that_did_not_answer_wait_while_others_are_asked() -> None:
    exchanges = Exchanges(POLICY, random.Random(1))
    silent, honest = [PeerId(f"silent {each}") for each in range(16)], PeerId("honest")
    for each in silent:
        exchanges.note_failed(each, 0.0)
    assert exchanges.take_next([*silent, honest], 3, 1.0) == [honest]
    assert len(exchanges.take_next(silent, 3, 2.0)) > 3, "there is nobody else"
    assert len(exchanges.take_next([*silent, honest], 3, POLICY.silent_wait_s + 1)) > 3


def test_with_a_crowd_in_its_view_a_node_exchanges_as_much_less_often_and_never_too_seldom() -> None:
    exchanges, most = Exchanges(POLICY, random.Random(1)), POLICY.news_peers / POLICY.news_every_s
    for peers in (0, 1, POLICY.news_peers, POLICY.news_peers + 1, 800, POLICY.view_peers):
        pause_s = exchanges.pause_s(peers)
        assert POLICY.news_every_s <= pause_s <= POLICY.exchange_every_s
        assert peers / pause_s <= most * 1.001 or pause_s == POLICY.exchange_every_s
    assert exchanges.pause_s(POLICY.news_peers) == POLICY.news_every_s


def test_connections_that_one_address_group_has_us_open_are_bounded_and_those_of_others_stay() -> None:
    policy = SwarmPolicy()
    exchanges = Exchanges(policy, random.Random(1))
    honest = {PeerId(f"honest {number}"): f"group {number}" for number in range(policy.neighbours)}
    connected = honest | {PeerId(f"sybil {number}"): "stranger" for number in range(500)}
    surplus = len(connected) - policy.connections
    gone = exchanges.leaving(connected)
    assert gone[:surplus] == [f"sybil {number}" for number in range(surplus)], "the oldest of that group"
    assert len(gone) <= surplus + 1


def test_few_connections_stay_but_for_one_at_times() -> None:
    policy = SwarmPolicy()
    exchanges = Exchanges(policy, random.Random(1))
    connected = {PeerId(f"peer {number}"): "group" for number in range(policy.connections)}
    gone = [len(exchanges.leaving(connected)) for _ in range(1000)]
    assert set(gone) == {0, 1} and sum(gone) < 50
    few = dict(list(connected.items())[: policy.neighbours - 1])
    assert not any(exchanges.leaving(few) for _ in range(1000))
