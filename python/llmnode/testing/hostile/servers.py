"""Hostile servers: whole nodes of a simulated world, which say or send something else than honest ones."""

from __future__ import annotations

import random
import struct
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

import trio

from llmnode import _native
from llmnode.core.ids import Step
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import Backward, Computed, Evaluate
from llmnode.core.span import Span
from llmnode.testing.hostile.role import HostileRole
from llmnode.testing.network import peer_named
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode, Result, pack, unpack
from llmnode.wire.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.operations import Operation
    from llmnode.testing.link import Tamper
    from llmnode.testing.world import ServingNode, World
    from llmnode.wire.frame import Buffer

SPANS = (Span(0, 6), Span(0, 3), Span(3, 6), Span(0, 4), Span(2, 6))
LIES_US = (0, 1, 100, 1000)


@dataclass(frozen=True, slots=True)
class HostileServers(HostileRole):
    """Servers of `span` that say that a block takes them `said_us`."""

    span: Span = Span(0, 6)
    said_us: int = 1

    @classmethod
    def draw(cls, rng: random.Random) -> HostileServers:
        return cls(*cls.draw_peers(rng), rng.choice(SPANS), rng.choice(LIES_US))

    async def play(self, world: World) -> None:
        for number, name in enumerate(self.names):
            world.internet.locate(peer_named(name), self.host(number))
            self.corrupt(await world.start(name, self.span, said_us=self.said_us))
        await trio.sleep_forever()

    def corrupt(self, node: ServingNode) -> None:
        """Make an honest node a hostile one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SpeedLiar(HostileServers):
    """It says that it is fast, and takes `forward_s` for a forward."""

    forward_s: float = 2.0

    @classmethod
    def draw(cls, rng: random.Random) -> SpeedLiar:
        return cls(*cls.draw_peers(rng), rng.choice(SPANS), 1, rng.choice((0.5, 2.0, 5.0)))

    def corrupt(self, node: ServingNode) -> None:
        node.worker.slower_by_s = self.forward_s


@dataclass(frozen=True, slots=True)
class Silent(HostileServers):
    """It takes sessions, and never sends the answer `withholds`, after `honest_steps`."""

    withholds: FrameType = FrameType.RESULT
    honest_steps: int = 0

    @classmethod
    def draw(cls, rng: random.Random) -> Silent:
        kinds = FrameType.RESULT, FrameType.RESULT, FrameType.OPENED, FrameType.FORWARDED, FrameType.TRUNCATED
        return cls(*cls.draw_peers(rng), rng.choice(SPANS), rng.choice(LIES_US), rng.choice(kinds))

    def corrupt(self, node: ServingNode) -> None:
        executor = node.worker.executor
        node.network.tamper = _after(
            lambda _peer, frame: [] if frame.type is self.withholds else [frame],
            lambda: not self.honest_steps or executor.forwards > self.honest_steps,
        )


@dataclass(frozen=True, slots=True)
class Refuser(HostileServers):
    """It refuses each step, or each session, with any `code`, and may name a time to come again."""

    code: str = RefusalCode.BAD_MESSAGE
    retry_after_s: float = 0.0
    refuses: FrameType = FrameType.RESULT

    CODES: ClassVar = (*RefusalCode, "never-heard-of")

    @classmethod
    def draw(cls, rng: random.Random) -> Refuser:
        refuses = rng.choice((FrameType.RESULT, FrameType.RESULT, FrameType.OPENED, FrameType.TRUNCATED))
        retry_after_s = rng.choice((0.0, 0.0, 0.001, 5.0, 1e6))
        peers = cls.draw_peers(rng)
        return cls(*peers, rng.choice(SPANS), rng.choice(LIES_US), rng.choice(cls.CODES), retry_after_s, refuses)

    def corrupt(self, node: ServingNode) -> None:
        def refuse(_peer: PeerId, frame: Frame) -> Iterable[Frame]:
            if frame.type is not self.refuses:
                return [frame]
            return [refusal_of(frame, self.code, "because", self.retry_after_s)]

        node.network.tamper = refuse


@dataclass(frozen=True, slots=True)
class Evictor(HostileServers):
    """It serves `honest_steps` of each session, and then frees its KV, as a server does for others."""

    honest_steps: int = 1
    retry_after_s: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random) -> Evictor:
        steps, retry_after_s = rng.choice((0, 1, 4, 20)), rng.choice((0.0, 0.001, 1.0, 1e6))
        return cls(*cls.draw_peers(rng), rng.choice(SPANS), rng.choice(LIES_US), steps, retry_after_s)

    def corrupt(self, node: ServingNode) -> None:
        served: Counter[SessionId] = Counter()

        def evict(_peer: PeerId, frame: Frame) -> Iterable[Frame]:
            if frame.type is not FrameType.RESULT:
                return [frame]
            served[frame.session] += 1
            if served[frame.session] <= self.honest_steps:
                return [frame]
            return [refusal_of(frame, RefusalCode.UNKNOWN_SESSION, "for others", self.retry_after_s)]

        node.network.tamper = evict


@dataclass(frozen=True, slots=True)
class GarbagePusher(HostileServers):
    """It computes honestly, and pushes something else to the next hop.

    If it is `secret`, it tells the client that it did not push, and hands over the right result. If it `stuffs`, it
    pushes many steps that are not due.
    """

    secret: bool = False
    stuffs: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> GarbagePusher:
        span = rng.choice((Span(0, 3), Span(1, 3), Span(0, 4)))
        return cls(*cls.draw_peers(rng), span, 1, rng.random() < 0.5, rng.random() < 0.3)

    def corrupt(self, node: ServingNode) -> None:
        node.network.tamper = _Pushes(self.secret, self.stuffs)


class _Pushes:
    """The frames of a `GarbagePusher`."""

    def __init__(self, secret: bool, stuffs: bool) -> None:
        self._secret = secret
        self._stuffs = stuffs
        self._right: Buffer = b""

    def __call__(self, _peer: PeerId, frame: Frame) -> Iterable[Frame]:
        if frame.type is FrameType.STEP:
            self._right = frame.payload
            garbage = replace(frame, payload=bytes(each ^ 1 for each in frame.payload))
            ahead = (
                [replace(garbage, step=Step(frame.step + number)) for number in range(1, 17)] if self._stuffs else []
            )
            return [garbage, *ahead]
        if frame.type is FrameType.RESULT and self._secret:
            result = unpack(Result, frame.meta)
            if result.pushed:
                return [replace(frame, meta=pack(replace(result, pushed=False)), payload=self._right)]
        return [frame]


@dataclass(frozen=True, slots=True)
class Framer(HostileServers):
    """It says that the hop before has given it something else than that hop says."""

    shows: bool = False
    """It invents what the hop before has shown it, too."""

    @classmethod
    def draw(cls, rng: random.Random) -> Framer:
        span = rng.choice((Span(3, 6), Span(2, 4), Span(2, 6)))
        return cls(*cls.draw_peers(rng), span, 1, rng.random() < 0.5)

    def corrupt(self, node: ServingNode) -> None:
        def frame_neighbour(_peer: PeerId, frame: Frame) -> Iterable[Frame]:
            if frame.type is not FrameType.RESULT:
                return [frame]
            invented = _native.blake3_digest(b"invented")
            result = replace(unpack(Result, frame.meta), input_digest=invented)
            if self.shows:
                result = replace(result, shown_input=invented, shown_signature=bytes(64))
            return [replace(frame, meta=pack(result))]

        node.network.tamper = frame_neighbour


@dataclass(frozen=True, slots=True)
class NanServer(HostileServers):
    """It answers with numbers that are none, infinite, or too large to compute with."""

    number: float = float("nan")

    @classmethod
    def draw(cls, rng: random.Random) -> NanServer:
        number = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38))
        return cls(*cls.draw_peers(rng), rng.choice(SPANS), 1, number)

    def corrupt(self, node: ServingNode) -> None:
        def spoil(_peer: PeerId, frame: Frame) -> Iterable[Frame]:
            if frame.type not in (FrameType.STEP, FrameType.RESULT) or not frame.payload:
                return [frame]
            payload = bytes(frame.payload)[:-4] + struct.pack("<f", self.number)
            if frame.type is FrameType.STEP:
                return [replace(frame, payload=payload)]
            result = replace(unpack(Result, frame.meta), output_digest=_native.blake3_digest(payload))
            return [replace(frame, meta=pack(result), payload=payload)]

        node.network.tamper = spoil


@dataclass(frozen=True, slots=True)
class PassLiar(HostileServers):
    """It computes a share of the passes wrongly: outputs, gradients, or both.

    The lie is a number of `flipped` bits. Without it each such peer has one of its own. Gradients are wrong at one of
    the `PLACES`: for hidden states, or for numbers of the adapter or of prompts alone. Without a `place` it is drawn
    for each lie, among those that the pass has.
    """

    outputs: bool = True
    gradients: bool = True
    lying_share: float = 1.0
    flipped: int | None = None
    place: str | None = None

    PLACES: ClassVar = ("rows", "adapter", "prompts")

    @classmethod
    def draw(cls, rng: random.Random) -> PassLiar:
        kinds = rng.choice(((True, True), (True, False), (False, True)))
        place = rng.choice((None, *cls.PLACES))
        return cls(*cls.draw_peers(rng), rng.choice(SPANS), 1, *kinds, rng.choice((1.0, 0.3)), place=place)

    def corrupt(self, node: ServingNode) -> None:
        worker, rng = node.worker, random.Random(node.name)
        do, flipped = worker.do, self.flipped or rng.randrange(1, 128)

        async def do_wrongly(operation: Operation[object]) -> object:
            computed = await do(operation)
            places: list[str] = []
            if isinstance(operation, Backward) and self.gradients:
                parts = gradient_parts(operation)
                places = [each for each in parts if self.place in {None, each}]
            elif isinstance(operation, Evaluate) and self.outputs:
                places = ["rows"]
            if not places or not isinstance(computed, Computed) or rng.random() >= self.lying_share:
                return computed
            numbers, place = bytearray(computed.hidden), rng.choice(places)
            if place == "rows":
                numbers[0] ^= flipped
            else:  # a sum with others keeps it
                first = parts[place].start
                struct.pack_into("<f", numbers, first, struct.unpack_from("<f", numbers, first)[0] + flipped)
            return replace(computed, hidden=bytes(numbers))

        worker.do = do_wrongly  # type: ignore[method-assign,assignment]


def gradient_parts(backward: Backward) -> dict[str, slice]:
    """The bytes of the result that are gradients for each of `PassLiar.PLACES`, for those that there are."""
    sizes = memoryview(backward.hidden).nbytes, FP32_BYTES * backward.adapter_values, backward.prompts.size_bytes
    edges = pairwise(accumulate(sizes, initial=0))
    return {place: slice(*edge) for place, edge in zip(PassLiar.PLACES, edges, strict=True) if edge[0] < edge[1]}


@dataclass(frozen=True, slots=True)
class SybilMajority(HostileServers):
    """More servers than the honest ones. Each serves `honest_steps` steps, and then they `act` as another role."""

    act: str = "refuse"
    honest_steps: int = 0

    ACTS: ClassVar = ("refuse", "nan", "push", "frame")

    @classmethod
    def draw(cls, rng: random.Random) -> SybilMajority:
        number = rng.choice((7, 9))
        groups, span = rng.choice((1, number)), rng.choice((Span(0, 6), Span(0, 4), Span(2, 6)))
        return cls(number, groups, span, 1, rng.choice(cls.ACTS), rng.choice((0, 3)))

    def corrupt(self, node: ServingNode) -> None:
        roles: dict[str, Callable[[], HostileServers]] = {
            "refuse": lambda: Refuser(1, 1, code=RefusalCode.CONFLICT),
            "nan": lambda: NanServer(1, 1),
            "push": lambda: GarbagePusher(1, 1),
            "frame": lambda: Framer(1, 1),
        }
        executor = node.worker.executor
        roles[self.act]().corrupt(node)
        if (tamper := node.network.tamper) is not None:
            node.network.tamper = _after(tamper, lambda: executor.forwards > self.honest_steps)


def _after(tamper: Tamper, is_time: Callable[[], bool]) -> Tamper:
    return lambda peer, frame: tamper(peer, frame) if is_time() else [frame]
