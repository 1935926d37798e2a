"""The memory of a node under attack grows by less than its stated figure (`BudgetPolicy.memory_bytes`)."""

from __future__ import annotations

import itertools
import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
import torch
import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamError
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.utils.varint import encode_uvarint

from llmnode.client.ends import SharedEnds
from llmnode.client.generate import next_token
from llmnode.core.ids import NO_SESSION, SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.model import FP32_BYTES
from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerError
from llmnode.models.open_model import open_model
from llmnode.net.addresses import parse_peer
from llmnode.net.circuit_wire import send
from llmnode.net.host import LINK_PROTOCOL, open_network
from llmnode.net.select import open_unanswered
from llmnode.wire.adapter import make_adapter
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType, encode
from llmnode.wire.messages import PROMPTS, Clock, OpenRequest, Replay, pack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec
from process.small_server import connected, expected_tokens, serve_small
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from libp2p.abc import INetStream
    from libp2p.network.swarm import Swarm

    from llmnode.core.model import ModelInfo

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1 << 20
POLICY = LinkPolicy()
FIGURE_BYTES = 128 * MIB
"""Less than usual, so that the attacks fill it in this time."""
ATTACK_S = 8.0
ADDRESSES = 16
CONTEXT = 4096
KV_TOKENS = 16_384
DESCRIBED, WARMED_UP = 24, 4
"""The identities that describe themselves, and those after which the memory is looked at first."""
PROMPT, NEW_TOKENS = [3, 1, 4, 1, 5], 10
ENDS = (BaseLibp2pError, StreamError, MuxedStreamError, PeerError, OSError, trio.TooSlowError)
"""The server may refuse whatever it likes."""


class Attack:
    """From several addresses, each time under another identity."""

    def __init__(self, address: str, model: ModelInfo) -> None:
        self._address = address
        self._model = model
        self._sources = itertools.cycle(f"127.0.{number}.1" for number in range(1, ADDRESSES + 1))

    async def run(self) -> None:
        kinds = [(self.unfinished_frames, 6), (self.unread_results, 6), (self.unread_views, 2), (self.records, 2)]
        kinds += [(self.prompts, 3), (self.passes, 2), (self.adapters, 2), (self.descriptions, 2)]
        async with trio.open_nursery() as nursery:
            for attack, count in [*kinds, (self.idle, 3)]:
                for _ in range(count):
                    nursery.start_soon(self._repeat, attack)

    async def _repeat(self, attack: Callable[[Any], Awaitable[None]]) -> None:
        while True:
            try:
                async with self.connected() as network:
                    await attack(network)
            except* ENDS:
                await trio.sleep(0.1)

    @asynccontextmanager
    async def connected(self, describes: Callable[[INetStream], Awaitable[None]] | None = None) -> AsyncIterator[Any]:
        async with open_network([], POLICY) as network:
            network.vouch([self._address])
            network.host.set_stream_handler(IDENTIFY, describes or describe)
            info = parse_peer(self._address)
            swarm = cast("Swarm", network.host.get_network())
            await swarm.dial_addr(info.addrs[0], info.peer_id, (next(self._sources), 0))
            yield network

    async def _open(self, network: Any, protocol: TProtocol = LINK_PROTOCOL) -> Any:
        return await open_unanswered(network.host, parse_peer(self._address).peer_id, protocol)

    async def unfinished_frames(self, network: Any) -> None:
        """Several links, each with the largest frame but for its end, and heartbeats."""
        payload = bytes(POLICY.piece_bytes)
        whole = encode(Frame(FrameType.STEP, name(), length=1, payload=bytes(POLICY.max_payload_bytes)), POLICY)
        streams = [await self._open(network) for _ in range(4)]
        pieces = len(whole) // len(payload)
        for number in range(pieces):
            piece = whole[number * len(payload) : (number + 1) * len(payload)]
            for stream in streams:
                await stream.write(encode(Frame(FrameType.PIECE, payload=piece), POLICY))
        while True:
            for stream in streams:
                await stream.write(encode(Frame(FrameType.HEARTBEAT), POLICY))
            await trio.sleep(1)

    async def unread_results(self, network: Any) -> None:
        """Many sessions over one link: their steps, and then their results again and again. Nothing is read."""
        stream = await self._open(network)
        rows = 512
        payload = bytes(rows * self._model.row_bytes)
        sessions = [name() for _ in range(8)]
        for session in sessions:
            await self._send(stream, self._open_frame(session, CONTEXT))
            for step in range(3):
                await self._send(stream, step_frame(session, step, step * rows, rows, payload))
        for number in itertools.count():
            frame = Frame(
                FrameType.REPLAY, sessions[number % 8], Epoch(0), Step(number), 0, rows, pack(Replay(push=False))
            )
            await self._send(stream, frame)
            await self._send(stream, self._open_frame(name(), CONTEXT))

    async def unread_views(self, network: Any) -> None:
        stream = await self._open(network)
        for number in itertools.count():
            await self._send(stream, Frame(FrameType.VIEW, step=Step(number), meta=pack(Clock(0)), payload=b"\x80"))

    async def records(self, network: Any) -> None:
        """Providers with 6,000 addresses each, under new keys."""
        stream = await self._open(network, TProtocol("/ipfs/kad/1.0.0"))
        for number in itertools.count():
            request = Message(type=Message.ADD_PROVIDER, key=random.Random(number).randbytes(100))
            addresses = [b"\x04\x7f\x00\x00\x01\x06\x0f\xa1"] * 6000
            request.providerPeers.append(Message.Peer(id=network.host.get_id().to_bytes(), addrs=addresses))
            await send(stream.muxed_stream, request)

    async def descriptions(self, network: Any, times: int = 8) -> None:
        """Nobody has asked for them; and each identity describes itself at length when it connects."""
        for _ in range(times):
            with suppress(*ENDS):
                stream = await self._open(network, ID_PUSH)
                await stream.write(description(MIB - 100))
                await stream.close()

    async def prompts(self, network: Any) -> None:
        """Sessions with deep prompts of 2,048 positions, which wait for KV."""
        stream, positions = await self._open(network), 2048
        prompts = bytes(self._model.blocks * positions * FP32_BYTES * self._model.hidden_size)
        while True:
            frame = self._open_frame(name(), CONTEXT, {PROMPTS: [1, positions]})
            await self._send(stream, replace(frame, payload=prompts))

    async def passes(self, network: Any) -> None:
        stream, model, rows = await self._open(network), self._model, 2048
        request = Pass(model.digest, 0, model.blocks, model.precision.name, Codec.RAW, "training", [rows])
        for number in itertools.count():
            at = NO_SESSION, Epoch(0), Step(number)
            frame = Frame(FrameType.EVALUATE, *at, meta=pack(request), payload=bytes(rows * model.row_bytes))
            await self._send(stream, frame)

    async def adapters(self, network: Any) -> None:
        """Parts of 1 MiB that are named rightly, and that the worker refuses."""
        stream, model = await self._open(network), self._model
        for number in itertools.count():
            adapter = make_adapter(model.digest, {0: (random.Random(number).randbytes(MIB), MIB // FP32_BYTES)})
            use, part = AdapterUse(adapter.digest, 0, model.blocks), AdapterPart(adapter.digest, 0)
            at = SessionId(bytes(SESSION_ID_BYTES)), Epoch(0)
            await self._send(
                stream, Frame(FrameType.ADAPTER, *at, Step(number), meta=pack(use), payload=adapter.manifest.packed)
            )
            await self._send(
                stream, Frame(FrameType.PART, *at, Step(number), meta=pack(part), payload=adapter.parts[0])
            )

    async def idle(self, network: Any) -> None:
        """Connections and links that do nothing."""
        async with AsyncExitStack() as stack:
            for _ in range(10):
                await stack.enter_async_context(self.connected())
                await self._open(network)
            await trio.sleep_forever()

    async def _send(self, stream: Any, frame: Frame) -> None:
        await stream.write(encode(frame, POLICY))

    def _open_frame(self, session: SessionId, max_length: int, extensions: dict[str, Any] | None = None) -> Frame:
        model = self._model
        request = OpenRequest(
            model.digest,
            0,
            model.blocks,
            max_length=max_length,
            dtype=model.precision.name,
            codec="raw",
            priority="interactive",
            keep_outputs=True,
            extensions=extensions,
        )
        return Frame(FrameType.OPEN, session, meta=pack(request))


def step_frame(session: SessionId, step: int, start: int, length: int, payload: bytes) -> Frame:
    return Frame(FrameType.STEP, session, Epoch(0), Step(step), start, length, b"", payload)


async def describe(stream: INetStream, size: int = 60 << 10) -> None:
    await stream.write(description(size))
    await stream.close()


async def describe_at_length(asked: trio.Event, stream: INetStream) -> None:
    """It is the most that libp2p reads."""
    try:
        await describe(stream, MIB - 100)
    finally:
        asked.set()


def description(size: int) -> bytes:
    """Half of it is an address that nobody has named before, and half of it are short names of protocols."""
    protocols = [f"{number % 100:02}" for number in range(size // 2 // 4)]
    said = Identify(listen_addrs=[random.randbytes(size // 2 - 20)], protocols=protocols).SerializeToString()
    return encode_uvarint(len(said)) + said


def name() -> SessionId:
    return SessionId(random.randbytes(SESSION_ID_BYTES))


def test_memory_under_all_attacks_at_once_stays_below_its_figure_and_answers_are_right(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    torch.set_num_threads(1)
    model = make_model("llama", tied=False, max_position_embeddings=CONTEXT)
    model.save_pretrained(tmp_path / "small")
    folder = open_model(str(tmp_path / "small"))
    with serve_small(tmp_path / "small", Span(0, BLOCKS), KV_TOKENS, tmp_path / "stderr", FIGURE_BYTES) as server:
        node = psutil.Process(server.process.pid)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, node.memory_info().rss)
                await trio.sleep(0.1)

        async def attacked() -> int:
            """In one session that was opened before: KV has no fair shares yet."""
            tokens: list[int] = []
            async with (
                connected([server.address], folder) as client,
                client.session(CONTEXT // 4) as session,
                trio.open_nursery() as nursery,
            ):
                choice, _ = await next_token(session, ends := SharedEnds(client.ends), PROMPT)
                before = node.memory_info().rss
                nursery.start_soon(Attack(server.address, folder.info).run)
                nursery.start_soon(watch)
                until_s = trio.current_time() + ATTACK_S
                while trio.current_time() < until_s or len(tokens) < NEW_TOKENS:
                    tokens.append(choice.id)
                    choice, _ = await next_token(session, ends, [choice.id])
                    await trio.sleep(0.02)
                nursery.cancel_scope.cancel()
            print(f"{len(tokens)} tokens under attack")
            assert tokens == expected_tokens(model, PROMPT, len(tokens))
            return before

        before = trio.run(attacked)
        growth = most - before
        record_property("growth_mib", growth / MIB)
        print(f"the node grew by {growth / MIB:.0f} MiB of {FIGURE_BYTES / MIB:.0f}")
        assert FIGURE_BYTES / 8 < growth < FIGURE_BYTES
    server.check_no_traceback()


def test_what_identities_say_of_themselves_at_length_is_not_kept(tmp_path: Path) -> None:
    """Few of them fit into the time of all attacks, and into its figure."""
    torch.set_num_threads(1)
    make_model("llama", tied=False, max_position_embeddings=CONTEXT).save_pretrained(tmp_path / "small")
    folder = open_model(str(tmp_path / "small"))
    with serve_small(tmp_path / "small", Span(0, BLOCKS), KV_TOKENS, tmp_path / "stderr", FIGURE_BYTES) as server:
        node = psutil.Process(server.process.pid)

        async def attacked() -> int:
            attack = Attack(server.address, folder.info)
            before_bytes = 0
            for number in range(DESCRIBED):
                if number == WARMED_UP:
                    before_bytes = node.memory_info().rss
                asked = trio.Event()
                async with attack.connected(partial(describe_at_length, asked)) as network:
                    with trio.move_on_after(1):
                        await asked.wait()
                    await attack.descriptions(network, 1)
            return int(node.memory_info().rss) - before_bytes

        growth = trio.run(attacked)
        print(f"the node grew by {growth / MIB:.0f} MiB after {DESCRIBED} descriptions")
        assert growth < (DESCRIBED - WARMED_UP) * MIB / 2
    server.check_no_traceback()
