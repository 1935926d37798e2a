"""Plans of hostile roles, drawn by a seed: printed by whatever fails, and cut down by hand."""

from __future__ import annotations

import os
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.testing.hostile.clients import DialBait, Flooder, KvHog, QueueStuffer, SlowReader, ViewStuffer
from llmnode.testing.hostile.servers import (
    Evictor,
    Framer,
    GarbagePusher,
    NanServer,
    Refuser,
    Silent,
    SpeedLiar,
    SybilMajority,
)
from llmnode.testing.simulate import say_if_it_fails

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.testing.hostile.role import HostileRole
    from llmnode.testing.world import World

SERVERS: tuple[type[HostileRole], ...] = (
    SpeedLiar,
    Silent,
    Refuser,
    Evictor,
    GarbagePusher,
    Framer,
    NanServer,
    SybilMajority,
)
CLIENTS: tuple[type[HostileRole], ...] = (SlowReader, Flooder, ViewStuffer, DialBait, KvHog, QueueStuffer)
ALL_ROLES = (*SERVERS, *CLIENTS)
SETTLE_S = 1.5
"""By then hostile servers are in all views, and hostile clients have begun."""


@dataclass(frozen=True, slots=True)
class HostilePlan:
    """The roles that are played together. Each kind is in it once, or not at all."""

    roles: tuple[HostileRole, ...]

    @classmethod
    def draw(cls, seed: int, kinds: Sequence[type[HostileRole]] = ALL_ROLES, most: int = 3) -> HostilePlan:
        """The same one for the same arguments. LLMNODE_ROLES=0,2 in the environment leaves only those of it."""
        rng = random.Random(f"hostile {seed}")
        chosen = rng.sample(kinds, min(len(kinds), rng.randint(1, most)))
        roles = tuple(kind.draw(rng) for kind in chosen)
        wanted = os.environ.get("LLMNODE_ROLES")
        return cls(roles if wanted is None else tuple(roles[int(each)] for each in wanted.split(",") if each))

    @property
    def identities(self) -> set[PeerId]:
        return {peer for role in self.roles for peer in role.identities}

    def __str__(self) -> str:
        """Python that makes it again."""
        return "\n".join(["HostilePlan(", "    (", *(f"        {role!r}," for role in self.roles), "    )", ")"])

    @asynccontextmanager
    async def upon(self, world: World) -> AsyncIterator[None]:
        """Have them played meanwhile. Hostile servers are there at the beginning."""
        say_if_it_fails(f"with LLMNODE_ROLES=0,1,... of its hostile roles alone, which are:\n{self}")
        async with trio.open_nursery() as nursery:
            for role in self.roles:
                nursery.start_soon(role.play, world)
            await trio.sleep(SETTLE_S)
            yield
            nursery.cancel_scope.cancel()
