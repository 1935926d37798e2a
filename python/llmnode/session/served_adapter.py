"""A router over the servers that announce an adapter, which the client names and need not have."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.served_adapters import find_adapter
from llmnode.errors import ConfigError
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router

if TYPE_CHECKING:
    from llmnode.core.served_adapters import ServedAdapter

log = logging.getLogger(__name__)

NAMED = 4
"""A message names at most this many peers."""


async def with_served_adapter(router: Router, wanted: str) -> Router:
    """A router like `router`, all of whose sessions have the adapter of the name or digest `wanted`.

    It uses only servers that announce the adapter's digest. They refuse the digest of any other adapter. That they
    compute with its weights cannot be checked, which is logged as a warning. Raises ConfigError if nobody announces it,
    or several have that name, and NoRoute or a PeerError as `find_any` does.
    """
    finder = router.finder
    served = await _find(router, wanted)
    model = replace(finder.model, adapter=bytes(served.adapter.digest))
    found = Router(PeerFinder(model, finder.pool, finder.swarm, finder.policy, finder.rng, finder.run))
    await found.find_any()
    peers = ", ".join(each.peer for each in served.servers[:NAMED])
    log.warning(
        "adapter %s, digest %s: only these servers say that they have its weights, which cannot be checked here: %s",
        served.adapter.name, served.adapter.digest.hex(), peers,
    )  # fmt: skip
    return found


async def _find(router: Router, wanted: str) -> ServedAdapter:
    finder = router.finder

    def now() -> ServedAdapter:
        usable = [each for each in finder.swarm.view.announcements() if finder.policy.route.may_use(each.peer)]
        return find_adapter(wanted, usable, finder.model.profile, finder.swarm.met_in())

    try:
        return now()
    except ConfigError:
        await finder.look_up()
        return now()
