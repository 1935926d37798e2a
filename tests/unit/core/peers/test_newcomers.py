"""A peer that has not served this client yet has a cost that follows from those of others that have."""

from __future__ import annotations

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.peers.standing import Candidate, Standing
from llmnode.core.route import HopCost
from unit.standing_peers import BLOCKS, HONEST, HONEST_S, LIAR, POLICY, serve, total_s

PLACES_S = [0.01, 0.05, 0.12]


def far_swarm(way_s: float, *newcomers: Candidate, upload_s: float = 0.0) -> tuple[HopCost, list[HopCost]]:
    """The cost of peers that have proved themselves, all at one place, and those of newcomers beside them."""
    standing = Standing(POLICY)
    proven = [Candidate(each, HONEST_S, 0, way_s, upload_s, blocks=BLOCKS) for each in HONEST]
    for each in HONEST:
        serve(standing, each, way_s + upload_s + BLOCKS * HONEST_S)
    costs = standing.costs([*proven, *newcomers], 0.0)
    return costs[HONEST[0]], [costs[each.peer] for each in newcomers]


@pytest.mark.parametrize("upload_s", [0.0, 0.01])
@pytest.mark.parametrize("way_s", PLACES_S)
def test_the_way_to_a_newcomer_counts_once(way_s: float, upload_s: float) -> None:
    newcomer = Candidate(LIAR, HONEST_S / 2, 0, way_s, upload_s, blocks=BLOCKS)
    proven, (cost,) = far_swarm(way_s, newcomer, upload_s=upload_s)
    assert total_s(proven) == pytest.approx(way_s + upload_s + BLOCKS * HONEST_S)
    assert total_s(cost) == pytest.approx(POLICY.unproven_cost * total_s(proven))
    farther = newcomer._replace(round_trip_s=2 * way_s)
    _, (cost,) = far_swarm(way_s, farther, upload_s=upload_s)
    assert cost.hop_s == pytest.approx(2 * way_s + upload_s)
    assert cost.block_s == pytest.approx(POLICY.unproven_cost * HONEST_S)


@pytest.mark.parametrize("way_s", PLACES_S)
def test_of_two_newcomers_at_a_far_place_the_faster_one_is_preferred(way_s: float) -> None:
    fast, slow = (Candidate(PeerId(str(times)), times * HONEST_S, 0, way_s, blocks=BLOCKS) for times in (1.5, 2.0))
    _, costs = far_swarm(way_s, fast, slow)
    assert [each.block_s for each in costs] == pytest.approx([1.5 * HONEST_S, 2 * HONEST_S])


@pytest.mark.parametrize("blocks", [1, 10, 29, 30, 31, 60, 1000])
@pytest.mark.parametrize("near_s", [0.001, 0.01, 0.05])
def test_a_newcomer_gains_nothing_by_being_near_or_by_many_blocks_that_it_says_that_it_has(
    near_s: float, blocks: int
) -> None:
    proven, (cost,) = far_swarm(0.05, Candidate(LIAR, 1e-6, 0, near_s, blocks=blocks))
    routes_s = max(1.0, blocks / BLOCKS) * proven.hop_s + blocks * proven.block_s
    assert total_s(cost, blocks) >= POLICY.unproven_cost * routes_s * (1 - 1e-9)


@pytest.mark.parametrize("way_s", [None, 0.02, 0.05])
def test_what_a_proven_peer_takes_beyond_its_word_counts_once_for_newcomers(way_s: float | None) -> None:
    standing, said_s, took_s = Standing(POLICY), 0.001, 0.14
    serve(standing, HONEST[0], took_s)
    proven = Candidate(HONEST[0], said_s, 0, way_s, blocks=BLOCKS)
    cost = standing.costs([proven, Candidate(LIAR, 1e-6, 0, way_s, blocks=BLOCKS)], 0.0)[LIAR]
    least_s = HopCost().hop_s if way_s is None else 0.0
    assert total_s(cost) == pytest.approx(POLICY.unproven_cost * (took_s + least_s))


@pytest.mark.parametrize("honest", [1, 2, 3])
def test_the_words_of_one_proven_peer_about_its_way_make_newcomers_little_dearer(honest: int) -> None:
    standing, way_s = Standing(POLICY), 0.05
    usual = [Candidate(each, HONEST_S, 0, way_s, 0.001, blocks=BLOCKS) for each in HONEST[:honest]]
    far = Candidate(PeerId("far"), HONEST_S, 0, 9.0, 16.0, blocks=BLOCKS)
    for each in (*usual, far):
        serve(standing, each.peer, way_s + 0.001 + BLOCKS * HONEST_S)
    newcomer = Candidate(LIAR, HONEST_S, 0, way_s, 0.001, blocks=BLOCKS)
    costs = standing.costs([*usual, far, newcomer], 0.0)
    assert total_s(costs[LIAR]) == pytest.approx(POLICY.unproven_cost * total_s(costs[HONEST[0]]))
