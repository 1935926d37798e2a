"""The rates that peers have told: the latest of each, for a while, by address group."""

from __future__ import annotations

from llmnode.core.links.send_rates import KEEPS_S, MOST_PEERS, SendRates


def test_the_latest_rate_of_each_peer_counts_for_a_while() -> None:
    rates = SendRates()
    rates.note("one", "home", 5.0, 0.0)
    rates.note("one", "home", 1.0, 10.0)
    rates.note("two", "home", 2.0, 20.0)
    rates.note("three", "away", 3.0, 30.0)
    assert rates.by_group(30.0) == {"home": [1.0, 2.0], "away": [3.0]}
    assert rates.by_group(20.0 + KEEPS_S) == {"away": [3.0]}


def test_it_keeps_the_peers_that_were_heard_last() -> None:
    rates = SendRates()
    for number in range(MOST_PEERS):
        rates.note(f"peer {number}", str(number), 1.0, 0.0)
    rates.note("peer 0", "0", 1.0, 1.0)
    rates.note("another", "another", 1.0, 1.0)
    kept = rates.by_group(1.0)
    assert len(kept) == MOST_PEERS
    assert "0" in kept and "another" in kept and "1" not in kept
