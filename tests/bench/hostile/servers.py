"""Hostile servers of `attacks.py`: each says that it is the fastest, takes sessions, and serves none."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import trio

from llmnode import _native
from llmnode.core.policy import SwarmPolicy
from llmnode.errors import LlmnodeError, single_error
from llmnode.swarm.membership import wall_clock_ms
from llmnode.wire.announcement import pack_news
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, Opened, Result, pack
from llmnode.wire.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bench.hostile.attacks import Attacker
    from llmnode.core.announcement import SignedBody
    from llmnode.core.span import Span
    from llmnode.net.link import Libp2pLink
    from llmnode.ports import Network

SLOW_S = 3.0


async def refuse(attacker: Attacker) -> None:
    """It refuses each step."""
    await _serve(attacker, lambda frame: refusal_of(frame, "bad-message", "because"))


async def evict(attacker: Attacker) -> None:
    """It says at each step that others need the KV of the session."""
    await _serve(attacker, lambda frame: refusal_of(frame, "unknown-session", "for others", 0.001))


async def hang(attacker: Attacker) -> None:
    """It answers no step."""
    await _serve(attacker, lambda _frame: None)


async def nan(attacker: Attacker) -> None:
    """It answers with numbers that are none."""
    await _serve(attacker, lambda frame: _result(frame, np.full(len(frame.payload) // 4, np.nan, "<f4")))


async def garbage(attacker: Attacker) -> None:
    """It answers with numbers at random."""
    await _serve(attacker, _garbage)


async def slow(attacker: Attacker) -> None:
    """It answers with numbers at random, after `SLOW_S`."""
    await _serve(attacker, _garbage, SLOW_S)


def _garbage(frame: Frame) -> Frame:
    return _result(frame, np.random.default_rng().standard_normal(len(frame.payload) // 4, np.float32))


def _result(frame: Frame, numbers: np.typing.NDArray[np.float32]) -> Frame:
    payload = numbers.tobytes()
    digests = _native.blake3_digest(frame.payload), _native.blake3_digest(payload)
    meta = pack(Result(1, 1, *digests, bytes(64), pushed=False, shown_input=b"", shown_signature=b""))
    header = frame.session, frame.epoch, frame.step, frame.start, frame.length
    return Frame(FrameType.RESULT, *header, meta, payload)


SERVERS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (refuse, evict, hang, nan, garbage, slow)


async def _serve(attacker: Attacker, answer: Callable[[Frame], Frame | None], after_s: float = 0.0) -> None:
    """A server of all blocks that computes nothing, which announces itself to each honest one."""
    network = attacker.network

    async def tell(link: Libp2pLink, _span: Span) -> None:
        while True:
            signed = attacker.announced(network.peer, network.addresses, network.sign).signed
            await link.send(news([signed]))
            await trio.sleep(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attacker.at_each, tell)
        await answer_links(network, answer, after_s)


async def answer_links(network: Network, answer: Callable[[Frame], Frame | None], after_s: float = 0.0) -> NoReturn:
    """Take each link and each session, and answer steps as `answer` says, if at all, `after_s` after they came."""

    async def serve_next(task_status: trio.TaskStatus[None]) -> None:
        with suppress(LlmnodeError), single_error():
            async with network.accept() as link:
                task_status.started()
                while True:
                    frame = await link.receive()
                    header = frame.session, frame.epoch, frame.step
                    match frame.type:
                        case FrameType.OPEN:
                            await link.send(Frame(FrameType.OPENED, *header, meta=pack(Opened(bytes(16)))))
                        case FrameType.NEIGHBOURS:
                            await link.send(Frame(FrameType.FORWARDED, *header))
                        case FrameType.TRUNCATE:
                            await link.send(Frame(FrameType.TRUNCATED, *header))
                        case FrameType.STEP:
                            await trio.sleep(after_s)
                            if (said := answer(frame)) is not None:
                                await link.send(said)

    async with trio.open_nursery() as nursery:
        while True:
            await nursery.start(serve_next)


def news(announced: Sequence[SignedBody]) -> Frame:
    """The announcements, as a peer passes them on."""
    payload = pack_news(announced, [], SwarmPolicy())
    return Frame(FrameType.NEWS, meta=pack(Clock(wall_clock_ms())), payload=payload)
