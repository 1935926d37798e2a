"""The blocks that a node serves, chosen by what it knows of the swarm. The choice itself is in `core/placement/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.placement.claims import counted
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import block_speeds
from llmnode.core.span import Span, parse_span

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.ports import WorkerSource
    from llmnode.swarm.membership import Swarm

AUTO = "auto"


async def choose_blocks(blocks: str, model: ModelInfo, source: WorkerSource, swarm: Swarm | None) -> Span:
    """The blocks that were asked for; of a number of them, those that the swarm, if there is one, needs most."""
    if ":" in blocks:
        return parse_span(blocks, model.blocks)
    length = int(blocks) if blocks != AUTO else await source.fitting_blocks()
    servers = [] if swarm is None else await servers_of(model, swarm)
    return choose_span(length, block_speeds(model.blocks, servers))


async def servers_of(model: ModelInfo, swarm: Swarm, *, draining: bool = False) -> list[PlacedServer]:
    """The servers of the model in this node's view, as far as placement believes them: see `counted`."""
    if not swarm.view.of_model(model.digest):
        await swarm.look_up(model.digest)
    of_profile = [each for each in swarm.view.of_model(model.digest) if each.offer.profile == model.profile]
    offers = [(each.peer, each.offer, swarm.state_age_s(each.peer)) for each in of_profile]
    return counted(offers, RebalancePolicy(), draining=draining)
