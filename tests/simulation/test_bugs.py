"""An unforeseen error in the middle of a session costs that session its server, and other sessions nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.errors import PeerRefused, PeerUnreachable
from llmnode.node.serve.links import log_bug
from llmnode.node.serve.server import Server
from llmnode.swarm.peer_connection import open_connection
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import OpenRequest, RefusalCode, pack
from llmnode.wire.payload import Codec
from simulation.world import MODEL, ROW, SPANS, Dialogue, kv_is_free, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from llmnode.testing import ServingNode

NAME, OTHER = (SessionId(letter * SESSION_ID_BYTES) for letter in (b"n", b"o"))
ANSWER_S = 5.0


def stumble(_self: Any, *_arguments: Any, **_named: Any) -> Any:
    raise KeyError("as told")


def break_down(node: ServingNode, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """From now on its executor stumbles, and the server does as a real one does."""
    monkeypatch.setattr(node.worker.executor, call, stumble)
    monkeypatch.setattr(node.server, "on_bug", log_bug)


def opening(name: SessionId) -> Frame:
    span = SPANS[0]
    asked = OpenRequest(
        MODEL.digest, span.start, span.end, 20, MODEL.precision.name, Codec.RAW, "interactive", keep_outputs=False
    )
    return Frame(FrameType.OPEN, name, meta=pack(asked))


def test_it_ends_the_session_alone_and_is_told_and_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @simulated
    async def main() -> None:
        async with pairs_of_servers() as swarm:
            async with swarm.session() as (session, _):
                dialogue = Dialogue(session, random.Random(1))
                await dialogue.step(20)
                bad = swarm.node(session.route[1].peer)
                with monkeypatch.context() as patch:
                    break_down(bad, patch, "forward")
                    await dialogue.step(1)
                (recovery,) = session.recoveries
                assert recovery.lost == bad.peer
                assert bad.name in swarm.nodes, "the server serves on"
                assert not bad.server.sessions
            await kv_is_free(swarm)

    main()
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "KeyError: 'as told'" in caplog.text
    assert "Traceback" in caplog.text
    assert "peer=peer-" in told.getMessage()


def test_the_client_hears_at_once_of_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    @simulated
    async def main() -> None:
        async with world() as swarm:
            node = await swarm.start("0a", SPANS[0])
            network = swarm.internet.network("client")
            async with open_connection(await network.dial(node.network.addresses[0])) as connection:
                await connection.ask(opening(NAME), FrameType.OPENED, ANSWER_S)
                break_down(node, monkeypatch, "forward")
                step = Frame(FrameType.STEP, NAME, length=1, payload=bytes(ROW), value_bytes=4)
                with pytest.raises(PeerRefused, match="nobody foresaw: KeyError") as refused:
                    await connection.ask(step, FrameType.RESULT, ANSWER_S)
                assert refused.value.code == RefusalCode.COMPUTE_FAILED
                await kv_is_free(swarm)

    main()


def test_one_that_cannot_be_closed_is_over_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    @simulated
    async def main() -> None:
        async with world() as swarm:
            node = await swarm.start("0a", SPANS[0])
            network = swarm.internet.network("client")
            async with open_connection(await network.dial(node.network.addresses[0])) as connection:
                await connection.ask(opening(NAME), FrameType.OPENED, ANSWER_S)
                with monkeypatch.context() as patch:
                    break_down(node, patch, "apply")
                    ended = node.server.session_ended
                    await connection.tell(Frame(FrameType.CLOSE, NAME))
                    await ended.wait()
                assert not node.server.sessions
                await connection.ask(opening(OTHER), FrameType.OPENED, ANSWER_S)

    main()


def test_in_a_links_loop_it_ends_that_link_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @simulated
    async def main() -> None:
        async with world() as swarm:
            monkeypatch.setattr("llmnode.testing.world.raise_bug", log_bug)
            node = await swarm.start("0a", SPANS[0])
            address = node.network.addresses[0]
            good = await swarm.internet.network("good").dial(address)
            bad = await swarm.internet.network("bad").dial(address)
            async with open_connection(good) as other, open_connection(bad) as connection:
                await other.ask(opening(OTHER), FrameType.OPENED, ANSWER_S)
                await connection.ask(opening(NAME), FrameType.OPENED, ANSWER_S)
                with monkeypatch.context() as patch:
                    patch.setattr(Server, "describe", stumble)
                    with pytest.raises(PeerUnreachable):
                        await connection.describe(ANSWER_S)
                await other.describe(ANSWER_S)
                assert list(node.server.sessions) == [OTHER]

    main()
    assert "peer=peer-bad had here has ended" in caplog.text
    assert "KeyError: 'as told'" in caplog.text


def test_a_simulation_fails_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @simulated
    async def main() -> None:
        async with pairs_of_servers() as swarm, swarm.session() as (session, _):
            monkeypatch.setattr(swarm.node(session.route[0].peer).worker.executor, "forward", stumble)
            await Dialogue(session, random.Random(1)).step(1)

    with pytest.raises(KeyError, match="as told"):
        main()
