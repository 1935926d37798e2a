"""A server that has served for long, and then never gives one kind of answer, is given up soon, whatever the answer."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, Dialogue, open_world, seeds, simulated
from llmnode.wire.frame import FrameType
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.testing import World
    from llmnode.wire.frame import Frame

SPANS = {"0a": Span(0, 3), "0b": Span(0, 3), "1a": Span(3, 6), "1b": Span(3, 6)}
WITHIN_S = 17.0
"""A step at a known hop may take 15 s more than 20 times what it took (`ClientPolicy.step_patience_s`)."""


@pytest.mark.parametrize("withheld", ["RESULT", "TRUNCATED", "FORWARDED", "REPLAYED", "FORKED"])
@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_a_session_goes_on_soon_without_a_server_that_withholds(withheld: str, seed: int) -> None:
    async with open_world(seed, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        for name, span in SPANS.items():
            await world.start(name, span)
        await trio.sleep(5)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(world.client())
            session, copy = [await stack.enter_async_context(client.router.open_session(64, Codec.RAW)) for _ in "12"]
            dialogue = Dialogue(session, random.Random(seed))
            for positions in (9, *[1] * 20):
                await dialogue.step(positions)
            mute(world, session.route[0].peer, FrameType[withheld])
            began_s = trio.current_time()
            match withheld:
                case "FORKED":
                    await session.fork([copy])
                    assert copy.position == session.position
                case "REPLAYED":  # the hop before has what the next one needs
                    world.kill(str(session.route[1].peer).removeprefix("peer-"))
                case "TRUNCATED":
                    await dialogue.go_back(4)
                case "FORWARDED":
                    session._hops.hops[0].pushing.is_trusted = False
                    session._state.unsettle()
                case _:
                    pass
            await dialogue.step(1)
            took_s = trio.current_time() - began_s
            assert took_s > 1, "it was withheld"
            assert took_s < WITHIN_S + (LinkPolicy().silence_s if withheld == "REPLAYED" else 0)
            assert session.recoveries or withheld == "FORKED"


def mute(world: World, peer: PeerId, withheld: FrameType) -> None:
    """From now on the server never sends an answer of this type."""

    def withhold(_peer: PeerId, frame: Frame) -> list[Frame]:
        return [] if frame.type is withheld else [frame]

    world.node(peer).network.tamper = withhold
