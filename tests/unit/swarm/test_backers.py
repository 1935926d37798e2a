"""Servers that are asked for their address groups: those that leave a dial hanging do not use up the time of others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import EXACT, PRECISIONS, ModelInfo, Precision, PrecisionWish, Profile
from llmnode.core.peers.whereabouts import claimed_group
from llmnode.core.policy import LinkPolicy, RoutePolicy
from llmnode.core.span import Span
from llmnode.errors import PeerUnreachable
from llmnode.swarm.backers import LATE_ADDRESSES, MOST_ASKED, PATIENCE_S, Backers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MODEL = ModelInfo("ours", b"o" * 32, blocks=8, hidden_size=8, context_tokens=64)
WHOLE = Span(0, 8)
BUDGET_S = RoutePolicy().connect_timeout_s
HANGS_S = LinkPolicy().dial_timeout_s
HALF = PRECISIONS["bfloat16"]
REFUSES = 0.0


class Internet:
    """It stands for a swarm. Each server answers after its time; dials that take HANGS_S fail then."""

    def __init__(self) -> None:
        self.announced: list[Announcement] = []
        self.asked: dict[PeerId, float] = {}
        self.late = self.most_late = 0
        self._answers_s: dict[PeerId, float] = {}

    def add(
        self,
        name: str,
        answers_s: float,
        *,
        precision: Precision = EXACT,
        span: Span = WHOLE,
        addresses: int = 1,
        claims: Sequence[int] = (),
    ) -> None:
        """A server in an address group of its own. It claims to be at these others, too, by their numbers."""
        peer, number = PeerId(name), len(self.announced)
        profile = Profile(MODEL.digest, precision)
        offer = Offer(MODEL.name, profile, 8, span, PeerState.ONLINE, 1000, 64, 64)
        at = tuple(f"/ip4/8.8.{each}.8/tcp/1/p2p/{peer}" for each in claims)
        at += tuple(f"/ip4/8.8.{number}.8/tcp/{1 + port}/p2p/{peer}" for port in range(addresses))
        self.announced.append(Announcement(peer, at, 0, 1, "llmnode", offer))
        self._answers_s[peer] = answers_s

    def met_in(self) -> dict[PeerId, str]:
        return {}

    def connected_in(self) -> dict[PeerId, str]:
        return {}

    async def connect(self, addresses: Sequence[str]) -> Any:  # stands for a PeerConnection
        peer = PeerId(addresses[0].rpartition("/")[2])
        self.asked[peer] = trio.current_time()
        if self._answers_s[peer] < HANGS_S:
            await trio.sleep(self._answers_s[peer])
        else:
            await self._hang(len(addresses))
        if self._answers_s[peer] in (REFUSES, HANGS_S):
            raise PeerUnreachable(peer)
        return SimpleNamespace(peer=peer, source=SimpleNamespace(group=claimed_group(addresses[0])))

    async def _hang(self, addresses: int) -> None:
        await trio.sleep(PATIENCE_S + 0.1)
        try:
            self.late += addresses
            self.most_late = max(self.most_late, self.late)
            await trio.sleep(HANGS_S - PATIENCE_S - 0.1)
        finally:
            self.late -= addresses

    def answering(self, precisions: Collection[Precision] = (EXACT,)) -> tuple[set[str], float]:
        """The servers that answer, and after how long the question is over."""

        async def main() -> tuple[set[str], float]:
            began_s = trio.current_time()
            swarm: Any = self
            groups = await Backers(MODEL, PrecisionWish(), swarm, lambda: self.announced).answering(
                precisions, BUDGET_S
            )
            return set(groups), trio.current_time() - began_s

        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("dead", [0, 1, 3, 10])
def test_servers_that_leave_dials_hanging_do_not_hide_those_that_answer(dead: int) -> None:
    for seed in range(60):
        random.seed(seed)
        internet = Internet()
        for number in range(3):
            internet.add(f"honest {number}", 0.3)
        for number in range(dead):
            internet.add(f"dead {number}", HANGS_S)
        found, took_s = internet.answering()
        assert len(found) >= 2
        assert took_s < BUDGET_S, "it is over once servers in two groups have answered"


def test_silent_servers_of_one_precision_leave_time_and_tries_to_another() -> None:
    for seed in range(20):
        random.seed(seed)
        internet = Internet()
        for number in range(100):
            internet.add(f"silent {number}", HANGS_S, addresses=3)
        for number in range(3):
            internet.add(f"honest {number}", 0.3, precision=HALF)
            internet.add(f"dead {number}", HANGS_S, precision=HALF)
        found, took_s = internet.answering((EXACT, HALF))
        assert len(found) >= 2
        assert took_s == BUDGET_S
        assert len(internet.asked) <= MOST_ASKED


def test_claims_of_servers_of_one_precision_cost_those_of_another_no_turns() -> None:
    found = 0
    for seed in range(20):
        random.seed(seed)
        internet = Internet()
        for number in range(3):
            internet.add(f"honest {number}", 0.3, precision=HALF)
        for number in range(40):
            internet.add(f"dead {number}", HANGS_S, precision=HALF)
        for number in range(100):
            internet.add(f"silent {number}", HANGS_S, claims=range(3))
        found += len(internet.answering((EXACT, HALF))[0])
    assert found >= 20


def test_a_late_answer_counts_and_few_late_dials_go_on_beside_those_that_are_asked_next() -> None:
    internet = Internet()
    internet.add("far", 3.2)
    internet.add("near", 0.3)
    assert internet.answering() == ({"far", "near"}, 3.2)
    internet = Internet()
    for number in range(100):
        internet.add(f"silent {number}", HANGS_S, addresses=4)
    assert internet.answering() == (set(), BUDGET_S)
    assert (internet.most_late, internet.late) == (LATE_ADDRESSES, 0)


def test_a_refusal_is_followed_by_the_next_dial_at_once_and_a_half_is_over_with_its_servers() -> None:
    internet = Internet()
    for number in range(10):
        internet.add(f"gone {number}", REFUSES)
    for number in range(2):
        internet.add(f"front {number}", 0.3, span=Span(0, 4))
    assert internet.answering() == ({"front 0", "front 1"}, 0.3)
