"""A node meets the peers that mDNS names, and answers; a crowd of claims is bounded. The datagrams are in memory."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio
import trio.testing

from llmnode.core.ids import PeerId
from llmnode.errors import PeerUnreachable
from llmnode.net.mdns_messages import Heard
from llmnode.swarm.nearby import LocalPeers, find
from unit.exact_nodes import exact_node
from unit.in_trio import in_trio
from unit.mdns_in_memory import HERE, POLICY, Datagrams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Result = TypeVar("Result")
SLOW = -15.0
"""A peer that takes a connection and says nothing is given up after this time."""


class Network:
    """It stands for a network and a view. A peer is met, or not, after the time that is given for its name."""

    peer = "us"
    listening = ("here",)

    def __init__(self, **answers: Sequence[float]) -> None:
        """For each peer, how long it takes: a meeting fails after one that is negative. The last one holds on."""
        self._answers = {name: list(of_peer) for name, of_peer in answers.items()}
        self.view: set[str] = set()
        self.met = trio.Event()

    def note_near(self, _address: str) -> None:
        pass

    async def meet(self, *addresses: str) -> None:
        name = addresses[0].rpartition("/")[2]
        answers = self._answers.get(name, [SLOW])
        took_s = answers.pop(0) if len(answers) > 1 else answers[0]
        await trio.sleep(abs(took_s))
        if took_s < 0:
            raise PeerUnreachable(name)
        self.view.add(name)
        self.met.set()

    async def meet_all(self, _named: Sequence[str], peers: Sequence[Sequence[str]]) -> None:
        for addresses in peers:
            await self.meet(*addresses)


def serving() -> trio.Event:
    event = trio.Event()
    event.set()
    return event


def simulate(main: Callable[[], Awaitable[Result]]) -> Result:
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def found(*crowds: tuple[float, str, Sequence[str]], wanted: Sequence[str] = ()) -> tuple[int, float]:
    """How many peers `find` finds, and after how long, if each host names its peers at its time."""

    async def main() -> tuple[int, float]:
        mdns: Any = Datagrams()
        async with trio.open_nursery() as nursery:

            async def name(at_s: float, host: str, peers: Sequence[str]) -> None:
                await trio.sleep(at_s)
                mdns.name(*peers, host=host)

            for crowd in crowds:
                nursery.start_soon(name, *crowd)
            peers = await find(mdns, [PeerId(each) for each in wanted])
            took_s = trio.current_time()
            nursery.cancel_scope.cancel()
        assert len(mdns.asked_s) >= 1
        return len(peers), took_s - mdns.asked_s[0]

    return simulate(main)


def test_a_node_that_looks_waits_a_moment_for_others_and_not_for_ever() -> None:
    assert found() == (0, pytest.approx(POLICY.find_s))
    assert found((0.1, "a", ["x"])) == (1, pytest.approx(0.1 + POLICY.more_s))
    assert found((0.1, "a", ["x"]), (0.3, "b", ["y"]), (0.9, "c", ["z"])) == (2, pytest.approx(0.1 + POLICY.more_s))


def test_peers_that_are_wanted_are_waited_for_and_others_are_not_taken() -> None:
    late = (1.2, "b", ["y"])
    assert found((0.1, "a", ["x"]), late, wanted=["y"]) == (1, pytest.approx(1.2))
    assert found((0.1, "a", ["x"]), wanted=["y"]) == (0, pytest.approx(POLICY.find_s))


def test_one_host_has_few_peers_and_all_have_a_limit() -> None:
    many = [str(number) for number in range(100)]
    assert found((0.1, "a", many), (0.2, "b", ["honest"]))[0] == POLICY.peers_per_host + 1
    crowds = [(0.1, host, [f"{host}{number}" for number in range(8)]) for host in "abcdefgh"]
    assert found(*crowds)[0] == POLICY.peers


@in_trio
async def test_a_peer_that_answers_is_met_though_a_crowd_of_claims_came_before() -> None:
    mdns: Any = Datagrams()
    async with exact_node() as other, exact_node() as ours, trio.open_nursery() as nursery:
        local = LocalPeers(mdns, ours.network, ours.swarm, looks=True, serves=serving())
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
    async def main() -> list[float]:
        mdns: Any = Datagrams()
        network: Any = Network()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=False, serves=serving()).run)
            for _ in range(1000):
                await trio.sleep(0.01)
                mdns.say.send_nowait(Heard(HERE, True, {"x": ("/ip4/127.0.0.1/tcp/1/p2p/x",)}))
            nursery.cancel_scope.cancel()
        assert not mdns.asked_s, "one that does not look asks nobody"
        return [at_s for at_s, lifetime_s in mdns.answers if lifetime_s is None]

    times = simulate(main)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert 8 <= len(times) <= 11 and min(gaps) >= POLICY.answer_every_s


def test_a_slow_crowd_of_one_host_keeps_nobody_else_out() -> None:
    async def main() -> float:
        mdns: Any = Datagrams()
        network: Any = Network(honest=[0.1])
        crowd = [f"peer{number}" for number in range(100)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=True, serves=serving()).run)
            with trio.fail_after(600):
                while not network.met.is_set():
                    mdns.name(*crowd, host="hostile")
                    mdns.name("honest", host="honest")
                    await trio.sleep(1)
            nursery.cancel_scope.cancel()
            return trio.current_time()

    rounds = POLICY.peers_per_host / POLICY.at_once + 1
    assert simulate(main) < rounds * -SLOW


def test_a_meeting_that_fails_is_tried_again_soon_and_not_without_end() -> None:
    class Answering(Datagrams):
        async def ask(self) -> None:
            await super().ask()
            self.name("peer")

    async def main(*answers: float) -> list[float]:
        """When it asked for others."""
        mdns: Any = Answering()
        network: Any = Network(peer=answers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=True, serves=serving()).run)
            await trio.sleep(600)
            nursery.cancel_scope.cancel()
        assert ("peer" in network.view) == (answers[-1] > 0)
        return list(mdns.asked_s)

    once = simulate(partial(main, -1, 1))
    assert once[1] - once[0] < 2 * POLICY.look_again_s, "it was starting"
    assert min(after - before for before, after in itertools.pairwise(once[1:])) >= POLICY.look_every_s
    never = simulate(partial(main, -1))
    assert len(never) < 600 / POLICY.look_every_s + 6


def test_a_node_tells_of_itself_only_while_it_answers_links() -> None:
    async def main() -> None:
        mdns: Any = Datagrams()
        network: Any = Network()
        serves = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=True, serves=serves).run)
            mdns.say.send_nowait(Heard(HERE, True, {}))
            await trio.sleep(30)
            assert not mdns.answers and mdns.asked_s, "its blocks load"
            serves.set()
            await mdns.answered.wait()
            assert trio.current_time() == pytest.approx(mdns.answers[0][0])
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=True, serves=trio.Event()).run)
            before = len(mdns.answers)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        assert len(mdns.answers) == before, "it has nothing to take back"

    simulate(main)


def test_networks_are_looked_at_though_nobody_asks() -> None:
    async def main() -> int:
        mdns: Any = Datagrams()
        network: Any = Network()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(LocalPeers(mdns, network, network, looks=False, serves=serving()).run)
            await trio.sleep(600)
            nursery.cancel_scope.cancel()
        return len(mdns.answers)

    assert 600 / POLICY.look_every_s - 1 <= simulate(main) <= 600 / POLICY.look_every_s + 2


def test_peers_that_take_a_connection_and_say_nothing_hold_up_a_start_for_a_moment() -> None:
    async def main() -> float:
        mdns: Any = Datagrams()
        network: Any = Network()
        local = LocalPeers(mdns, network, network, looks=True, serves=trio.Event())
        began_s = trio.current_time()
        await local.meet_first([["/ip4/10.0.0.9/tcp/1/p2p/silent"]])
        return trio.current_time() - began_s

    assert simulate(main) == pytest.approx(POLICY.meet_s)
