"""A session that closes tells all of its servers at once: one that takes nothing holds up no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.wire.frame import Frame, FrameType
from simulation.beams import opened, step_all
from simulation.chaos import POLICY
from simulation.world import pairs_of_servers, simulated

if TYPE_CHECKING:
    from llmnode.session.hop import SessionHop


def takes_no_goodbye(hop: SessionHop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outbox is full, as that of a peer that reads too slowly."""
    tell = hop.connection.tell

    async def wait_for_space(frame: Frame, *arguments: Any) -> None:
        if frame.type is FrameType.CLOSE:
            await trio.sleep_forever()
        await tell(frame, *arguments)

    monkeypatch.setattr(hop.connection, "tell", wait_for_space)


@pytest.mark.parametrize("how", ["closed", "let go"])
def test_a_server_that_takes_nothing_holds_up_no_goodbye_to_others(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @simulated
    async def main() -> None:
        async with pairs_of_servers() as swarm, swarm.client(POLICY) as (router, _), opened(router, 1) as (dialogue,):
            await step_all([dialogue])
            session, hops = dialogue.session, tuple(dialogue.session._hops.hops)
            takes_no_goodbye(hops[0], monkeypatch)
            others = [swarm.node(hop.hop.peer).server for hop in hops[1:]]
            assert all(server.sessions for server in others)
            async with trio.open_nursery() as nursery:
                began_s = trio.current_time()
                nursery.start_soon(session.close if how == "closed" else session._hops.let_go)
                await trio.sleep(1)
                assert not any(server.sessions for server in others)
            assert trio.current_time() - began_s == pytest.approx(POLICY.open_timeout_s)

    main()
