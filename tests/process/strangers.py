"""A real server, and strangers that connect to it from addresses of their own. Tests that attack it share it."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.peer.id import ID

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import Epoch, PeerId, SessionId, Step
from llmnode.core.policy import DialPolicy, LinkPolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.models.open_model import open_model
from llmnode.net.addresses import parse_peer
from llmnode.net.host import open_network
from llmnode.swarm.membership import wall_clock_ms
from llmnode.wire.announcement import pack_news, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, OpenRequest, Refusal, pack, unpack
from process.small_server import connected, expected_tokens, serve_small
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from libp2p.custom_types import StreamHandlerFn
    from libp2p.network.swarm import Swarm

    from llmnode.models.sources.folder import ModelFolder
    from llmnode.ports import Link
    from process.small_server import SmallClient, SmallServer

KV_TOKENS, CONTEXT = 400, 256
ANSWER_S = 30.0
PROMPT, NEW_TOKENS = [3, 1, 4, 1, 5], 4
STRANGER = "127.0.7.1"
"""In private networks each address is a group of its own. Honest clients come from another one."""


@dataclass(frozen=True)
class Served:
    """The server, and what it should answer."""

    server: SmallServer
    folder: ModelFolder
    model: Any  # as transformers types it

    @property
    def address(self) -> str:
        return self.server.address

    async def check(self, client: SmallClient) -> None:
        """Over a link that was there before."""
        assert await client.generate([PROMPT], NEW_TOKENS) == [expected_tokens(self.model, PROMPT, NEW_TOKENS)]

    def bystander(self) -> Any:
        return connected([self.address], self.folder)

    def open_frame(self, name: SessionId, max_length: int = 16) -> Frame:
        model = self.folder.info
        span, precision = (0, model.blocks), model.precision.name
        request = OpenRequest(model.digest, *span, max_length, precision, "raw", "interactive", keep_outputs=True)
        return Frame(FrameType.OPEN, name, meta=pack(request))

    def step_frame(self, name: SessionId, step: int, length: int = 1) -> Frame:
        rows = bytes(length * self.folder.info.row_bytes)
        return Frame(FrameType.STEP, name, Epoch(0), Step(step), step, length, payload=rows)

    def news(self, *announced: tuple[PeerId, str, Callable[[bytes], bytes]]) -> Frame:
        """Peers that say that they hold all blocks, with their addresses and their keys."""
        model, now_ms = self.folder.info, wall_clock_ms()
        state = PeerState.ONLINE, 1, KV_TOKENS, KV_TOKENS
        offer = Offer(model.name, model.profile, model.blocks, Span(0, model.blocks), *state)
        signed = [
            sign_announcement(Announcement(peer, (address,), now_ms, now_ms + 45_000, "llmnode/0", offer), sign)
            for peer, address, sign in announced
        ]
        payload = pack_news([each.signed for each in signed], [], SwarmPolicy())
        return Frame(FrameType.NEWS, meta=pack(Clock(now_ms)), payload=payload)


@contextmanager
def serve_to_strangers(folder: Path, errors: Path) -> Iterator[Served]:
    """A server that strangers attack, of a small model in this folder."""
    torch.set_num_threads(1)
    model = make_model("llama", tied=False, max_position_embeddings=CONTEXT)
    model.save_pretrained(folder)
    with serve_small(folder, Span(0, BLOCKS), KV_TOKENS, errors, forgives=False) as server:
        yield Served(server, open_model(str(folder)), model)


@asynccontextmanager
async def stranger(
    served: Served, source: str = STRANGER, listen: list[str] | None = None, describe: StreamHandlerFn | None = None
) -> AsyncIterator[Any]:
    """A network that is connected to the server from this address. It may have a handler of its own for identify."""
    dials = DialPolicy(burst=10**6, per_s=1e6, contact_burst=10**6, contact_per_s=1e6)
    async with open_network(listen or [], LinkPolicy(dials=dials)) as network:
        network.vouch([served.address])
        if describe is not None:
            network.host.set_stream_handler(IDENTIFY, describe)
        info = parse_peer(served.address)
        await cast("Swarm", network.host.get_network()).dial_addr(info.addrs[0], info.peer_id, (source, 0))
        yield network


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def identity() -> tuple[PeerId, Callable[[bytes], bytes]]:
    keys = create_new_key_pair()
    return PeerId(ID.from_pubkey(keys.public_key).to_base58()), keys.private_key.sign


async def answer(link: Link) -> Frame:
    with trio.fail_after(ANSWER_S):
        return await link.receive()


async def refusal(link: Link) -> Refusal:
    frame = await answer(link)
    assert frame.type is FrameType.REFUSAL, frame
    return unpack(Refusal, frame.meta)
