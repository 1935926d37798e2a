"""A node moves to the blocks where it helps most, while others come and go. `core/placement/rebalancing.py` decides."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import trio

from llmnode.core.placement.rebalancing import Rebalancer
from llmnode.core.serving.node_life import Online
from llmnode.errors import ConfigError, ModelError, PeerError, PeerRefused, WorkerLost
from llmnode.node.serve.placing import servers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.placement.policy import RebalancePolicy
    from llmnode.node.serve.role import Role
    from llmnode.swarm.membership import Swarm

log = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 5.0
"""A server that a node relies on answers within this time, or is taken for absent."""


async def rebalance(
    me: PeerId,
    role: Role,
    swarm: Swarm,
    report: Callable[[str], None] = lambda _line: None,
    policy: RebalancePolicy | None = None,
    rng: random.Random | None = None,
) -> None:
    """Move now and then, until cancelled. `report` is told of each move in a line."""
    model = role.model
    rebalancer = Rebalancer(me, model.blocks, rng or random.Random(), policy)
    while True:
        if await _sees_new_gap(rebalancer, role, swarm) or not isinstance(role.state, Online):
            continue  # while there is a gap, the pause is shorter
        servers = await servers_of(model, swarm, draining=True)
        decision = rebalancer.decide(servers, trio.current_time())
        absent = await _absent(await _absent(decision.confirm, swarm), swarm)  # once may be chance
        for peer in absent:
            rebalancer.note_absent(peer, trio.current_time())
        if decision.span is None or absent or not isinstance(role.state, Online):
            continue
        servers = await servers_of(model, swarm, draining=True)  # others may be about to leave by now
        if rebalancer.decide(servers, trio.current_time()).span != decision.span:
            continue
        rebalancer.note_move(trio.current_time())
        report(f"moving from blocks {role.span} to {decision.span}, where the swarm needs this node more")
        try:
            await role.change_span(decision.span, 0.0 if decision.at_once else None)
        except (ConfigError, ModelError, WorkerLost) as error:
            log.warning("no move span=%s: %s", decision.span, error)
            rebalancer.note_failed(decision.span, trio.current_time())


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
