"""The blocks that a node serves, and their precision. `core/placement/` chooses, by what the node knows of the swarm.

Servers of several precisions are asked whether they answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import trio

from llmnode.core.announcement import PeerState
from llmnode.core.model import AUTO, EXACT, ModelInfo, Precision
from llmnode.core.placement.claims import before_moves, counted, of_weights
from llmnode.core.placement.joining import choose_span, choose_together
from llmnode.core.placement.own_precision import choose_own, describe_own, paced, prospects_of
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import block_speeds
from llmnode.core.policy import RoutePolicy
from llmnode.core.span import Span, parse_span
from llmnode.core.view import online
from llmnode.swarm.backers import Backers

if TYPE_CHECKING:
    from llmnode.core.model import PrecisionWish
    from llmnode.core.placement.own_precision import Candidate
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.node.serve.role import Role
    from llmnode.ports import WorkerSource
    from llmnode.swarm.membership import Swarm

BlockRates: TypeAlias = Callable[[ModelInfo, Sequence[Precision]], Awaitable[Mapping[Precision, float]]]
"""The tokens a second of one block, in those precisions in which this machine measured them in a former run."""


async def choose_blocks(blocks: str, model: ModelInfo, source: WorkerSource, swarm: Swarm | None) -> Span:
    """The blocks that were asked for; of a number of them, those that the swarm, if there is one, needs most."""
    asked = _asked(blocks, model)
    if isinstance(asked, Span):
        return asked
    length = await source.fitting_blocks() if asked is None else asked
    servers = [] if swarm is None else await servers_of(model, swarm)
    return choose_span(length, block_speeds(model.blocks, servers))


async def look_again(role: Role, swarm: Swarm, report: Callable[[str], None], policy: RebalancePolicy) -> None:
    """If the node loads its first blocks for long: have it load others that are better, now that it knows those that
    join with it.
    """
    await trio.sleep(policy.joins_together_s)
    model, me, span = role.model, swarm.peer, role.span
    others = [each for each in await servers_of(model, swarm) if each.peer != me]
    within_s = 2 * policy.joins_together_s  # for one that began sooner, this node was no newcomer beside it
    joining = {
        each.peer
        for each in of_weights(swarm.view.of_model(model.digest), model)
        if each.offer.state is PeerState.JOINING and swarm.state_age_s(each.peer) < within_s
    }
    better = choose_together(model.blocks, me, span, others, joining)
    if better != span and role.span == span and role.join_instead(better):
        report(f"reading blocks {better}, and not {span}: others that join now read those")


async def choose_precision(
    wish: PrecisionWish, blocks: str, model: ModelInfo, source: WorkerSource, swarm: Swarm, measured: BlockRates | None
) -> tuple[Precision, str]:
    """The best one by `choose_own`, of those that `wish` allows, and a line that says why.

    There are those that servers have for the model, and that of `model`, which suits the device. Servers are asked
    whether they answer: a stranger would decide otherwise. `measured`, if there is one, tells how fast this machine
    was in a former run.
    """
    if not swarm.view.of_model(model.digest):
        await swarm.look_up(model.digest)
    servers = _by_precision(model, swarm)
    allowed = [each for each in servers if wish.allows(each)]
    if not allowed:
        return model.precision, f"{model.precision.name}: nobody serves {model.name} yet, and it suits this device"
    asked = _asked(blocks, model)
    found = _holding(asked, await source.candidates(list(dict.fromkeys([model.precision, *allowed]))))
    if not found:
        return model.precision, f"{model.precision.name}: it suits this device, which cannot compute as the swarm does"
    of_interest = {EXACT, *(each.precision for each in found)}  # paces are shares of the speed in float32
    rates = await measured(model, list(of_interest)) if measured else {}
    candidates, unit_tokens_per_s = paced(found, rates, chain.from_iterable(servers.values()))
    backers = Backers(model, wish, swarm, lambda: online(swarm.view.of_model(model.digest)))
    met = await backers.answering({each.precision for each in candidates}, RoutePolicy().connect_timeout_s)
    span = asked if isinstance(asked, Span) else None
    prospects = prospects_of(model.blocks, candidates, servers, met, unit_tokens_per_s, span)
    chosen = choose_own(prospects)
    return chosen.precision, describe_own(chosen, prospects)


def _by_precision(model: ModelInfo, swarm: Swarm) -> dict[Precision, list[PlacedServer]]:
    """The other servers of the model that count, as far as they are believed.

    A claim is limited by those for all precisions: see `counted`.
    """
    of_model = [each for each in of_weights(swarm.view.of_model(model.digest), model) if each.peer != swarm.peer]
    known = {each.peer: each.offer for each in of_model if each.offer.profile.precision.is_known}
    servers: dict[Precision, list[PlacedServer]] = {}
    for server in counted([(peer, offer, swarm.state_age_s(peer)) for peer, offer in known.items()], RebalancePolicy()):
        servers.setdefault(known[server.peer].profile.precision, []).append(server)
    return servers


def _asked(blocks: str, model: ModelInfo) -> Span | int | None:
    """The value of --blocks: the blocks, or their number; None for as many as fit. Raises ConfigError."""
    if ":" in blocks:
        return parse_span(blocks, model.blocks)
    return None if blocks == AUTO else int(blocks)


def _holding(asked: Span | int | None, found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the number of blocks that was asked for. If there is memory in none, a load will say so."""
    if asked is None:
        return list(found)
    length = len(asked) if isinstance(asked, Span) else asked
    return [replace(each, blocks=length) for each in found if each.blocks >= length] or [
        replace(each, blocks=length) for each in found
    ]


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
