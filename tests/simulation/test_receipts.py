"""Peers that lie about what they compute, in every way that receipts show; and honest ones, with nothing to fear."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode import _native
from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ClientPolicy, TrustPolicy
from llmnode.node.serve import session as serving
from llmnode.receipts.audit import audit
from llmnode.receipts.transcript import parse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Opened, OpenRequest, Result, pack, unpack
from llmnode.wire.push_messages import Pushed
from llmnode.wire.receipt import Receipt, is_proof, is_public, is_valid, profile_digest
from simulation.world import MODEL, ROW, Dialogue, World, pairs_of_servers, simulated
from unit.signers import signed

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.node.serve.session import ServerSession
    from llmnode.receipts.audit import Audit
    from llmnode.session.session import InferenceSession
    from llmnode.wire.frame import Buffer

WINDOW = TrustPolicy().unverified_steps


def served_by(swarm: World, peer: PeerId) -> ServerSession:
    (served,) = swarm.node(peer).server.sessions.values()
    return served


def audited(swarm: World, session: InferenceSession) -> Audit:
    """The audit that a third party makes of the transcript."""
    network = next(iter(swarm.nodes.values())).network
    assert session.receipts is not None
    exported = session.receipts.export(swarm.internet.network("client").sign)
    return audit(parse(json.dumps(exported).encode()), network.verify)


@simulated
async def test_a_session_that_loses_servers_leaves_a_transcript_without_a_gap() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        swarm.kill(str(session.route[1].peer).removeprefix("peer-"))
        await dialogue.step(3)
        await dialogue.go_back(5)
        await dialogue.step(2)
        await session.verify()
        assert session.receipts is not None
        assert session.receipts.verified == session.position
        found = audited(swarm, session)
        assert not found.problems
        assert len(found.parts) == 4


@simulated
async def test_a_server_that_signs_one_thing_and_pushes_another_is_convicted_by_its_own_signatures() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        liar = session.route[1].peer
        served = served_by(swarm, liar)
        push, receipt_of = served._push, served._signer.receipt

        async def push_another(frame: Frame, payload: Buffer, _meta: bytes) -> bool:
            other = bytes(len(payload))
            receipt = replace(receipt_of(frame, payload)[0], output_digest=_native.blake3_digest(other))
            receipt = signed(receipt, swarm.node(liar).network.sign)
            return await push(frame, other, pack(Pushed(receipt.input_digest, receipt.signature)))

        served._push = push_another  # type: ignore[method-assign]
        await dialogue.step(1)
        (recovery,) = session.recoveries
        assert recovery.lost == liar
        assert session.receipts is not None
        (conviction,) = session.receipts.convictions
        assert conviction.told.signer == liar
        swarm.kill(str(session.route[1].peer).removeprefix("peer-"))
        with pytest.raises(Exception, match="no peer holds blocks"):  # rather nobody than the convicted
            await session.step(bytes(8))


@simulated
async def test_a_bit_that_flips_on_the_way_convicts_nobody() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        served = served_by(swarm, session.route[1].peer)
        push = served._push

        async def flip(frame: Frame, payload: Buffer, meta: bytes) -> bool:
            return await push(frame, bytes([payload[0] ^ 1, *payload[1:]]), meta)

        served._push = flip  # type: ignore[method-assign]
        for _ in range(3):
            await dialogue.step(1)
        assert not session.recoveries
        assert session.receipts is not None
        assert not session.receipts.convictions


@simulated
async def test_a_step_that_is_pushed_again_in_place_of_the_next_convicts_nobody_and_harms_nobody() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        served = served_by(swarm, session.route[1].peer)
        push = served._push
        pushed: list[tuple[Frame, Buffer, bytes]] = []

        async def push_the_one_before(frame: Frame, payload: Buffer, meta: bytes) -> bool:
            pushed.append((frame, payload, meta))
            _, payload, meta = pushed[max(0, len(pushed) - 2)]
            return await push(frame, payload, meta)

        served._push = push_the_one_before  # type: ignore[method-assign]
        for _ in range(3):
            await dialogue.step(1)
        assert not session.recoveries


@simulated
async def test_a_server_that_does_not_sign_is_replaced_some_steps_later() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        liar = session.route[1].peer
        swarm.node(liar).network.sign = lambda _message: bytes(64)  # type: ignore[method-assign]
        for _ in range(2 * WINDOW + 1):
            await dialogue.step(1)
        assert [each.lost for each in session.recoveries] == [liar]
        found = audited(swarm, session)
        assert {each.peer for each in found.problems} == {liar}, "what it computed stays unsigned, and that is told"


@simulated
async def test_a_strict_session_takes_nothing_that_is_not_signed() -> None:
    async with pairs_of_servers() as swarm, swarm.session(ClientPolicy(trust=TrustPolicy(strict=True))) as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        liar = session.route[1].peer
        swarm.node(liar).network.sign = lambda _message: bytes(64)  # type: ignore[method-assign]
        await dialogue.step(1)
        assert [each.lost for each in session.recoveries] == [liar]
        assert session.receipts is not None
        assert session.receipts.verified == session.position
        assert not audited(swarm, session).problems


@simulated
async def test_a_server_that_sends_no_receipt_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        liar = session.route[2].peer
        link = served_by(swarm, liar).way.now
        send = link.send

        async def send_unsigned(frame: Frame) -> None:
            await send(replace(frame, meta=_without_signature(frame.meta)) if frame.length else frame)

        monkeypatch.setattr(link, "send", send_unsigned)
        await dialogue.step(1)
        assert [each.lost for each in session.recoveries] == [liar]


def _without_signature(meta: Any) -> bytes:
    result = serving.unpack(Result, meta)
    return pack(replace(result, signature=b""))


@pytest.mark.parametrize("is_old", [False, True], ids=["", "protocol 1"])
@simulated
async def test_a_client_that_uses_a_name_twice_has_no_proof_against_an_honest_server(is_old: bool) -> None:
    async with pairs_of_servers() as swarm:
        node = next(iter(swarm.nodes.values()))
        served, framer = node.server.served, swarm.internet.network("framer")
        assert served is not None
        swarm.internet.old |= {framer.peer} if is_old else set()
        span, session = served.worker.span, SessionId(b"f" * 16)
        request = OpenRequest(
            MODEL.digest, span.start, span.end, 8, MODEL.precision.name, "raw", "interactive", keep_outputs=False
        )
        link = await framer.dial(node.network.addresses[0])
        signed_by_server: list[Receipt] = []
        for payload in (bytes([1] * ROW), bytes([2] * ROW)):
            await link.send(Frame(FrameType.OPEN, session, meta=pack(request)))
            opened = await link.receive()
            assert opened.type is FrameType.OPENED and (opened.meta == b"") == is_old
            nonce = b"" if is_old else unpack(Opened, opened.meta).nonce
            await link.send(Frame(FrameType.STEP, session, length=1, payload=payload))
            result = unpack(Result, (await link.receive()).meta)
            signed_by_server.append(
                Receipt(
                    node.network.peer,
                    framer.peer,
                    session,
                    Epoch(0),
                    Step(0),
                    0,
                    1,
                    span,
                    profile_digest(MODEL.profile, "raw"),
                    result.input_digest,
                    result.output_digest,
                    result.signature,
                    nonce,
                )
            )
            await link.send(Frame(FrameType.CLOSE, session))
            await trio.sleep(1)
        one, other = signed_by_server
        verify = node.network.verify
        assert is_valid(one, verify) and is_valid(other, verify)
        assert one.output_digest != other.output_digest
        assert is_proof(one, other, verify) == is_old
        assert is_public(one) == is_public(other) == (not is_old)
        await link.end("done")
