"""Sessions open quickly where a server works for nobody else, at the usual rate elsewhere, and never at any rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import trio

from llmnode.core.budget import Budget, Kind, Resource
from llmnode.core.ids import PeerId
from llmnode.core.policy import BudgetPolicy, ServePolicy
from llmnode.errors import PeerRefused
from llmnode.node.serve.conduct import COUNTED_OPEN, LOOK_S, NO_MEMORY_S, OPENINGS, Conduct
from llmnode.testing import simulated
from llmnode.wire.frame import Frame, FrameType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.ports import Link

POLICY = ServePolicy()
OWN, OTHER = "8.8.8.0/24", "9.9.9.0/24"
USUAL_PER_S, QUICK_PER_S = POLICY.requests.shared_per_s, POLICY.openings.shared_per_s
FRAMES = 1000


async def flood_s(conduct: Conduct, kind: FrameType, frames: int = FRAMES) -> float:
    """The time until one link has had its turn for each of these frames."""
    budget = Budget(BudgetPolicy())
    link = cast("Link", SimpleNamespace(group=OWN, peer=PeerId("p"), scope=budget.connection("8.8.8.8", PeerId("p"))))
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(frames):
            nursery.start_soon(conduct.wait_turn, link, Frame(kind))
    assert not budget.process.held[Resource.MEMORY]
    return trio.current_time() - began_s


def least_s(kind: FrameType, per_s: float) -> float:
    """The time that the turns take which are left after the burst."""
    each = 1 + COUNTED_OPEN * (kind is FrameType.OPEN)
    return (FRAMES * each - POLICY.requests.burst) / per_s


def at_work(*groups: str) -> Conduct:
    return Conduct(POLICY, lambda _since_s: groups)


@pytest.mark.parametrize("kind", sorted(OPENINGS))
@pytest.mark.parametrize("groups", [(), (OWN,)])
@simulated
async def test_a_session_opens_and_ends_quickly_where_nobody_else_has_work_but_a_flood_of_them_is_bounded(
    kind: FrameType, groups: Iterable[str]
) -> None:
    took_s = await flood_s(at_work(*groups), kind)
    assert took_s == pytest.approx(least_s(kind, QUICK_PER_S), rel=0.1, abs=LOOK_S)


@pytest.mark.parametrize("kind", sorted(OPENINGS))
@pytest.mark.parametrize("groups", [None, (OTHER,), (OWN, OTHER)])
@simulated
async def test_at_a_relay_and_beside_the_work_of_others_sessions_have_the_turns_of_all_requests(
    groups: Iterable[str] | None, kind: FrameType
) -> None:
    conduct = Conduct(POLICY) if groups is None else at_work(*groups)
    assert await flood_s(conduct, kind) == pytest.approx(least_s(kind, USUAL_PER_S), rel=0.1)


@simulated
async def test_requests_that_open_no_session_are_never_quick() -> None:
    assert await flood_s(at_work(), FrameType.RESUME) == pytest.approx(least_s(FrameType.RESUME, USUAL_PER_S), rel=0.1)


@simulated
async def test_a_server_looks_now_and_then_for_whom_it_works() -> None:
    looks: list[float] = []

    def look(_since_s: float) -> Iterable[str]:
        looks.append(trio.current_time())
        return ()

    took_s = await flood_s(Conduct(POLICY, look), FrameType.OPEN)
    assert 1 <= len(looks) <= 1 + took_s / LOOK_S


@simulated
async def test_requests_without_end_for_which_there_is_no_memory_are_refused_slowly() -> None:
    """Each was refused at once: a stranger that had used up its memory had thousands a second refused."""
    conduct, budget = Conduct(POLICY), Budget(BudgetPolicy())
    connection = budget.connection("8.8.8.8", PeerId("p"))
    link = cast("Link", SimpleNamespace(group=OWN, peer=PeerId("p"), scope=connection))
    group = connection.of_kind(Kind.GROUP)
    assert group is not None and group.reserve(Resource.MEMORY, group.limit(Resource.MEMORY) or 0) is None
    began_s, refused = trio.current_time(), 0
    for _ in range(2 * int(POLICY.requests.burst)):
        try:
            await conduct.wait_turn(link, Frame(FrameType.DESCRIBE))
        except PeerRefused:
            refused += 1
    assert refused >= POLICY.requests.burst / 2
    assert trio.current_time() - began_s >= refused * NO_MEMORY_S
