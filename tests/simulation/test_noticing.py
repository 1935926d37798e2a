"""Nodes learn about themselves from others: their identity is used twice, or their clock is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerUnreachable
from llmnode.node.watching import Notice, watch
from llmnode.testing import Conditions, open_world, simulated, simulated_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.swarm.membership import Swarm

FAR = Conditions(delay_s=0.05)
HALVES = Span(0, 3), Span(3, 6)
SOON_S = 10.0
LIFETIME_S = 45.0
HOUR_MS = 3_600_000


def off_by(offset_ms: int) -> Callable[[], int]:
    return lambda: simulated_ms() + offset_ms


async def said_within(swarm: Swarm, within_s: float) -> list[Notice]:
    """The notices that its operator gets meanwhile."""
    notices: list[Notice] = []
    with trio.move_on_after(within_s):
        await watch(swarm, notices.append)
    return notices


@pytest.mark.parametrize("skew_ms", [0, 20_000, -20_000])
@pytest.mark.parametrize("seed", range(3))
@simulated
async def test_both_nodes_with_one_identity_are_told_soon_and_each_once(seed: int, skew_ms: int) -> None:
    async with open_world(seed, conditions=FAR) as swarm, trio.open_nursery() as nursery:
        relay = await swarm.start_relay("relay")
        told: dict[str, list[Notice]] = {"first": [], "second": []}
        first = await swarm.start("copied", HALVES[0])
        nursery.start_soon(watch, first.swarm, told["first"].append)
        await trio.sleep(61.3)
        assert not told["first"]
        second = await swarm.start("copied", HALVES[1], contacts=relay.network.addresses, now_ms=off_by(skew_ms))
        nursery.start_soon(watch, second.swarm, told["second"].append)
        await trio.sleep(SOON_S if not skew_ms else LIFETIME_S)
        for name, others in (("first", HALVES[1]), ("second", HALVES[0])):
            (notice,) = told[name]
            assert (notice.event, notice.more["blocks"]) == ("identity", [others.start, others.end])
            assert f"for blocks {others}" in notice.text
            assert "--identity" in notice.fix
        await trio.sleep(2 * LIFETIME_S)
        assert [len(each) for each in told.values()] == [1, 1]
        nursery.cancel_scope.cancel()


@simulated
async def test_when_one_of_the_two_is_gone_the_other_says_that_it_is_over() -> None:
    async with open_world(conditions=FAR) as swarm, trio.open_nursery() as nursery:
        await swarm.start_relay("relay")
        told: list[Notice] = []
        first = await swarm.start("copied", HALVES[0])
        nursery.start_soon(watch, first.swarm, told.append)
        await trio.sleep(1.3)
        second = await swarm.start("copied", HALVES[1])
        await trio.sleep(SOON_S)
        second.scope.cancel()
        await trio.sleep(3 * LIFETIME_S)
        assert [bool(each.fix) for each in told] == [True, False]
        assert not any(each.has_double for each in first.swarm.view.announcements())
        nursery.cancel_scope.cancel()


@simulated
async def test_a_client_is_told_of_a_double_instead_of_blocks_that_nobody_holds() -> None:
    async with open_world(conditions=FAR) as swarm:
        await swarm.start_relay("relay")
        await swarm.start("copied", HALVES[0])
        await trio.sleep(1.3)
        await swarm.start("copied", HALVES[1])
        await trio.sleep(SOON_S)
        async with swarm.client() as (router, _):
            with pytest.raises(NoRoute, match=r"two nodes use the identity of peer peer-copied.*--identity"):
                await router.find_any()


@pytest.mark.parametrize("back_ms", [0, 10_000], ids=["", "its clock was set back"])
@pytest.mark.parametrize("seed", range(3))
@simulated
async def test_a_node_that_restarts_at_once_elsewhere_is_no_double(seed: int, back_ms: int) -> None:
    """Its former life's announcements are still about, and others serve by them until they hear of the new one."""
    async with open_world(seed, conditions=FAR) as swarm:
        await swarm.start_relay("relay")
        await swarm.start("restarted", HALVES[0], now_ms=off_by(back_ms))
        for span in (HALVES[1], HALVES[0], HALVES[1]):
            await trio.sleep(20)
            swarm.kill("restarted")
            node = await swarm.start("restarted", span)
            assert not await said_within(node.swarm, LIFETIME_S + SOON_S)
            known = {each.offer.span for each in swarm.relays["relay"].swarm.view.announcements()}
            assert known == {span}


@simulated
async def test_a_node_that_leaves_while_its_successor_starts_is_no_double() -> None:
    async with open_world(conditions=FAR) as swarm, trio.open_nursery() as nursery:
        await swarm.start_relay("relay")
        first = await swarm.start("restarted", HALVES[0])
        await trio.sleep(SOON_S)
        told: list[Notice] = []
        nursery.start_soon(first.role.leave)
        node = await swarm.start("restarted", HALVES[1])
        first.scope.cancel()
        nursery.start_soon(watch, node.swarm, told.append)
        await trio.sleep(LIFETIME_S + SOON_S)
        assert not told
        nursery.cancel_scope.cancel()


@simulated
async def test_a_node_that_is_told_to_ask_itself_is_no_double_and_needs_no_answer() -> None:
    """All nodes of a swarm may be given one list of addresses."""
    async with open_world(conditions=FAR) as swarm:
        first = await swarm.start("first", HALVES[0], contacts=[])
        relay = await swarm.start_relay("relay", contacts=[])
        own = [*first.network.addresses, "/memory/elsewhere/p2p/peer-first"]
        swarm.internet.black_holes.add(own[1])
        await first.swarm.meet_all(own)
        await first.swarm.meet_all([*own, *relay.network.addresses])
        assert relay.peer in {each.peer for each in first.pool.living()}
        assert not await said_within(first.swarm, SOON_S)
        with pytest.raises(PeerUnreachable) as caught:
            await first.swarm.meet_all([*own, "/memory/p2p/peer-nobody"])
        assert caught.value.peer == "peer-nobody"


@pytest.mark.parametrize("offset_ms", [HOUR_MS, -HOUR_MS, 40_000, -40_000, 30 * 365 * 24 * HOUR_MS])
@simulated
async def test_a_server_with_a_wrong_clock_is_told_and_the_others_are_not(offset_ms: int) -> None:
    async with open_world(conditions=FAR) as swarm, trio.open_nursery() as nursery:
        told: dict[str, list[Notice]] = {name: [] for name in ("a", "b", "c", "wrong")}
        for name, notices in told.items():
            node = await swarm.start(name, HALVES[0], now_ms=off_by(offset_ms if name == "wrong" else 0))
            nursery.start_soon(watch, node.swarm, notices.append)
        await trio.sleep(3 * SOON_S)
        (notice,) = told.pop("wrong")
        assert notice.event == "clock"
        assert notice.more["ahead_s"] == pytest.approx(offset_ms / 1000, abs=1)
        assert "NTP" in notice.fix
        assert not any(told.values())
        nursery.cancel_scope.cancel()


@simulated
async def test_a_server_that_asks_nobody_learns_from_those_who_ask_it() -> None:
    """The first node of a swarm, which others were told to ask: it believes none of their announcements."""
    async with open_world(conditions=FAR) as swarm, trio.open_nursery() as nursery:
        told: list[Notice] = []
        first = await swarm.start("first", HALVES[0], contacts=[], now_ms=off_by(HOUR_MS))
        nursery.start_soon(watch, first.swarm, told.append)
        for name in "abc":
            await swarm.start(name, HALVES[0], contacts=first.network.addresses)
        await trio.sleep(SOON_S)
        assert [each.event for each in told] == ["clock"]
        assert "ahead of" in told[0].text
        nursery.cancel_scope.cancel()


@simulated
async def test_a_clock_that_is_set_right_is_told_once_more() -> None:
    async with open_world(conditions=FAR) as swarm, trio.open_nursery() as nursery:
        await swarm.start("a", HALVES[0])
        await swarm.start("b", HALVES[1])
        clock = {"offset": HOUR_MS}
        told: list[Notice] = []
        node = await swarm.start("wrong", HALVES[0], now_ms=lambda: simulated_ms() + clock["offset"])
        nursery.start_soon(watch, node.swarm, told.append)
        await trio.sleep(SOON_S)
        clock["offset"] = 0
        await trio.sleep(3 * LIFETIME_S)
        assert [bool(each.fix) for each in told] == [True, False]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("offset_ms", [HOUR_MS, -HOUR_MS, 90_000, 40_000, 5_000])
@simulated
async def test_a_server_and_others_find_each_other_soon_after_its_clock_is_set_right(offset_ms: int) -> None:
    """NTP may set a clock back after the start of a server, which has numbered its announcements by then."""
    async with open_world(conditions=FAR) as swarm:
        other = await swarm.start("other", HALVES[0])
        clock = {"offset": offset_ms}
        node = await swarm.start("wrong", HALVES[1], now_ms=lambda: simulated_ms() + clock["offset"])
        await trio.sleep(LIFETIME_S)
        clock["offset"] = 0
        await trio.sleep(2 * LIFETIME_S)
        for each in (node, other):
            assert each.knows == {node.peer, other.peer}
        assert node.swarm.double is None


@pytest.mark.parametrize(("offset_ms", "words"), [(HOUR_MS, "3600.0 s ahead of"), (-HOUR_MS, "3600.0 s behind")])
@simulated
async def test_a_client_with_a_wrong_clock_is_told_so_instead_of_blocks_that_nobody_holds(
    offset_ms: int, words: str
) -> None:
    async with open_world(conditions=FAR) as swarm:
        for half in HALVES:
            await swarm.start(f"server{half.start}", half)
        await trio.sleep(1)
        async with swarm.client(now_ms=off_by(offset_ms)) as (router, _):
            with pytest.raises(NoRoute, match=f"this machine's clock is {words} .* set the clock by NTP"):
                await router.find_any()


@simulated
async def test_a_client_is_told_which_server_has_the_wrong_clock() -> None:
    async with open_world(conditions=FAR) as swarm:
        await swarm.start("right", HALVES[0])
        await swarm.start("wrong", HALVES[1], now_ms=off_by(HOUR_MS))
        await trio.sleep(1)
        async with swarm.client() as (router, _):
            with pytest.raises(NoRoute, match=r"the clock of peer peer-wrong is off by \+3600.0 s"):
                await router.find_any()


@simulated
async def test_clocks_of_passers_by_are_not_kept_for_ever() -> None:
    async with open_world(conditions=FAR) as swarm:
        node = await swarm.start("server", HALVES[0], contacts=[])
        for number in range(100):
            async with swarm.client(name=f"client{number}", now_ms=off_by(HOUR_MS)):
                pass
        assert len(node.swarm.clock_offsets_ms) == 64
        await trio.sleep(200)
        assert not node.swarm.clock_offsets_ms
