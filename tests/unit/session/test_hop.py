"""A hop and its peer: how long the client waits for the answers to several requests."""

from __future__ import annotations

import pytest
import trio

from llmnode.core.ids import Epoch, Step
from llmnode.core.policy import ClientPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, PeerTimeout
from llmnode.session.hop import SessionHop
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import EXACT_MODEL, open_internet, simulated
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from llmnode.wire.session_terms import SessionTerms

TERMS = SessionTerms(EXACT_MODEL, 10, Codec.RAW, ClientPolicy())
OPENS_S = 9.0
REFUSES_S = 5.0


@pytest.mark.parametrize("refuses", [True, False])
@simulated
async def test_an_error_counts_the_waits_for_all_answers_of_several_requests(refuses: bool) -> None:
    """The requests are sent at once. Otherwise each answer could be late without being too late."""
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        async with (
            open_connection(await client.dial(server.addresses[0])) as connection,
            server.accept() as link,
            trio.open_nursery() as nursery,
        ):

            async def answer() -> None:
                opening, telling = await link.receive(), await link.receive()
                await trio.sleep(OPENS_S)
                await link.send(Frame(FrameType.OPENED, opening.session, opening.epoch, opening.step))
                if refuses:
                    await trio.sleep(REFUSES_S)
                    await link.send(refusal_of(telling, RefusalCode.BUSY, "no memory"))

            nursery.start_soon(answer)
            hop = SessionHop(Hop(server.peer, Span(0, EXACT_MODEL.blocks)), connection, TERMS)
            telling = hop.set_neighbours(None, None, Epoch(0), Step(1), 0.0, quiet=False)
            assert telling is not None
            with pytest.raises(PeerError) as raised:
                await hop.carry_out(hop.open(Epoch(0)), telling)
            assert isinstance(raised.value, PeerRefused if refuses else PeerTimeout)
            waited_s = OPENS_S + (REFUSES_S if refuses else telling.timeout_s)
            assert raised.value.waited_s == pytest.approx(waited_s, abs=0.1)
