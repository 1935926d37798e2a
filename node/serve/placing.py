"""The blocks that a node serves, and their precision, by what it knows of the swarm. `core/placement/` chooses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.model import AUTO
from llmnode.core.placement.claims import before_moves, counted, of_weights
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import block_speeds
from llmnode.core.policy import RoutePolicy
from llmnode.core.span import Span, parse_span
from llmnode.core.view import online
from llmnode.swarm.backers import Backers

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo, Precision, PrecisionWish
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.ports import WorkerSource
    from llmnode.swarm.membership import Swarm


async def choose_blocks(blocks: str, model: ModelInfo, source: WorkerSource, swarm: Swarm | None) -> Span:
    """The blocks that were asked for; of a number of them, those that the swarm, if there is one, needs most."""
    if ":" in blocks:
        return parse_span(blocks, model.blocks)
    length = int(blocks) if blocks != AUTO else await source.fitting_blocks()
    servers = [] if swarm is None else await servers_of(model, swarm)
    return choose_span(length, block_speeds(model.blocks, servers))


async def choose_precision(wish: PrecisionWish, model: ModelInfo, swarm: Swarm) -> Precision:
    """The one that the swarm has, or nearly has, for the model, of those that `wish` allows; else that of `model`.

    So a newcomer completes what clients can use soonest, and does not begin another half of a model. Servers are asked
    whether they answer, if several precisions are announced: a stranger would decide otherwise.
    """
    if not swarm.view.of_model(model.digest):
        await swarm.look_up(model.digest)
    known = swarm.view.of_model(model.digest)
    joining = [each for each in known if each.offer.state is PeerState.JOINING]
    for servers in (online(known), joining):
        backers = Backers(model, wish, swarm, partial(list, servers))
        if served := await backers.decided(RoutePolicy().connect_timeout_s):
            return served[0].precision
    return model.precision


async def servers_of(
    model: ModelInfo, swarm: Swarm, *, draining: bool = False, wanted: Span | None = None
) -> list[PlacedServer]:
    """The servers of the model in this node's view, as far as placement believes them: see `counted`.

    For a node that moves to `wanted`, they are those of `before_moves`.
    """
    if not swarm.view.of_model(model.digest):
        await swarm.look_up(model.digest)
    of_model = of_weights(swarm.view.of_model(model.digest), model)
    of_profile = [each for each in of_model if each.offer.profile == model.profile]
    offers = [(each.peer, each.offer, swarm.state_age_s(each.peer)) for each in of_profile]
    offers = offers if wanted is None else before_moves(offers, swarm.peer, wanted)
    return counted(offers, RebalancePolicy(), draining=draining)
