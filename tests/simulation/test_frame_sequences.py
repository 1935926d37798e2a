"""A server takes OPEN, STEP, FORK, REPLAY, WANT, EVALUATE, VIEW, NEWS, PROBE and others in any order, mutated too.

It answers with the frames that the protocol knows, meets no error that nobody foresaw, and keeps nothing. By default
some thousands of sequences are drawn; LLMNODE_SEQUENCES=1000000 draws more, and LLMNODE_FIRST_SEQUENCE is the first.
LLMNODE_SEQUENCES_AT_ONCE=16 plays this number of them beside each other, which takes less time for each. Where KV is
scarce, the sessions of sequences beside each other have each other leave.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from trio._core._run import GLOBAL_RUN_CONTEXT

from llmnode.core.budget import Resource
from llmnode.core.ids import Epoch, PeerId, Step
from llmnode.core.policy import AdmissionPolicy, ServePolicy, TurnPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerUnreachable, RemoteProtocolError
from llmnode.node.serve.admission import MOVED
from llmnode.node.serve.next_hops import no_next_hop
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import ServerLink
from llmnode.swarm.membership import PLACE_BYTES, Swarm
from llmnode.swarm.pool import open_pool
from llmnode.testing import EXACT_MODEL, ExactWorker, open_internet, simulated
from llmnode.testing.simulate import simulated_ms
from llmnode.testing.world import raise_bug
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, RefusalCode, pack, unpack
from llmnode.wire.push_messages import PushLimit
from llmnode.wire.refusal import refusal_of
from simulation.frame_sequences import Sequence
from simulation.swarm_frames import SWARM, SwarmFrames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as SequenceOf

    from llmnode.core.budget import Scope
    from llmnode.core.ids import SessionId
    from llmnode.testing.network import MemoryNetwork

SEQUENCES = 3000
KV_TOKENS = {"enough KV": 200, "scarce KV": 5}
"""For each of the sequences that are played at once."""
SCARCE_AT_ONCE = 16
WARM_UP = 500
GROWTH_BLOCKS = 3000
"""Blocks of Python's allocator: caches fill up. A leak of one object a sequence is more, from some thousands on."""
GROWTH_PER_SEQUENCE = 1 / 4
"""The same where there are very many. The number goes up and down by some thousands with 16 sequences at once."""
ANSWERS = {
    FrameType.OPENED,
    FrameType.RESULT,
    FrameType.TRUNCATED,
    FrameType.FORWARDED,
    FrameType.REPLAYED,
    FrameType.FORKED,
    FrameType.LEASED,
    FrameType.RESUMED,
    FrameType.DESCRIPTION,
    FrameType.EVALUATED,
    FrameType.GRADIENT,
    FrameType.GRANT,
    FrameType.LACKING,
    FrameType.HELD,
    FrameType.REFUSAL,
    FrameType.PROBED,
    FrameType.NEWS,
}
POLICY = ServePolicy(
    requests=TurnPolicy(burst=1e9, per_s=1e9, shared_per_s=1e9),
    probes_burst=2,
    probes_per_s=10.0,
    lease_s=0.5,
    malformed_burst=10**9,
    unasked_burst=10**9,
    sessions_per_link=3,
    admission=AdmissionPolicy(first_positions=4),
)
"""Sessions of more than four positions grow."""
RECEIVER = PeerId("receiver")


@dataclass(eq=False)
class PlainLink:
    """The `Link` port of a server: frames come when they are told, and answers are counted."""

    peer: PeerId
    answers: Counter[str]
    scope: Scope
    relayed: bool = False
    relay_limit_bytes: int | None = None
    version: int = 2
    is_full: bool = False
    ended: bool = False
    _frames: Any = field(init=False)

    def __post_init__(self) -> None:
        self._told, self._frames = trio.open_memory_channel[Frame](1000)

    @property
    def group(self) -> str:
        return self.peer

    def tell(self, frame: Frame) -> None:
        if not self.ended:
            self._told.send_nowait(frame)

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        assert frame.type in ANSWERS, frame
        kind: str = frame.type.name
        if frame.type is FrameType.REFUSAL:
            refusal = unpack(Refusal, frame.meta)
            kind = "moved" if refusal.message == MOVED else RefusalCode(refusal.code)
        self.answers[kind] += 1
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_written(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Frame:
        try:
            frame: Frame = await self._frames.receive()
        except trio.EndOfChannel:
            raise PeerUnreachable("closed the stream", peer=self.peer) from None
        return frame

    async def wait_version(self) -> int:
        await trio.lowlevel.checkpoint()
        return self.version

    async def wait_direct(self) -> None:
        await trio.sleep_forever()

    async def end(self, reason: str) -> None:
        self.ended = True
        self.scope.close()
        self._told.close()
        await trio.lowlevel.checkpoint()


class NextHops:
    """Finds connections to a next hop. Pushes that nobody could read would end the test."""

    def __init__(self, answers: Counter[str]) -> None:
        self.numbers = count(1)
        self.returned: Counter[tuple[str, PeerId]] = Counter()
        self.answers = answers
        self.rng = random.Random("next hop")
        self.found: list[NextHop] = []

    def may_ask(self, _group: str, _peer: PeerId, _questions: int) -> bool:
        return self.rng.random() < 0.9

    async def find(self, peer: PeerId, _group: str, _since_s: float, *, again: bool) -> NextHop:
        await trio.lowlevel.checkpoint()
        if peer != RECEIVER or again:
            raise no_next_hop(peer)
        self.found.append(NextHop(self))
        return self.found[-1]


class NextHop:
    """A connection to a next hop, and what that says, asked or not.

    It grants pushes, or refuses to, or is too old to know them, or says nothing, or something that nobody understands.
    A frame that cannot be read ends the connection.
    """

    relayed = only_relayed = False

    def __init__(self, hops: NextHops) -> None:
        self.has_ended = False
        self.listeners: dict[SessionId, tuple[Callable[[Frame], None], Callable[[], None]]] = {}
        self._hops = hops

    @property
    def best(self) -> NextHop:
        return self

    def listen(self, session: SessionId, hear: Callable[[Frame], None], end: Callable[[], None]) -> None:
        self.listeners[session] = hear, end

    def mute(self, session: SessionId, hear: Callable[[Frame], None]) -> None:
        if (listener := self.listeners.get(session)) is not None and listener[0] == hear:
            del self.listeners[session]

    async def tell(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint()
        if self.has_ended:
            raise PeerUnreachable("closed the stream", peer=RECEIVER)
        rng, kind = self._hops.rng, frame.type.name
        if frame.type is FrameType.WANT:
            for _ in range(rng.choice((0, 1, 1, 1, 1, 2))):
                self._say(rng.choice(self._answers_to(frame)))
        else:
            assert frame.type is FrameType.STEP
            kind = "pushed"
            if rng.random() < 0.3:  # of any number and epoch
                self._say(rng.choice(self._answers_to(replace(frame, meta=pack(PushLimit(0))))))
        self._hops.answers[kind] += 1

    def _answers_to(self, frame: Frame) -> list[Frame]:
        rng = self._hops.rng
        limit_bytes = rng.choice((0, 100, unpack(PushLimit, frame.meta).limit_bytes, 10_000, 10_000))
        codes = (RefusalCode.UNKNOWN_FRAME, RefusalCode.UNKNOWN_SESSION)
        grant = replace(frame, type=FrameType.GRANT, meta=pack(PushLimit(limit_bytes)), payload=b"")
        others = [replace(grant, epoch=Epoch(frame.epoch + 1)), replace(grant, type=FrameType.OPENED)]
        others += [replace(grant, step=Step(frame.step + 1)), replace(grant, meta=b"no limit")]
        return [grant] * 20 + [refusal_of(frame, code, "because") for code in codes] + others

    def _say(self, frame: Frame) -> None:
        """The connection hands the frame on, as `PeerConnection.run` does."""
        if (listener := self.listeners.get(frame.session)) is None:
            return
        try:
            listener[0](frame)
        except RemoteProtocolError:
            self.has_ended = True
            self._hops.answers["unread"] += 1
            for _, end in list(self.listeners.values()):
                end()


async def play(
    server: Server, worker: ExactWorker, announcers: SequenceOf[MemoryNetwork], number: int, answers: Counter[str]
) -> None:
    """One sequence, over two links of a client and one of its neighbour; then nothing of it is left."""
    rng = random.Random(f"sequence {number}")
    client, neighbour = PeerId(f"client {number % 7}"), PeerId(f"neighbour {number % 5}")
    async with trio.open_nursery() as nursery:
        peers = (client, client, neighbour)
        links = [PlainLink(each, answers, server.network.budget.connection(each, each)) for each in peers]  # type: ignore[attr-defined]
        for link in links:
            nursery.start_soon(_serve, server, link, nursery)
        worker.executor.fails = int(rng.random() < 0.1)
        swarm = SwarmFrames(rng, announcers, simulated_ms())
        for pushes, frame in Sequence(rng, neighbour, RECEIVER, swarm).frames():
            if frame.type is FrameType.FORK and rng.random() < 0.5:  # else what it copies is hardly ever computed yet
                await trio.testing.wait_all_tasks_blocked()
            links[2 if pushes else int(rng.random() < 0.05)].tell(frame)
            if rng.random() < 0.5:
                await trio.testing.wait_all_tasks_blocked() if rng.random() < 0.1 else await trio.lowlevel.checkpoint()
        await trio.sleep(0.01)
        for link in links:
            await link.end("over")


async def _serve(server: Server, link: PlainLink, nursery: trio.Nursery) -> None:
    with suppress(PeerUnreachable):
        await ServerLink(server, link, nursery).run()


def _check_nothing_is_left(server: Server, worker: ExactWorker, hops: NextHops) -> None:
    assert not server.sessions
    assert not server.comers._fresh
    assert not server.leased._leases
    assert not worker.reserved
    assert not worker.executor._kept
    assert not any(each.listeners for each in hops.found)
    hops.found.clear()
    assert not server.desk._links
    assert not server.desk._late_bytes
    assert server.swarm is not None
    assert len(server.swarm.view) <= SWARM.view_peers
    held = server.network.budget.process.held - Counter({Resource.MEMORY: SWARM.view_peers * PLACE_BYTES})
    assert not any(held[each] for each in Resource if each is not Resource.ADAPTERS), held
    for record in (worker.priorities, worker.executor.batches, worker.executor.forks):
        record.clear()


def _forget_what_is_limited() -> None:
    """A table that is full at one moment and empty at another would be taken for growth.

    Trio keeps up to 1,000 deadlines of scopes that have ended, of four blocks each.
    """
    GLOBAL_RUN_CONTEXT.runner.deadlines._prune()


def _living_tasks() -> int:
    root = trio.lowlevel.current_root_task()
    assert root is not None
    waiting, living = [root], 0
    while waiting:
        task = waiting.pop()
        living += 1
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return living


@pytest.fixture
def quiet() -> Iterator[None]:
    """Else pytest keeps what servers log about forwards that fail as told."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kv", KV_TOKENS)
@simulated
async def test_frames_in_any_order_leave_nothing_behind(kv: str) -> None:
    answers: Counter[str] = Counter()
    first = int(os.environ.get("LLMNODE_FIRST_SEQUENCE", "0"))
    sequences = int(os.environ.get("LLMNODE_SEQUENCES", str(SEQUENCES if kv == "enough KV" else SEQUENCES // 3)))
    at_once = int(os.environ.get("LLMNODE_SEQUENCES_AT_ONCE", "1"))
    at_once = at_once if kv == "enough KV" else max(at_once, SCARCE_AT_ONCE)
    async with open_internet() as internet:
        network: MemoryNetwork = internet.network("server")
        worker = ExactWorker(Span(0, EXACT_MODEL.blocks), EXACT_MODEL.row_bytes, KV_TOKENS[kv] * at_once)
        announcers = [network, *(internet.network(f"announcer {number}") for number in range(12))]
        next_hops = NextHops(answers)
        async with open_pool(network) as pool, trio.open_nursery() as nursery:
            rng = random.Random("view")
            swarm = Swarm(network, pool, SWARM, now_ms=simulated_ms, rng=rng, roams=False)
            server = Server(network, EXACT_MODEL, POLICY, swarm, on_bug=raise_bug)
            server.next_hops = next_hops  # type: ignore[assignment]
            server.serve(worker)
            began_s, before, tasks = time.process_time(), 0, 0
            for number in range(first, first + sequences, at_once):
                numbers = range(number, min(number + at_once, first + sequences))
                try:
                    async with trio.open_nursery() as beside:
                        for each in numbers:
                            beside.start_soon(play, server, worker, announcers, each, answers)
                    _check_nothing_is_left(server, worker, next_hops)
                except BaseException as error:
                    how = f"LLMNODE_SEQUENCES={len(numbers)} LLMNODE_SEQUENCES_AT_ONCE={at_once}"
                    error.add_note(f"LLMNODE_FIRST_SEQUENCE={number} {how} runs this alone")
                    raise
                if number - first <= WARM_UP < number - first + at_once:
                    _forget_what_is_limited()
                    gc.collect()
                    gc.freeze()
                    before, tasks = sys.getallocatedblocks(), _living_tasks()
            took_s = time.process_time() - began_s
            _forget_what_is_limited()
            gc.unfreeze()
            gc.collect()
            grew, more_tasks = sys.getallocatedblocks() - before, _living_tasks() - tasks
            nursery.cancel_scope.cancel()
    print(f"{sequences / took_s:.0f} sequences a second of CPU, {grew} blocks more; {dict(sorted(answers.items()))}")
    if sequences > WARM_UP + at_once:
        assert grew < max(GROWTH_BLOCKS, GROWTH_PER_SEQUENCE * sequences)
        assert more_tasks == 0
        if kv == "scarce KV":
            assert answers["moved"] and answers["FORKED"]
            return
        of_opens = {RefusalCode.WRONG_MODEL, RefusalCode.UNKNOWN_CODEC}
        never = of_opens | {RefusalCode.UNKNOWN_FRAME, RefusalCode.UNKNOWN_EXTENSION, RefusalCode.OVERFLOW}
        reached = {
            "pushed",
            "unread",
            "WANT",
            *(kind.name for kind in ANSWERS if kind is not FrameType.REFUSAL),
            *RefusalCode,
        } - never
        assert server.tally.given_directly > sequences / 100, "steps are pushed here, too"
        assert len(swarm.view) > 1, "some announcements are believed"
        assert reached - answers.keys() == set(), "the sequences reach every part of a session"
