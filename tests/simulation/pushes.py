"""Frames by which peers push steps, or ask for the right to, and the memory that servers hold for them."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from llmnode.core.budget import Kind, Resource, Worth
from llmnode.core.ids import NO_SESSION, Epoch, SessionId, Step
from llmnode.core.priority import Priority
from llmnode.testing import peer_named
from llmnode.testing.link import MemoryLink
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, OpenRequest, pack
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields
from simulation.world import MODEL, ROW, SPANS, Dialogue, pairs_of_servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.ids import PeerId
    from llmnode.node.serve.session import ServerSession
    from llmnode.session.session import InferenceSession
    from llmnode.testing.world import ServingNode, World


def sessions_of(node: ServingNode) -> list[ServerSession]:
    return list(node.server.sessions.values())


def held(node: ServingNode, resource: Resource, peer: PeerId | None = None) -> int:
    """By all peers, or by one."""
    process = node.network.budget.process
    scopes = [process] if peer is None else [each for each in process.within(Kind.PEER) if each.name == peer]
    return sum(each.held[resource] for each in scopes)


def pushed_step(served: ServerSession, epoch: int = 0, number: int | None = None, length: int = 1) -> Frame:
    """A step for this session, of zeros, which is due unless another `number` is given."""
    stage = served.stage
    at = Epoch(epoch), stage._due if number is None else Step(number)
    return Frame(FrameType.STEP, stage.session, *at, stage.position, length, b"", bytes(length * ROW))


@asynccontextmanager
async def a_session(steps: int = 1) -> AsyncIterator[tuple[World, InferenceSession, Dialogue]]:
    async with pairs_of_servers() as swarm, swarm.session(max_length=120) as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        for _ in range(steps):
            await dialogue.step(3)
        yield swarm, session, dialogue


def open_frame(name: SessionId, number: int, max_length: int = 100) -> Frame:
    """An OPEN for one of the spans."""
    span = SPANS[number]
    fields = profile_fields(MODEL.profile)
    codec, word = Codec.RAW, Priority.INTERACTIVE.word
    request = OpenRequest(
        **fields,
        span_start=span.start,
        span_end=span.end,
        max_length=max_length,
        codec=codec,
        priority=word,
        keep_outputs=True,
    )
    return Frame(FrameType.OPEN, name, meta=pack(request))


def neighbours(
    name: SessionId, step: int, sender: str = "", receiver: str = "", session: SessionId | None = None
) -> Frame:
    names = sender and peer_named(sender), receiver and peer_named(receiver)
    request = Neighbours(*names, session or NO_SESSION, quiet=False, again=False)
    return Frame(FrameType.NEIGHBOURS, name, step=Step(step), meta=pack(request))


async def answers(link: MemoryLink, count: int) -> list[Frame]:
    return [await link.receive() for _ in range(count)]


def link_between(near: ServingNode, far: ServingNode) -> MemoryLink:
    """One that the former has opened."""
    return next(each for each in near.network.links if each.peer == far.peer and each.connection.worth is Worth.OURS)
