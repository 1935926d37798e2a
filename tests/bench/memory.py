"""`tests/bench/run memory`: the memory of a server, against what it should need: itself, its tensors and its KV.

Real servers run alone on loopback, with random Llamas of the sizes in Petals' measurements (`S` has 34 M parameters,
`M` 222 M). The rows compare the resident memory of all of a server's processes. Their proportional set size (PSS)
depends on the other programs that have the same libraries mapped. Nothing here is timed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import trio

from bench.kit.options import add_thin, add_threads
from bench.kit.report import Report, Row, at_most, below
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import ConfigError, single_error
from llmnode.net.host import open_network
from llmnode.node.processes import all_ready, private_swarm, with_worker
from llmnode.session.session import open_session
from llmnode.swarm.peer_connection import open_connection
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_of
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterator

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.node.processes import ServerProcess
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.peer_connection import PeerConnection

MIB = 1 << 20
PETALS_MIB = 0.81e9 / MIB
"""Petals' server with all blocks of S. `tests/bench/FIGURES.md` says how it was measured."""
SESSION = 1024
USED = 20
SETTLE_S = 60.0
POLL_S = 0.05
TOLERANCE = 0.1
MOST_PEAK = 1.2


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with random weights, in float32."""

    name: str
    blocks: int
    hidden_size: int

    @property
    def kv_bytes(self) -> int:
        """The keys and values of one position in one block, for all heads."""
        return 2 * self.hidden_size * 4


S, M = Shape("S", 8, 512), Shape("M", 16, 1024)


@dataclass(frozen=True, slots=True)
class Extent:
    """The positions of a server's KV, and of the longest session."""

    kv_tokens: int
    longest: int
    fills_longest: bool
    """Whether the longest session uses all of its positions. The sessions after it fill all KV in any case."""

    @property
    def sessions(self) -> int:
        """This many sessions of `SESSION` positions fill the KV."""
        return self.kv_tokens // SESSION

    @property
    def full(self) -> str:
        return f"{self.sessions} sessions, all KV used"


FULL, THIN = Extent(16_384, 8192, fills_longest=True), Extent(8192, 4096, fills_longest=False)
"""Attention over half of the positions is a quarter of the work."""

MAKE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.open_model import open_model
folder, blocks, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192, hidden_size=size, intermediate_size=size * 11 // 4, num_hidden_layers=blocks,
    num_attention_heads=size // 64, num_key_value_heads=size // 64, max_position_embeddings=16384,
    tie_word_embeddings=False,
)
LlamaForCausalLM(config).save_pretrained(folder)
blueprint_of(open_model(folder))
"""
"""It runs in a process of its own: of pages that this one shared with the servers, only a part would be counted. The
blueprint is kept, so that the first server too can do without transformers."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all processes of a server, in MiB. `peak` is the most that was resident since they started."""

    pss: float
    resident: float
    peak: float


@dataclass(slots=True)
class Measured:
    """A server of the first `blocks` of a model: its memory when it was ready, and later."""

    shape: Shape
    blocks: int
    tensors: float
    """The size of its tensors in MiB."""
    ready: Memory
    later: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By the state of its sessions: the memory that they should have added, and the resident memory, in MiB."""


def add(parser: argparse.ArgumentParser) -> None:
    add_thin(parser)
    add_threads(parser, "torch threads of each server")


async def run(options: Options) -> Report:
    """Raises ConfigError if the system does not tell the memory of a process."""
    if sys.platform != "linux":
        raise ConfigError("bench memory reads /proc/PID/smaps_rollup: run it on Linux")
    with single_error(), TemporaryDirectory(prefix="llmnode-") as folder:
        small = await _make(S, Path(folder))
        extent = THIN if options.thin else FULL
        measured = [await _measure(S, small, blocks, extent, options) for blocks in (1, 4, 8)]
        if not options.thin:
            measured.append(await _measure(M, await _make(M, Path(folder)), M.blocks, extent, options))
    base = measured[0].ready.resident - measured[0].tensors
    rows = [_row_of_nothing(measured[0]), *(row for each in measured for row in _rows(each, base))]
    return Report(rows, _aims(measured, base, extent), legend="MiB, of all of a server's processes")


async def _make(shape: Shape, folder: Path) -> Path:
    path = folder / shape.name
    command = [sys.executable, "-P", "-c", MAKE, str(path), str(shape.blocks), str(shape.hidden_size)]
    await trio.run_process(command, stderr=subprocess.DEVNULL)
    return path


async def _measure(shape: Shape, model: Path, blocks: int, extent: Extent, options: Options) -> Measured:
    spans, flags = [Span(0, blocks)], ["--kv-tokens", str(extent.kv_tokens)]
    async with private_swarm(spans, threads=options.threads, model=str(model), options=flags) as servers:
        await all_ready(servers)
        (server,) = servers
        measured = Measured(shape, blocks, server.tensor_bytes / MIB, _memory(server))
        if shape is S and blocks > 1:
            await _use(server, measured, extent)
        return measured


async def _use(server: ServerProcess, measured: Measured, extent: Extent) -> None:
    """Open a session that reserves much and uses little, let it use more, and then fill all of the KV."""
    position_mib, longest = _position_bytes(measured) / MIB, extent.longest

    def note(what: str, positions: int) -> None:
        measured.later[what] = position_mib * positions, _memory(server).resident

    async with _connected(server) as (connection, model):
        async with _session(connection, model, measured, longest) as session:
            note(f"one session, {longest} reserved, none used", 0)
            await session.step(_states(USED, model))
            note(f"one session, {longest} reserved, {USED} used", USED)
            if extent.fills_longest:
                await session.step(_states(longest - USED, model))
                note(f"one session, {longest} reserved, all used", longest)
        async with AsyncExitStack() as stack:
            for _ in range(extent.sessions):
                session = await stack.enter_async_context(_session(connection, model, measured, SESSION))
                await session.step(_states(SESSION, model))
            note(extent.full, extent.kv_tokens)
        with trio.fail_after(SETTLE_S):
            while (await connection.describe(SETTLE_S)).sessions:  # noqa: ASYNC110 - another process has no event for us
                await trio.sleep(POLL_S)
        note("sessions closed", 0)


def _position_bytes(measured: Measured) -> int:
    """The KV of a position, and its log entry at a hop that is not the last."""
    shape = measured.shape
    logged = 4 * shape.hidden_size if measured.blocks < shape.blocks else 0
    return measured.blocks * shape.kv_bytes + logged


@asynccontextmanager
async def _connected(server: ServerProcess) -> AsyncIterator[tuple[PeerConnection, ModelInfo]]:
    async with open_network([], LinkPolicy()) as network, open_connection(await network.dial(server.address)) as known:
        said = await known.describe(60.0)
        precision = profile_of(said).precision
        info = ModelInfo(said.model, said.model_digest, said.blocks, said.hidden_size, said.context_tokens, precision)
        yield known, info


@asynccontextmanager
async def _session(
    connection: PeerConnection, model: ModelInfo, measured: Measured, positions: int
) -> AsyncIterator[InferenceSession]:
    route = (Hop(connection.peer, Span(0, measured.blocks)),)
    connections = {connection.peer: connection}
    async with open_session(route, connections, SessionTerms(model, positions, Codec.RAW, ClientPolicy())) as session:
        yield session


def _states(positions: int, model: ModelInfo) -> bytes:
    states = np.random.default_rng(0).standard_normal((positions, model.hidden_size), dtype=np.float32)
    return states.tobytes()


def _memory(server: ServerProcess) -> Memory:
    processes = with_worker(server.pid)
    pss = sum(_kib(f"/proc/{each.pid}/smaps_rollup", "Pss") for each in processes)
    resident = sum(_kib(f"/proc/{each.pid}/status", "VmRSS") for each in processes)
    peak = sum(_kib(f"/proc/{each.pid}/status", "VmHWM") for each in processes)
    return Memory(pss / 1024, resident / 1024, peak / 1024)


def _kib(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    assert found is not None, f"{file} has no {name}"
    return int(found[1])


# The report


def _row_of_nothing(least: Measured) -> Row:
    ready = least.ready
    row: Row = {"server": "without blocks", "resident": ready.resident - least.tensors, "should be": "", "of that": ""}
    return row | {"PSS": ready.pss - least.tensors}


def _rows(measured: Measured, base: float) -> list[Row]:
    name, ready = f"{measured.shape.name}, {measured.blocks} blocks", measured.ready
    expected = base + measured.tensors
    row: Row = {"server": name, "resident": ready.resident, "should be": expected, "of that": ready.resident / expected}
    rows = [row | {"PSS": ready.pss, "tensors": measured.tensors, "peak": ready.peak}]
    for what, (added, resident) in measured.later.items():
        should = expected + added
        rows.append(
            {"server": f"{name}: {what}", "resident": resident, "should be": should, "of that": resident / should}
        )
    return rows


def _aims(measured: list[Measured], base: float, extent: Extent) -> Iterator[Aim]:
    off = max(abs(each.ready.resident / (base + each.tensors) - 1) for each in measured[1:])
    full = [(each.later[extent.full], base + each.tensors) for each in measured if extent.full in each.later]
    off_full = max(abs(resident / (without + added) - 1) for (added, resident), without in full)
    peak = max(each.ready.peak / each.ready.resident for each in measured)
    whole = next(each for each in measured if each.blocks == S.blocks).ready.pss
    yield at_most("resident with blocks, off from itself and its tensors", off, TOLERANCE)
    yield at_most("resident with all KV used, off from that and the KV", off_full, TOLERANCE)
    yield at_most("peak while loading, of what is resident then", peak, MOST_PEAK)
    yield below("PSS of a server of S, MiB", whole, round(PETALS_MIB), "Petals")
