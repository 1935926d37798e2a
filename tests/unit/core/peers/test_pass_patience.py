"""The time for a pass follows its size and the speed of its peer, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.pass_patience import PEERS, PassPatience, PassSize
from llmnode.core.policy import PassPolicy

POLICY = PassPolicy()
PEER = PeerId("peer")
SMALL, LARGE = PassSize(100, 1 << 10), PassSize(100_000, 8 << 20)

sizes = st.builds(PassSize, st.integers(1, 10**9), st.integers(0, 1 << 26))


def test_a_larger_pass_has_more_time() -> None:
    patience = PassPatience(POLICY)
    assert POLICY.base_s < patience.timeout_s(PEER, SMALL) < POLICY.base_s + 1
    assert patience.timeout_s(PEER, LARGE) == POLICY.base_s + 100_000 / POLICY.cost_per_s + 128


def test_a_peer_that_was_fast_is_given_up_sooner_and_no_other() -> None:
    patience = PassPatience(POLICY)
    patience.note(PEER, LARGE, 2.0)
    assert patience.timeout_s(PEER, LARGE) == POLICY.patience_s + 2 * POLICY.patience_times
    twice = PassSize(2 * LARGE.cost, LARGE.size_bytes)
    assert patience.timeout_s(PEER, twice) == POLICY.patience_s + 4 * POLICY.patience_times
    assert patience.timeout_s(PeerId("other"), LARGE) == PassPatience(POLICY).timeout_s(PEER, LARGE)


@given(sizes, st.lists(st.tuples(sizes, st.floats(0, 1e6)), max_size=5))
def test_the_time_is_within_bounds(size: PassSize, answered: list[tuple[PassSize, float]]) -> None:
    patience = PassPatience(POLICY)
    unknown_s = patience.timeout_s(PEER, size)
    for each, took_s in answered:
        patience.note(PEER, each, took_s)
    assert min(POLICY.patience_s, unknown_s) <= patience.timeout_s(PEER, size) <= unknown_s <= POLICY.longest_s


def test_a_limited_number_of_peers_is_remembered() -> None:
    patience = PassPatience(POLICY)
    for number in range(PEERS + 10):
        patience.note(PeerId(str(number)), SMALL, 1.0)
    assert len(patience._speeds) == PEERS
    assert PeerId(str(PEERS + 9)) in patience._speeds
