"""A node meets the peers that mDNS names, and answers; a crowd of claims is bounded. The datagrams are in memory."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmnode.core.policy import MdnsPolicy
from llmnode.net.mdns_messages import Heard
from llmnode.swarm.nearby import LocalPeers, find
from unit.exact_nodes import exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = "127.0.0.1"
POLICY = MdnsPolicy()


class Datagrams:
    """It stands for an `Mdns`: it hears the messages of `say`, and notes when it asked, and what it answered."""

    def __init__(self) -> None:
        self.policy = POLICY
        self.say, self._said = trio.open_memory_channel[Heard](math.inf)
        self.asked_s: list[float] = []
        self.answers: list[tuple[float, int | None]] = []
        self.answered = trio.Event()

    async def ask(self) -> None:
        self.asked_s.append(trio.current_time())

    async def answer(self, _listening: Sequence[str], lifetime_s: int | None = None) -> None:
        self.answers.append((trio.current_time(), lifetime_s))
        self.answered.set()

    async def hear(self) -> Heard:
        return await self._said.receive()

    def name(self, *peers: str, host: str = HERE) -> None:
        self.say.send_nowait(Heard(host, False, {each: (f"/ip4/{host}/tcp/1/p2p/{each}",) for each in peers}))


def found(*crowds: tuple[float, str, Sequence[str]]) -> tuple[int, float]:
    """How many peers `find` finds, and after how long, if each host names its peers at its time."""

    async def main() -> tuple[int, float]:
        mdns: Any = Datagrams()
        async with trio.open_nursery() as nursery:

            async def name(at_s: float, host: str, peers: Sequence[str]) -> None:
                await trio.sleep(at_s)
                mdns.name(*peers, host=host)

            for crowd in crowds:
                nursery.start_soon(name, *crowd)
            peers = await find(mdns)
            took_s = trio.current_time()
            nursery.cancel_scope.cancel()
        assert len(mdns.asked_s) >= 1
        return len(peers), took_s - mdns.asked_s[0]

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_node_that_looks_waits_a_moment_for_others_and_not_for_ever() -> None:
    assert found() == (0, pytest.approx(POLICY.find_s))
    assert found((0.1, "a", ["x"])) == (1, pytest.approx(0.1 + POLICY.more_s))
    assert found((0.1, "a", ["x"]), (0.3, "b", ["y"]), (0.9, "c", ["z"])) == (2, pytest.approx(0.1 + POLICY.more_s))


def test_one_host_has_few_peers_and_all_have_a_limit() -> None:
    many = [str(number) for number in range(100)]
    assert found((0.1, "a", many), (0.2, "b", ["honest"]))[0] == POLICY.peers_per_host + 1
    crowds = [(0.1, host, [f"{host}{number}" for number in range(8)]) for host in "abcdefgh"]
    assert found(*crowds)[0] == POLICY.peers


@in_trio
async def test_a_peer_that_answers_is_met_though_a_crowd_of_claims_came_before() -> None:
    mdns: Any = Datagrams()
    async with exact_node() as other, exact_node() as ours, trio.open_nursery() as nursery:
        local = LocalPeers(mdns, ours.network, ours.swarm, looks=True)
        nursery.start_soon(local.run)
        for number in range(2000):
            mdns.name(f"12D3KooW{number}")
        while other.peer not in ours.swarm.view:
            mdns.say.send_nowait(Heard(HERE, False, {other.peer: tuple(other.addresses)}))
            with trio.move_on_after(0.2):
                await ours.swarm.wait_changed()
            assert len(local._waiting) <= POLICY.peers + POLICY.at_once
        while ours.peer not in other.swarm.view:
            await other.swarm.wait_changed()
        nursery.cancel_scope.cancel()
    assert mdns.answers[-1][1] == 0, "it takes back what it has told"


def test_questions_are_answered_once_in_a_second() -> None:
    class Network:
        peer = "us"
        listening = ("here",)

    async def main() -> list[float]:
        mdns: Any = Datagrams()
        network: Any = Network()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=False).run)
            for _ in range(1000):
                await trio.sleep(0.01)
                mdns.say.send_nowait(Heard(HERE, True, {"x": ("/ip4/127.0.0.1/tcp/1/p2p/x",)}))
            nursery.cancel_scope.cancel()
        assert not mdns.asked_s, "one that does not look asks nobody"
        return [at_s for at_s, lifetime_s in mdns.answers if lifetime_s is None]

    times = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert 8 <= len(times) <= 11 and min(gaps) >= POLICY.answer_every_s
