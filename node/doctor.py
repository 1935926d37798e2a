"""Finds the obstacles for a node on this machine, and names the fix of each.

It looks at one thing after another, as a node would use it: nothing is guessed that can be tried. It changes nothing
beyond the changes that opening a model makes. It knows neither the terminal nor the exit status.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.nat import Reached
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.policy import ClientPolicy, LinkPolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError, PeerError, PeerRefused, single_error
from llmnode.machine.cache_folder import cache_folder, is_writable, nearest, show_bytes
from llmnode.machine.startup import collection_paused
from llmnode.machine.threads import usable_cores
from llmnode.node.findings import (
    BLOCKER,
    OK,
    WARNING,
    Finding,
    blocker_of,
    check_clocks,
    check_coverage,
    check_identities,
    check_named,
    check_unread,
)
from llmnode.node.reach import explain, look_by_version
from llmnode.node.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llmnode.core.model import ModelInfo, PrecisionWish
    from llmnode.core.peers.nat import Reach
    from llmnode.models.size import ModelSize, Place
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.net.invite import Invite
    from llmnode.ports import Network
    from llmnode.wire.messages import Description

REINSTALL = "set it up again: `node/llmnode setup` in a checkout, else `pip install --force-reinstall llmnode`"
PEERS_FIX = (
    "start that server or take it out of --peers, see that no firewall is between, and give the --swarm-key of a "
    "private swarm"
)
CRC32C_CHECK = 0xE3069283
"""The checksum of b"123456789", as the catalogues of CRCs list it."""
SPARE_DISK_BYTES = 2 << 30
"""The embedded model takes a quarter of it, and torch's compiled code some more."""


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """The options of `llmnode doctor`. `kv_tokens` and `wish` are those of the server to be."""

    model: str | None
    to: Invite
    """Peers to reach, and the key of their swarm."""
    listen: Sequence[str]
    kv_tokens: int
    wish: PrecisionWish


@dataclass(slots=True)
class Doctor:
    """The findings until now. `report` gets each when it is made, `working` the present check in a few words."""

    config: DoctorConfig
    report: Callable[[Finding], None]
    working: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)

    def found(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.report(finding)


async def diagnose(doctor: Doctor) -> None:
    """Run every check that the ones before it leave a sense to."""
    doctor.found(check_python())
    doctor.working("loading the Rust extension")
    doctor.found(rust := check_rust())
    doctor.found(check_cache())
    doctor.working("loading torch and transformers")
    # Abandoned: Ctrl-C must not wait for imports, nor for a model that is converted.
    doctor.found(torch := await trio.to_thread.run_sync(check_torch, abandon_on_cancel=True))
    folder = None
    if torch.verdict != BLOCKER:
        doctor.working("opening the model")
        folder = await trio.to_thread.run_sync(_check_model, doctor, abandon_on_cancel=True)
    if rust.verdict != BLOCKER:
        with single_error():
            await _check_network(doctor, folder)


def check_python() -> Finding:
    return Finding("python", OK, f"Python {platform.python_version()}, llmnode {importlib.metadata.version('llmnode')}")


def check_rust() -> Finding:
    try:
        from llmnode import _native
    except ImportError as error:
        return Finding("rust", BLOCKER, f"the Rust extension does not load: {error}", REINSTALL)
    if _native.crc32c(b"123456789") != CRC32C_CHECK:
        return Finding("rust", BLOCKER, "the Rust extension computes wrong checksums on this processor", REINSTALL)
    return Finding("rust", OK, f"the Rust extension {_native.__version__} loads, on {platform.machine()}")


def check_cache() -> Finding:
    """A cache that somebody else may write is a blocker, and so is one without a home folder."""
    try:
        return check_disk(cache_folder())
    except ConfigError as error:
        return Finding("disk", BLOCKER, str(error), "do as that says")


def check_disk(cache: Path) -> Finding:
    """The disk of the cache, which need not be there yet."""
    elsewhere = "set LLMNODE_CACHE to a folder of yours on a disk with free space"
    existing = nearest(cache)
    if not existing.is_dir():
        return Finding("disk", BLOCKER, f"the cache {cache} cannot be made: {existing} is no folder", elsewhere)
    if not is_writable(cache):
        lost = "downloads, converted models, measured speeds and known peers are not kept"
        text = f"the cache {cache} cannot be written: {existing} is not yours to write; {lost}"
        return Finding("disk", WARNING, text, elsewhere)
    free = shutil.disk_usage(existing).free
    text = f"the cache {cache} has {show_bytes(free)} free"
    return Finding("disk", WARNING, text, elsewhere) if free < SPARE_DISK_BYTES else Finding("disk", OK, text)


def check_torch() -> Finding:
    try:
        with collection_paused():
            import torch
            import transformers
    except (ImportError, OSError) as error:  # OSError: a shared library of torch's
        return Finding("torch", BLOCKER, f"torch or transformers cannot be imported: {error}", REINSTALL)
    if torch.cuda.is_available():
        device = f"CUDA ({torch.cuda.get_device_name()})"
    else:
        device = "MPS" if torch.backends.mps.is_available() else "CPU"
    cores = usable_cores()
    threads = f"{min(torch.get_num_threads(), cores)} threads on {cores} of {os.cpu_count()} cores"
    return Finding(
        "torch", OK, f"torch {torch.__version__}, transformers {transformers.__version__}, {threads}, device {device}"
    )


def _check_model(doctor: Doctor) -> ModelFolder | None:
    """And the memory that it takes. Blocks for seconds."""
    import torch

    from llmnode.models.open_model import open_model
    from llmnode.models.size import find_places, measure_size
    from llmnode.models.sources.missing import check_blocks

    asked = doctor.config.wish.nearest
    device, kind = ("cuda", "GPU memory") if torch.cuda.is_available() else ("cpu", "memory")  # as `llmnode serve`
    try:
        folder = open_model(doctor.config.model, doctor.working)
        check_blocks(folder)
        size = measure_size(folder, getattr(torch, asked.dtype), asked.quant, asked.kv_dtype, device)
    except ConfigError as error:
        fix = "give another MODEL, or none for the embedded one" if doctor.config.model else "do as that says"
        doctor.found(Finding("model", BLOCKER, str(error), fix))
        return None
    except ModelError as error:
        doctor.found(Finding("model", BLOCKER, str(error), "choose another model, or get this one again"))
        return None
    info = folder.info
    text = f"{info.name}: family {folder.config.model_type}, {info.blocks} blocks, context {info.context_tokens} tokens"
    doctor.found(Finding("model", OK, text))
    doctor.found(check_memory(find_places(device), kind, size, doctor.config.kv_tokens))
    return folder


def check_memory(places: Sequence[Place], kind: str, size: ModelSize, kv_tokens: int) -> Finding:
    """The first of `places` is where blocks are, with their KV."""
    from llmnode.models.size import MEMORY_SHARE, PEERS_BYTES

    block, kv = show_bytes(size.block_bytes), show_bytes(size.kv_token_bytes * kv_tokens)
    text = (
        f"{show_bytes(places[0].free_bytes)} of {kind} free, of which a server takes {MEMORY_SHARE:.0%}, "
        f"with {show_bytes(PEERS_BYTES)} kept for what peers send; "
        f"a block takes {block} and {kv} for {kv_tokens} tokens of KV, "
        f"a client's ends up to {show_bytes(size.ends_bytes)}"
    )
    fitting = size.fitting_blocks(places, lambda _blocks: kv_tokens)
    if fitting == 0:
        fix = "end other programs, raise the container's limit, or give a lower --kv-tokens"
        return Finding("memory", BLOCKER, f"{text}: no block fits", fix)
    return Finding("memory", OK, f"{text}: {fitting} of {size.blocks} blocks fit")


async def _check_network(doctor: Doctor, folder: ModelFolder | None) -> None:
    doctor.working("loading libp2p")
    try:
        from llmnode.net.host import open_network
    except (ImportError, OSError) as error:
        doctor.found(Finding("network", BLOCKER, f"libp2p cannot be imported: {error}", REINSTALL))
        return
    for address in doctor.config.listen:
        doctor.working(f"listening at {address}")
        try:
            with single_error():
                async with open_network([address], LinkPolicy()):
                    pass
            doctor.found(Finding("listen", OK, f"{address} can be listened at"))
        except ConfigError as error:
            doctor.found(
                Finding("listen", BLOCKER, str(error), "stop what holds the address, or give another --listen")
            )
    if not doctor.config.to.peers:
        return
    await check_peers(doctor, None if folder is None else folder.info)


async def check_peers(doctor: Doctor, model: ModelInfo | None) -> None:
    """Each that was named, and through those that answer the swarm that they are in."""
    from llmnode.net.host import open_network

    reached: list[str] = []
    failures: list[PeerError] = []
    addresses = list(dict.fromkeys(doctor.config.to.peers))
    doctor.working(f"asking {counted(len(addresses), 'peer')}")
    described: dict[str, Description] = {}
    async with AsyncExitStack() as stack:
        # One network has one connection to a peer, whatever its addresses: each address of a peer gets another.
        peers = Counter(peer_of(address) for address in addresses)
        networks = [
            await stack.enter_async_context(open_network([], LinkPolicy(), swarm_key=doctor.config.to.key))
            for _ in range(max(peers.values()))
        ]
        async with trio.open_nursery() as nursery:
            for address in addresses:
                peers[peer_of(address)] -= 1
                network = networks[peers[peer_of(address)]]
                nursery.start_soon(_check_peer, doctor, network, address, reached, failures, described)
    doctor.found(*check_named(described))
    if len(failures) == len(addresses):  # a node goes on with those that answer
        doctor.found(Finding("peers", BLOCKER, f"no peer answers: {failures[0]}", PEERS_FIX))
    if reached:
        await _check_reach(doctor, reached)
        await _check_swarm(doctor, reached, model)


async def _check_peer(
    doctor: Doctor,
    network: Network,
    address: str,
    reached: list[str],
    failures: list[PeerError],
    described: dict[str, Description],
) -> None:
    from llmnode.swarm.peer_connection import open_connection

    started_s = dialled_s = trio.current_time()
    try:
        with single_error():
            async with open_connection(await network.dial(address)) as connection:
                dialled_s = trio.current_time()
                description = await connection.describe(ClientPolicy().open_timeout_s)
                answered_s = trio.current_time()
    except ConfigError as error:
        doctor.found(Finding("peer", BLOCKER, str(error), "copy the whole line that the server printed"))
    except PeerRefused as refusal:
        reached.append(address)
        text = f"{address} connected in {_ms(dialled_s - started_s)} and has no blocks ({refusal.reason})"
        doctor.found(Finding("peer", OK, text))
    except PeerError as error:
        failures.append(error)
        doctor.found(Finding("peer", WARNING, str(error), PEERS_FIX))
    else:
        reached.append(address)
        described[address] = description
        blocks = Span(description.span_start, description.span_end)
        took = f"connected in {_ms(dialled_s - started_s)}, answered in {_ms(answered_s - dialled_s)}"
        doctor.found(Finding("peer", OK, f"{address} has blocks {blocks} of {description.model}; {took}"))


async def _check_reach(doctor: Doctor, addresses: Sequence[str]) -> None:
    """Whether others could dial a server here, and which NAT is in the way if not."""
    from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
    from llmnode.net.host import open_network
    from llmnode.net.listeners import listenable_ips
    from llmnode.node.listening import everywhere

    doctor.working("asking how they see this machine")
    is_told = list(doctor.config.listen) != [LISTEN_ANY_LOOPBACK]
    listen = doctor.config.listen if is_told else everywhere(listenable_ips())
    try:
        async with open_network(listen, LinkPolicy(), swarm_key=doctor.config.to.key) as network:
            doctor.found(*reach_findings(await look_by_version(network, addresses)))
    except ConfigError as error:  # the address was checked, but another program may have taken it since
        doctor.found(Finding("reach", WARNING, str(error), "stop what holds the address, or give another --listen"))


def reach_findings(reaches: Sequence[Reach]) -> list[Finding]:
    """A client needs to be reached by nobody, so none of them is a blocker."""
    found = []
    for reach in reaches:
        text, fix = explain(reach, reaches)
        found.append(Finding("reach", WARNING if reach.reached is Reached.NO else OK, text, fix))
    return found or [Finding("reach", OK, "no peer says how it sees this machine")]


async def _check_swarm(doctor: Doctor, addresses: Sequence[str], model: ModelInfo | None) -> None:
    """Clocks, and the servers of `model`, as a client that joins through `addresses` learns of them."""
    from llmnode.swarm.join import join_swarm

    doctor.working("asking what they know of their swarm")
    try:
        async with join_swarm(addresses, LinkPolicy(), swarm_key=doctor.config.to.key) as (_pool, swarm):
            clocks = check_clocks(swarm.clock_offsets_ms, SwarmPolicy().clock_skew_s)
            doctor.found(*check_unread(swarm.unread), *clocks)
            if model is None or blocker_of(clocks):  # with such a clock a view stays empty
                return
            doctor.found(*check_identities(swarm.view.announcements()))
            found = check_coverage(swarm.view.announcements(), model, doctor.config.wish, swarm.met_in())
            if found.verdict != OK:
                doctor.working("asking the directory")
                await swarm.look_up(model.digest)
                found = check_coverage(swarm.view.announcements(), model, doctor.config.wish, swarm.met_in())
            doctor.found(found)
    except PeerError as error:
        doctor.found(Finding("peers", BLOCKER, f"no peer tells what it knows of its swarm: {error}", PEERS_FIX))


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms"
