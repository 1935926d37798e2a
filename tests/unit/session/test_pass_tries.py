"""The time for which a pass asks servers: that of one that is only overdue is none of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import PeerId
from llmnode.core.operations import NO_PROMPTS
from llmnode.core.policy import RecoveryPolicy
from llmnode.errors import PeerUnreachable, SessionLost
from llmnode.session.failures import Overdue
from llmnode.session.overflow import Given
from llmnode.session.pass_routes import PassRoutes
from llmnode.session.pass_tries import PassTries
from llmnode.testing import open_world, simulated
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POLICY = RecoveryPolicy()
WAITED_S = 2 * POLICY.timeout_s
"""A stranger was waited for longer than others are asked after a failure."""


@asynccontextmanager
async def failed_once() -> AsyncIterator[PassTries]:
    """A server has failed a pass just now: others are asked for a while."""
    async with open_world(0) as world, world.client() as (router, _):
        tries = PassTries(PassRoutes(router.finder), Given(None, NO_PROMPTS, [], Codec.RAW))
        tries.failed(PeerUnreachable("gone", peer=PeerId("first")))
        yield tries


async def overdue(tries: PassTries, number: int) -> None:
    await trio.sleep(WAITED_S)
    tries.failed(Overdue("others need much less", peer=PeerId(f"stranger {number}")), WAITED_S)


@simulated
async def test_the_time_of_overdue_strangers_is_none_of_the_search_except_of_many() -> None:
    for strangers in range(1, POLICY.failed_tries + 2):
        async with failed_once() as tries:
            for number in range(strangers):
                await overdue(tries, number)
            last = PeerUnreachable("gone", peer=PeerId("last"))
            if strangers <= POLICY.failed_tries:
                tries.failed(last)
                continue
            with pytest.raises(SessionLost):
                tries.failed(last)


@simulated
async def test_an_overdue_stranger_ends_no_search_is_not_banned_and_is_not_asked_again_for_this_pass() -> None:
    async with failed_once() as tries:
        await trio.sleep(WAITED_S)
        stranger = PeerId("stranger")
        tries.failed(Overdue("others need much less", peer=stranger))
        assert not tries._finder.records.bans.is_banned(stranger, trio.current_time())
        assert stranger in tries._failures.avoided(hurry=True)
