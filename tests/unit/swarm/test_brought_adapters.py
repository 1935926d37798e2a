"""A client brings an adapter to a server: how long that may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.ids import PeerId
from llmnode.core.span import Span
from llmnode.errors import PeerTimeout
from llmnode.swarm.brought_adapters import BYTES_PER_S, BroughtAdapters
from llmnode.swarm.uploads import Lane, Uploads
from llmnode.wire.adapter import make_adapter
from llmnode.wire.frame import Frame, FrameType

if TYPE_CHECKING:
    from llmnode.wire.frame import Buffer

PEER, BLOCKS, TIMEOUT_S = PeerId("server"), 8, 60.0
PART_BYTES = 4 * BYTES_PER_S
ADAPTER = make_adapter(bytes(32), {block: (bytes([block]) * PART_BYTES, PART_BYTES // 4) for block in range(BLOCKS)})


async def time_to_bring(part_s: float) -> float:
    """How long it takes when each part takes this time, one after the other."""
    one_by_one = trio.Lock()

    async def ask(_type: FrameType, answer: FrameType, timeout_s: float, _meta: bytes, _payload: Buffer) -> Frame:
        if answer is FrameType.LACKING:
            return Frame(answer, payload=b"".join(block.to_bytes(4, "little") for block in range(BLOCKS)))
        with trio.fail_after(timeout_s):
            async with one_by_one:
                await trio.sleep(part_s)
        return Frame(answer)

    async def nothing() -> None:
        pass

    since_s = trio.current_time()
    lane = Lane(Uploads(), nothing, lambda _: None)
    await BroughtAdapters(ask, PEER, lane).using(ADAPTER, Span(0, BLOCKS), TIMEOUT_S, nothing)
    return trio.current_time() - since_s


def test_a_server_that_answers_just_in_time_for_each_part_does_not_hold_a_client_for_that_long() -> None:
    async def check() -> None:
        since_s = trio.current_time()
        with pytest.raises(PeerTimeout, match="did not take the adapter"):
            await time_to_bring(TIMEOUT_S - 1)
        assert trio.current_time() - since_s == pytest.approx(TIMEOUT_S + BLOCKS * PART_BYTES / BYTES_PER_S, abs=1)

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_slow_upload_has_the_time_that_it_needs() -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(time_to_bring, PART_BYTES / BYTES_PER_S, clock=clock) == BLOCKS * PART_BYTES / BYTES_PER_S
