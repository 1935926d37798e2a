"""Asks servers for their descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import LinkPolicy
from llmnode.net.host import open_network
from llmnode.swarm.peer_connection import open_connection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.wire.messages import Description


def described(addresses: Sequence[str]) -> list[Description]:
    async def ask() -> list[Description]:
        async with open_network([], LinkPolicy()) as network:
            found = []
            for address in addresses:
                async with open_connection(await network.dial(address)) as connection:
                    found.append(await connection.describe(30.0))
            return found

    return trio.run(ask)


def positions(addresses: Sequence[str]) -> list[int]:
    """That each server has computed since it started."""
    return [each.positions for each in described(addresses)]
