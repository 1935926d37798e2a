"""Failures as Table 1 of the Petals paper counts them: each send of a step to a stage fails with some probability.

A stage that fails loses its KV, and its stream is reset. The benchmark breaks the link between client and server at
that moment. This has both effects, since a server frees all that was opened over a link when the link ends. The server
itself lives on, and may be used again.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from llmnode.wire.frame import FrameType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.budget import Budget, Scope
    from llmnode.core.ids import PeerId
    from llmnode.core.links.send_rates import SendRates
    from llmnode.core.traffic import Traffic
    from llmnode.ports import Link, Network
    from llmnode.session.session import InferenceSession
    from llmnode.wire.frame import Frame


@dataclass(frozen=True, slots=True)
class Draws:
    """The sends that fail. They are drawn by step and attempt alone: two runs of the same steps meet the same failures.

    A send that fails at one rate fails at every higher one.
    """

    seed: str
    rate: float
    stages: int

    def failing(self, step: int, attempt: int) -> list[int]:
        """The stages that the step does not reach at this attempt."""
        rng = random.Random(f"{self.seed} {step} {attempt}")
        return [stage for stage in range(self.stages) if rng.random() < self.rate]


def typical_seed(name: str, rate: float, stages: int, steps: Sequence[int]) -> str:
    """The first seed by which `steps` meet the expected number of failures. A few repeats then stand for many."""
    expected = round(rate * stages * len(steps))
    for number in count():
        draws = Draws(f"{name} {number}", rate, stages)
        if sum(len(draws.failing(step, 0)) for step in steps) == expected:
            return draws.seed
    raise AssertionError("seeds are without end")


@dataclass(frozen=True, slots=True)
class Restarts:
    """The cost of starting from scratch after each failure, until all steps are done in one go."""

    steps: int
    """Repeated steps and failed ones count too."""
    failures: int
    seconds: float


def count_restarts(draws: Draws, step_s: Sequence[float], open_s: float, most_steps: int) -> Restarts | None:
    """Simulate restarts by the draws: the step at position n takes `step_s[n]`, a fresh session `open_s`.

    A step that fails takes the share of its time that belongs to the stages before. None after `most_steps` steps.
    """
    attempts: Counter[int] = Counter()
    seconds, steps, failures, position = 0.0, 0, 0, 0
    while position < len(step_s):
        steps += 1
        if steps > most_steps:
            return None
        failing = draws.failing(position, attempts[position])
        attempts[position] += 1
        if failing:
            seconds += step_s[position] * failing[0] / draws.stages + open_s
            failures += 1
            position = 0
        else:
            seconds += step_s[position]
            position += 1
    return Restarts(steps, failures, seconds)


@dataclass(slots=True)
class _Due:
    session: InferenceSession
    start: int
    stages: list[int]


@dataclass(slots=True)
class FailingNetwork:
    """The `Network` port over another network. Its links break on command."""

    network: Network
    broken: int = 0
    """The number of links that were broken until now."""
    _links: dict[PeerId, Link] = field(default_factory=dict)
    _due: _Due | None = None

    @contextmanager
    def failing(self, session: InferenceSession, start: int, stages: Sequence[int]) -> Iterator[None]:
        """Within the context, the step that begins at position `start` fails once on its way to each of `stages`."""
        self._due = _Due(session, start, list(stages)) if stages else None
        try:
            yield
        finally:
            self._due = None

    @property
    def peer(self) -> PeerId:
        return self.network.peer

    @property
    def addresses(self) -> Sequence[str]:
        return self.network.addresses

    @property
    def budget(self) -> Budget:
        return self.network.budget

    @property
    def traffic(self) -> Traffic:
        return self.network.traffic

    @property
    def send_rates(self) -> SendRates:
        return self.network.send_rates

    @property
    def key(self) -> bytes:
        return self.network.key

    def vouch(self, addresses: Sequence[str]) -> None:
        self.network.vouch(addresses)

    async def dial(self, address: str, *, is_heard: bool = False) -> Link:
        link = await self.network.dial(address, is_heard=is_heard)
        self._links[link.peer] = link
        return _FailingLink(link, self)

    def accept(self) -> AbstractAsyncContextManager[Link]:
        return self.network.accept()

    def sign(self, message: bytes) -> bytes:
        return self.network.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return self.network.verify(peer, message, signature)

    async def note(self, peer: PeerId, frame: Frame) -> None:
        """A frame to or from `peer` passes. If it brings the step to the stage that fails next, break the link.

        The client sends to the first stage. Each other stage gets the output of the one before, and so do we.
        """
        due = self._due
        if due is None or not due.stages or frame.start != due.start:
            return
        stage, route = due.stages[0], due.session.route
        kind, sender = (FrameType.RESULT, stage - 1) if stage else (FrameType.STEP, stage)
        if frame.type is kind and peer == route[sender].peer:
            del due.stages[0]
            self.broken += 1
            await self._links[route[stage].peer].end("failed, as drawn")


class _FailingLink:
    def __init__(self, link: Link, network: FailingNetwork) -> None:
        self._link = link
        self._network = network

    @property
    def peer(self) -> PeerId:
        return self._link.peer

    @property
    def scope(self) -> Scope:
        return self._link.scope

    @property
    def group(self) -> str:
        return self._link.group

    @property
    def relayed(self) -> bool:
        return self._link.relayed

    @property
    def relay_limit_bytes(self) -> int | None:
        return self._link.relay_limit_bytes

    @property
    def version(self) -> int | None:
        return self._link.version

    @property
    def is_full(self) -> bool:
        return self._link.is_full

    async def wait_version(self) -> int:
        return await self._link.wait_version()

    async def wait_direct(self) -> None:
        await self._link.wait_direct()

    async def send(self, frame: Frame) -> None:
        await self._network.note(self.peer, frame)
        await self._link.send(frame)

    async def wait_written(self) -> None:
        await self._link.wait_written()

    async def receive(self) -> Frame:
        frame = await self._link.receive()
        await self._network.note(self.peer, frame)
        return frame

    async def end(self, reason: str) -> None:
        await self._link.end(reason)
