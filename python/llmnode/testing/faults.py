"""Faults by plan: what goes wrong in a world, when, and for how long. A plan is data: print it, keep it, shrink it."""

from __future__ import annotations

import os
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import trio

from llmnode.core.span import Span
from llmnode.testing.conditions import Conditions
from llmnode.testing.network import peer_named
from llmnode.testing.simulate import say_if_it_fails

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from llmnode.testing.world import World

    Undo: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cast:
    """The possible victims: the names of a world's nodes and clients, and spans that a node may come back with."""

    nodes: Sequence[str]
    clients: Sequence[str] = ("client",)
    spans: Sequence[Span] = ()
    movable: Sequence[str] = ()
    """The nodes that may come back with other spans; the rest keep the model covered."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that begins `at_s` after the plan begins, and is put right `for_s` later."""

    at_s: float
    for_s: float

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        """One of this kind, at random."""
        raise NotImplementedError

    async def strike(self, world: World) -> Undo | None:
        """Do it; returns what puts it right, or None where there was nothing to be done."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _OfNode(Fault):
    node: str

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, for_s, rng.choice(cast.nodes))


@dataclass(frozen=True, slots=True)
class Kill(_OfNode):
    """It dies without a word, and is started again under the same identity."""

    async def strike(self, world: World) -> Undo | None:
        if (node := world.nodes.get(self.node)) is None:
            return None
        span = node.worker.span
        world.kill(self.node)
        return lambda: _start(world, self.node, span)


@dataclass(frozen=True, slots=True)
class Restart(Kill):
    """It dies, and is back before anybody has noticed."""

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, 0.0, rng.choice(cast.nodes))


@dataclass(frozen=True, slots=True)
class Stop(_OfNode):
    """It says farewell, and comes back with another span if `then` names one."""

    then: Span | None = None

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        node = rng.choice(cast.nodes)
        return cls(at_s, for_s, node, rng.choice(cast.spans) if node in cast.movable and cast.spans else None)

    async def strike(self, world: World) -> Undo | None:
        if (node := world.nodes.get(self.node)) is None:
            return None
        span = self.then or node.worker.span
        await world.stop(self.node)
        return lambda: _start(world, self.node, span)


@dataclass(frozen=True, slots=True)
class Freeze(_OfNode):
    """The node stops and goes on, like SIGSTOP and SIGCONT."""

    async def strike(self, world: World) -> Undo | None:
        node = world.nodes.get(self.node)
        if node is None or node.network.frozen:
            return None
        world.freeze(self.node)

        async def thaw() -> None:
            if world.nodes.get(self.node) is node:
                world.thaw(self.node)

        return thaw


@dataclass(frozen=True, slots=True)
class FailForwards(_OfNode):
    """Its next forwards fail, as when memory runs out."""

    forwards: int = 1

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, for_s, rng.choice(cast.nodes), rng.choice([1, 1, 2, 3]))

    async def strike(self, world: World) -> Undo | None:
        if (node := world.nodes.get(self.node)) is None:
            return None
        node.worker.executor.fails = self.forwards

        async def recover() -> None:
            node.worker.executor.fails = 0

        return recover


@dataclass(frozen=True, slots=True)
class SlowForwards(_OfNode):
    """Each of its forwards takes `slower_by_s` longer."""

    slower_by_s: float = 1.0

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, for_s, rng.choice(cast.nodes), round(rng.uniform(0.1, for_s), 3))

    async def strike(self, world: World) -> Undo | None:
        if (node := world.nodes.get(self.node)) is None:
            return None
        node.worker.slower_by_s = self.slower_by_s

        async def recover() -> None:
            node.worker.slower_by_s = 0.0

        return recover


@dataclass(frozen=True, slots=True)
class FillKv(_OfNode):
    """Others have taken all of its KV that was free."""

    async def strike(self, world: World) -> Undo | None:
        node = world.nodes.get(self.node)
        if node is None or not node.worker.kv_tokens_free:
            return None
        node.worker.executor.occupy(node.worker.kv_tokens_free)

        async def free() -> None:
            node.worker.executor.occupy(0)

        return free


@dataclass(frozen=True, slots=True)
class _OfPair(Fault):
    one: str
    other: str

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, for_s, *_pair(rng, cast))


@dataclass(frozen=True, slots=True)
class Cut(_OfPair):
    """Nothing arrives between the two."""

    async def strike(self, world: World) -> Undo | None:
        world.internet.cut(peer_named(self.one), peer_named(self.other))
        return lambda: _mend(world, self)


@dataclass(frozen=True, slots=True)
class CutOneWay(_OfPair):
    """The other hears nothing of the one, and is heard."""

    async def strike(self, world: World) -> Undo | None:
        world.internet.cut_one_way(peer_named(self.one), peer_named(self.other))
        return lambda: _mend(world, self)


@dataclass(frozen=True, slots=True)
class BlockDials(_OfPair):
    """The one cannot open links to the other, as through a NAT."""

    async def strike(self, world: World) -> Undo | None:
        world.internet.block_dials(peer_named(self.one), peer_named(self.other))
        return lambda: _mend(world, self)


@dataclass(frozen=True, slots=True)
class SlowLink(_OfPair):
    """The frames from one peer to the other fare by `conditions`."""

    conditions: Conditions = Conditions(delay_s=0.5, jitter_s=0.5)

    KINDS: ClassVar = (
        Conditions(delay_s=0.5, jitter_s=0.5),
        Conditions(delay_s=0.02, bytes_per_s=500.0),
        Conditions(delay_s=0.05, loss=0.3),
        Conditions(delay_s=0.02, jitter_s=0.1, duplication=0.5),
    )

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, for_s, *_pair(rng, cast), rng.choice(cls.KINDS))

    async def strike(self, world: World) -> Undo | None:
        one, other = peer_named(self.one), peer_named(self.other)
        world.internet.set_conditions(one, other, self.conditions)

        async def recover() -> None:
            world.internet.set_conditions(one, other, None)

        return recover


@dataclass(frozen=True, slots=True)
class Partition(Fault):
    """These nodes hear nobody else, and nobody else hears them."""

    nodes: tuple[str, ...]

    @classmethod
    def draw(cls, rng: random.Random, at_s: float, for_s: float, cast: Cast) -> Fault:
        return cls(at_s, for_s, tuple(rng.sample(cast.nodes, rng.randrange(1, max(2, len(cast.nodes))))))

    async def strike(self, world: World) -> Undo | None:
        inside = [peer_named(name) for name in self.nodes]
        others = [peer_named(name) for name in [*world.nodes, *world.relays, *world.clients] if name not in self.nodes]
        world.internet.partition(inside, others)

        async def mend() -> None:
            for one in inside:
                for other in others:
                    world.internet.mend(one, other)

        return mend


ALL_KINDS: tuple[type[Fault], ...] = (
    Kill,
    Restart,
    Stop,
    Freeze,
    FailForwards,
    SlowForwards,
    FillKv,
    Cut,
    CutOneWay,
    BlockDials,
    SlowLink,
    Partition,
)


@dataclass(frozen=True, slots=True)
class Odds:
    """How bad a drawn plan is. `tracks` faults overlap at most, each `pause_s` after the one before, on the average."""

    tracks: int = 2
    pause_s: float = 0.5
    longest_s: float = 12.0
    """The longest time of one fault."""
    until_s: float = 60.0
    """No fault begins later."""
    kinds: Sequence[type[Fault]] = ALL_KINDS
    """Each as likely as the others; one may be there several times."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults in the order of their times."""

    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int, cast: Cast, odds: Odds | None = None) -> FaultPlan:
        """The same one for the same arguments. LLMNODE_FAULTS=0,4 in the environment leaves only those of it."""
        rng, odds = random.Random(f"plan {seed}"), odds or Odds()
        faults = [fault for _ in range(odds.tracks) for fault in _track(rng, cast, odds)]
        plan = cls(tuple(sorted(faults, key=lambda fault: fault.at_s)))
        wanted = os.environ.get("LLMNODE_FAULTS")
        return plan if wanted is None else plan.only(*(int(each) for each in wanted.split(",") if each))

    def without(self, *indices: int) -> FaultPlan:
        return FaultPlan(tuple(fault for index, fault in enumerate(self.faults) if index not in indices))

    def only(self, *indices: int) -> FaultPlan:
        return FaultPlan(tuple(fault for index, fault in enumerate(self.faults) if index in indices))

    def __str__(self) -> str:
        """Python that makes it again."""
        lines = [f"        {fault},  # {index}" for index, fault in enumerate(self.faults)]
        return "\n".join(["FaultPlan(", "    (", *lines, "    )", ")"])

    @asynccontextmanager
    async def upon(self, world: World) -> AsyncIterator[None]:
        """Let it happen meanwhile. On leaving, what has gone wrong is put right, and no more goes wrong."""
        say_if_it_fails(f"with LLMNODE_FAULTS=0,1,... of its plan alone, which is:\n{self}")
        over = trio.Event()
        async with trio.open_nursery() as nursery:
            for fault in self.faults:
                nursery.start_soon(_happen, fault, world, over)
            yield
            over.set()


def shrunk(plan: FaultPlan, still_fails: Callable[[FaultPlan], bool]) -> FaultPlan:
    """`plan` without all the faults that it takes none of to fail; the last are tried first."""
    for index in reversed(range(len(plan.faults))):
        smaller = plan.without(index)
        if still_fails(smaller):
            plan = smaller
    return plan


def _pair(rng: random.Random, cast: Cast) -> tuple[str, str]:
    """Two nodes or, equally likely, a client and a node, in any order."""
    other = rng.choice(cast.nodes)
    nodes = [name for name in cast.nodes if name != other]
    one = rng.choice(cast.clients if cast.clients and (rng.random() < 0.5 or not nodes) else nodes)
    return (one, other) if rng.random() < 0.5 else (other, one)


def _track(rng: random.Random, cast: Cast, odds: Odds) -> Iterable[Fault]:
    """Faults that do not overlap."""
    at_s = rng.expovariate(1 / odds.pause_s)
    while at_s < odds.until_s:
        for_s = rng.uniform(0.1, odds.longest_s)
        fault = rng.choice(odds.kinds).draw(rng, round(at_s, 3), round(for_s, 3), cast)
        yield fault
        at_s += fault.for_s + rng.expovariate(1 / odds.pause_s)


async def _happen(fault: Fault, world: World, over: trio.Event) -> None:
    with trio.move_on_after(fault.at_s):
        await over.wait()
        return
    world.internet.note(f"strikes: {fault}")
    undo = await fault.strike(world)
    if undo is None:
        world.internet.note(f"struck nobody: {fault}")
        return
    with trio.move_on_after(fault.for_s):
        await over.wait()
    world.internet.note(f"is over: {fault}")
    await undo()


async def _start(world: World, name: str, span: Span) -> None:
    if name not in world.nodes:
        await world.start(name, span)


async def _mend(world: World, pair: _OfPair) -> None:
    world.internet.mend(peer_named(pair.one), peer_named(pair.other))
