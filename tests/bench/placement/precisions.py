"""Nodes on `--dtype auto --quant auto` join drawn swarms: the precision of each, and the throughput after it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import PRECISIONS, ModelInfo, Precision, PrecisionWish, Profile
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.own_precision import Candidate, choose_own, paced, prospects_of
from llmnode.core.placement.precisions import served_precisions
from llmnode.core.placement.servers import PlacedServer, block_speeds, one_speed, throughput
from llmnode.core.speed import AnnouncedSpeed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.kit.report import Row

BLOCKS = 32
MODEL = ModelInfo("drawn", b"d" * 32, BLOCKS, hidden_size=8, context_tokens=64)
SEEDS = 200
MOVED = 5
"""One swarm in this many is looked at after moves, too: plans take time."""
FIRST, JOINING = 12, 12
"""Servers whose owners have chosen a precision, and nodes that join after these."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device: its pace and the blocks that it holds in each precision, and its speed at pace 1.

    `suits` is the precision that it begins with.
    """

    paces: dict[str, float]
    blocks: tuple[int, int]
    """The least and the most blocks in float32."""
    tokens_per_s: tuple[float, float]
    """The least and the most for one block, at pace 1."""
    suits: str


OLD_CPU = Kind({"float32": 1.0, "bfloat16": 0.4, "float32+int8": 0.05}, (2, 10), (100, 400), "float32")
NEW_CPU = Kind({"float32": 1.0, "bfloat16": 0.23, "float32+int8": 2.4}, (4, 16), (200, 800), "float32+int8")
OLD_GPU = Kind({"float32": 1.0, "bfloat16": 0.05, "bfloat16+nf4": 0.06}, (2, 6), (1000, 3000), "float32")
NEW_GPU = Kind({"float32": 1.0, "bfloat16": 1.3, "bfloat16+nf4": 1.5}, (3, 12), (2000, 6000), "bfloat16+nf4")
KINDS = (OLD_CPU, NEW_CPU, OLD_GPU, NEW_GPU)
SMALLER = {"float32": 1, "bfloat16": 2, "float32+int8": 3, "bfloat16+nf4": 6}
"""A device holds this many times the blocks that it holds in float32."""

Swarm = dict[Precision, list[PlacedServer]]
Move: TypeAlias = Callable[[list[PlacedServer]], list[PlacedServer]]


@dataclass(frozen=True, slots=True)
class Device:
    """A node that joins."""

    name: str
    kind: Kind
    blocks: int
    tokens_per_s: float

    @property
    def candidates(self) -> list[Candidate]:
        return [
            Candidate(PRECISIONS[name], min(BLOCKS, SMALLER[name] * self.blocks), pace)
            for name, pace in self.kind.paces.items()
        ]

    def in_precision(self, precision: Precision, swarm: Swarm) -> PlacedServer:
        """The server that it becomes, at the blocks that need it most."""
        mine = next(each for each in self.candidates if each.precision == precision)
        span = choose_span(mine.blocks, block_speeds(BLOCKS, swarm.get(precision, ())))
        speed = mine.pace * self.tokens_per_s / mine.blocks
        return PlacedServer(PeerId(self.name), span, one_speed(speed, mine.blocks))


def first_served(device: Device, swarm: Swarm) -> Precision:
    """The former rule: the first precision that clients would take, or would be able to take soonest."""
    offers = [
        Announcement(
            each.peer,
            (),
            0,
            1,
            "llmnode",
            Offer(
                MODEL.name,
                Profile(MODEL.digest, precision),
                BLOCKS,
                each.span,
                PeerState.ONLINE,
                1,
                kv_tokens=1,
                kv_tokens_free=1,
                speed=AnnouncedSpeed(max(1, round(1000 * each.speed))),
            ),
        )
        for precision, servers in swarm.items()
        for each in servers
    ]
    met = {each.peer: str(each.peer) for each in offers}
    able = {each.precision for each in device.candidates}
    served = [each.precision for each in served_precisions(MODEL, offers, PrecisionWish(), met)]
    return next((each for each in served if each in able), PRECISIONS[device.kind.suits])


def by_need(device: Device, swarm: Swarm) -> Precision:
    """The rule of `choose_own`. The device does not know how fast it is: it was never measured."""
    everybody = [each for servers in swarm.values() for each in servers]
    able = [each for each in device.candidates if each.precision in swarm or each.precision.name == device.kind.suits]
    candidates, unit_tokens_per_s = paced(able, {}, everybody)
    met = {each.peer: str(each.peer) for each in everybody}
    return choose_own(prospects_of(BLOCKS, candidates, swarm, met, unit_tokens_per_s)).precision


def drawn(seed: int) -> tuple[Swarm, list[Device]]:
    """A swarm whose owners chose precisions in which their devices are not slow, and the nodes that join it."""
    rng, swarm = random.Random(seed), Swarm()
    kinds = [rng.choice(KINDS) for _ in range(FIRST + JOINING)]
    devices = [
        Device(f"{number:02}", kind, rng.randint(*kind.blocks), rng.uniform(*kind.tokens_per_s))
        for number, kind in enumerate(kinds)
    ]
    for device in devices[: rng.randint(1, FIRST)]:
        fast = [each.precision for each in device.candidates if each.pace >= 0.2]
        precision = rng.choice(fast)
        swarm.setdefault(precision, []).append(device.in_precision(precision, swarm))
    return swarm, devices[FIRST:]


def joined(
    swarm: Swarm,
    devices: Sequence[Device],
    rule: Callable[[Device, Swarm], Precision],
    move: Move = lambda servers: servers,
) -> float:
    """The throughput of all precisions together, once the `devices` have joined in turn, and after moves."""
    swarm = {precision: list(servers) for precision, servers in swarm.items()}
    for device in devices:
        precision = rule(device, swarm)
        swarm.setdefault(precision, []).append(device.in_precision(precision, swarm))
    return sum(throughput(BLOCKS, move(servers)) for servers in swarm.values())


def precision_rows(seeds: int, move: Move) -> tuple[list[Row], list[float]]:
    """Rows for some of the nodes that join, and for all of them, where they are and once all servers have moved.

    With them come the throughputs by need, of those by the former rule.
    """
    rows: list[Row] = []
    ratios: list[float] = []
    for number in (1, 4, JOINING):
        row, ratio = _row(f"{number} nodes on auto join", number, range(seeds))
        rows, ratios = [*rows, row], [*ratios, ratio]
    row, ratio = _row(f"{JOINING} nodes on auto join, and all servers move", JOINING, range(seeds // MOVED), move)
    return [*rows, row], [*ratios, ratio]


def _row(name: str, number: int, seeds: range, *move: Move) -> tuple[Row, float]:
    former, ours = [], []
    for seed in seeds:
        swarm, devices = drawn(seed)
        former.append(joined(swarm, devices[:number], first_served, *move))
        ours.append(joined(swarm, devices[:number], by_need, *move))
    pairs = list(zip(former, ours, strict=True))
    ratio = statistics.fmean(ours) / statistics.fmean(former)
    return {
        "variant": f"{name}, {len(seeds)} swarms",
        "the first that is served, tokens/s": statistics.fmean(former),
        "by need, tokens/s": statistics.fmean(ours),
        "by need, of the first": ratio,
        "swarms with more": sum(our > old + 1e-6 for old, our in pairs),
        "swarms with less": sum(our < old - 1e-6 for old, our in pairs),
        "of no use by the first": sum(old == 0.0 for old in former),
        "of no use by need": sum(our == 0.0 for our in ours),
    }, ratio
