"""A node moves to the blocks where it helps most, while others come and go. `core/placement/rebalancing.py` decides."""

from __future__ import annotations

import logging
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.rebalancing import Rebalancer
from llmnode.core.serving.node_life import Moving, Online
from llmnode.errors import AdapterError, ConfigError, ModelError, PeerError, PeerRefused, WorkerLost
from llmnode.node.serve.placing import servers_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.placement.rebalancing import Decision
    from llmnode.node.serve.role import Role
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.peer_connection import PeerConnection

    TryPace = Callable[[PeerConnection, Announcement, ModelInfo, float], Awaitable[float | None]]
    """See `session/pace.py`: tokens a second, or None if the server takes no trial. The last argument is our upload."""

log = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 5.0
"""A server that a node relies on answers within this time, or is taken for absent."""
LOOKS_EVERY_S = 5.0
"""While a node loads other blocks, it checks this often whether it is still to move."""


async def rebalance(
    me: PeerId,
    role: Role,
    swarm: Swarm,
    report: Callable[[str], None] = lambda _line: None,
    policy: RebalancePolicy | None = None,
    rng: random.Random | None = None,
    paper_gain: float | None = None,
    try_pace: TryPace | None = None,
) -> None:
    """Move now and then, until cancelled. `report` is told of each move in a line.

    With `paper_gain` the node moves by the paper's rule, for this share more throughput. With `try_pace` it tries the
    speeds of servers on which blocks rest, once it knows its own line.
    """
    model, policy = role.model, policy or RebalancePolicy()
    policy = policy if paper_gain is None else replace(policy, paper_gain=paper_gain)
    rebalancer = Rebalancer(me, model.blocks, rng or random.Random(), policy, by_paper=paper_gain is not None)
    async with trio.open_nursery() as beside, trio.open_nursery() as trials:
        beside.start_soon(_look_for_absent, rebalancer, role, swarm, policy.check_every_s)
        while True:
            if await _sees_new_gap(rebalancer, role, swarm) or not isinstance(role.state, Online):
                continue  # while there is a gap, the pause is shorter
            servers = await servers_of(model, swarm, draining=True)
            decision = rebalancer.decide(servers, trio.current_time())
            absent = await _note_absent(decision.confirm, rebalancer, swarm)
            tries = [peer for peer in decision.tries if peer not in absent]
            if try_pace is not None and role.network.upload_bytes_per_s and not trials.child_tasks:
                trials.start_soon(_note_paces, tries, rebalancer, role, swarm, try_pace)
            if decision.span is None or absent:
                continue
            servers = await servers_of(model, swarm, draining=True)  # others may be about to leave by now
            is_same = rebalancer.decide(servers, trio.current_time()).span == decision.span
            if not is_same or not isinstance(role.state, Online):
                continue
            rebalancer.note_move(trio.current_time())
            report(f"moving from blocks {role.span} to {decision.span}, where the swarm needs this node more")
            await _move(decision, rebalancer, role, swarm, report)


async def _move(
    decision: Decision, rebalancer: Rebalancer, role: Role, swarm: Swarm, report: Callable[[str], None]
) -> None:
    """Move, unless it turns out on the way that the swarm needs the node where it is."""
    wanted = decision.span
    assert wanted is not None

    async def holders() -> Sequence[PeerId] | None:
        servers = await servers_of(role.model, swarm, draining=True, wanted=wanted)
        return rebalancer.confirm(servers, wanted, trio.current_time())

    async def confirm() -> bool:
        asked = await holders()
        if asked is None or await _note_absent(asked, rebalancer, swarm):
            return False
        return await holders() is not None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, holders, role)
        try:
            if not await role.change_span(wanted, in_haste=decision.at_once, confirm=confirm):
                report(f"staying with blocks {role.span}: the swarm does not need this node elsewhere any more")
        except (AdapterError, ConfigError, ModelError, WorkerLost) as error:
            if not role.is_leaving:  # else it was told to
                log.warning("no move span=%s: %s", wanted, error)
                rebalancer.note_failed(wanted, trio.current_time())
        nursery.cancel_scope.cancel()


async def _watch(holders: Callable[[], Awaitable[Sequence[PeerId] | None]], role: Role) -> None:
    """Have the node stay when the reason for its move is gone while it still loads, until cancelled."""
    while True:
        await trio.sleep(LOOKS_EVERY_S)
        if isinstance(role.state, Moving) and await holders() is None:
            role.stay()


async def _note_absent(peers: Sequence[PeerId], rebalancer: Rebalancer, swarm: Swarm) -> Sequence[PeerId]:
    """Note those of the peers that do not answer, and return them."""
    absent = await _absent(await _absent(peers, swarm), swarm)  # once may be chance
    for peer in absent:
        rebalancer.note_absent(peer, trio.current_time())
    return absent


async def _look_for_absent(rebalancer: Rebalancer, role: Role, swarm: Swarm, every_s: float) -> None:
    """Ask some of those that were absent, until cancelled: a server that has begun anew counts again.

    While the node loads other blocks it looks sooner: it may have been such a server that they are missing from.
    """
    looks_s = trio.current_time() + every_s
    while True:
        await trio.sleep(LOOKS_EVERY_S)
        if isinstance(role.state, Moving) or trio.current_time() >= looks_s:
            looks_s = trio.current_time() + every_s
            asked = rebalancer.absent_of(each.peer for each in swarm.view.of_model(role.model.digest))
            for peer in {*asked}.difference(await _absent(asked, swarm)):
                rebalancer.note_present(peer)


async def _note_paces(
    peers: Sequence[PeerId], rebalancer: Rebalancer, role: Role, swarm: Swarm, try_pace: TryPace
) -> None:
    """Try one after the other: together they would share our line. No decision waits for them: they may hang."""
    for peer in peers:
        announced = next((each for each in swarm.view.of_model(role.model.digest) if each.peer == peer), None)
        if announced is None or not announced.addresses:
            continue
        shown: float | None = None
        with suppress(PeerError, ConfigError):
            connection = await swarm.connect(announced.addresses)
            shown = await try_pace(connection, announced, role.model, role.network.upload_bytes_per_s)
        log.info("tried peer=%s: %s tokens/s", peer, shown)
        rebalancer.note_pace(peer, shown, trio.current_time())


async def _sees_new_gap(rebalancer: Rebalancer, role: Role, swarm: Swarm) -> bool:
    """Pauses until the next decision, or until nobody serves some block any more."""
    servers = await servers_of(role.model, swarm, draining=True)
    had_gap = rebalancer.sees_gap(servers)
    with trio.move_on_after(rebalancer.pause_s(servers)):
        while had_gap or not rebalancer.sees_gap(servers):
            await swarm.wait_changed()
            servers = await servers_of(role.model, swarm, draining=True)
        return True
    return False


async def _absent(peers: Sequence[PeerId], swarm: Swarm) -> Sequence[PeerId]:
    """Those of the peers that do not answer. All are asked at once."""
    absent: list[PeerId] = []

    async def ask(peer: PeerId) -> None:
        if not await _answers(peer, swarm):
            absent.append(peer)

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(ask, peer)
    return absent


async def _answers(peer: PeerId, swarm: Swarm) -> bool:
    announced = next((each for each in swarm.view.announcements() if each.peer == peer), None)
    if announced is None:
        return False
    if not announced.addresses:
        return True  # it has just lost its relays: nobody knows
    with trio.move_on_after(ANSWERS_WITHIN_S):
        try:
            await swarm.meet(*announced.addresses)
        except PeerRefused:
            return True
        except (PeerError, ConfigError) as error:
            log.debug("no answer peer=%s: %s", peer, error)
        else:
            return True
    return False
