"""What keeps a node from working on this machine, and how to mend it.

Looks at one thing after another, as a node would use it: nothing is guessed that can be tried. It changes nothing but
what opening a model changes. Knows neither the terminal nor the exit status.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.core.route import uncovered
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError, PeerError, PeerRefused, single_error
from llmnode.models.cache import cache_folder
from llmnode.node.startup import collection_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llmnode.core.model import ModelInfo
    from llmnode.models.folder import ModelFolder
    from llmnode.models.size import ModelSize
    from llmnode.ports import Network
    from llmnode.wire.messages import Description

OK, WARNING, BLOCKER = "ok", "warning", "blocker"
REINSTALL = "set it up again: `node/llmnode setup` in a checkout, else `pip install --force-reinstall llmnode`"
PEERS_FIX = "start that server or take it out of --peers, and see that no firewall is between"
CRC32C_CHECK = 0xE3069283
"""Of b"123456789", as the catalogues of CRCs have it."""
SPARE_DISK_BYTES = 2 << 30
"""The embedded model takes a quarter of it, what torch compiles some more."""


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """What `llmnode doctor` was asked for. `kv_tokens` and `dtype` are what a server would be given."""

    model: str | None
    peers: Sequence[str]
    listen: Sequence[str]
    kv_tokens: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `fix` is empty if there is nothing to mend."""

    check: str
    verdict: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What a peer said of itself, and how long it took. Its clock will be here once it tells it."""

    address: str
    description: Description
    dial_s: float
    answer_s: float


@dataclass(slots=True)
class Doctor:
    """The findings so far. `report` is told each as it comes, `working` in a few words what is looked at."""

    config: DoctorConfig
    report: Callable[[Finding], None]
    working: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)

    def found(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.report(finding)


def blocker_of(findings: Sequence[Finding]) -> Finding | None:
    """The one to mend first: what comes later may only follow from it."""
    return next((finding for finding in findings if finding.verdict == BLOCKER), None)


async def diagnose(doctor: Doctor) -> None:
    """Run every check that the ones before it leave a sense to."""
    doctor.found(check_python())
    doctor.working("loading the Rust extension")
    doctor.found(rust := check_rust())
    doctor.found(check_disk(cache_folder()))
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


def check_disk(cache: Path) -> Finding:
    """Of the cache, which need not be there yet."""
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    elsewhere = "set LLMNODE_CACHE to a folder of yours on a disk with room"
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return Finding(
            "disk", BLOCKER, f"the cache {cache} cannot be written: {existing} is not yours to write", elsewhere
        )
    free = shutil.disk_usage(existing).free
    text = f"the cache {cache} has {_size(free)} of room"
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
    threads = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores"
    return Finding(
        "torch", OK, f"torch {torch.__version__}, transformers {transformers.__version__}, {threads}, device {device}"
    )


def _check_model(doctor: Doctor) -> ModelFolder | None:
    """And the memory that it takes. Blocks for seconds."""
    import torch

    from llmnode.models.size import measure_size
    from llmnode.models.source import open_model

    try:
        folder = open_model(doctor.config.model, doctor.working)
        size = measure_size(folder, getattr(torch, doctor.config.dtype))
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
    doctor.found(check_memory(*_available(), size, doctor.config.kv_tokens))
    return folder


def _available() -> tuple[int, str]:
    """Where `llmnode serve` would compute by default."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0], "GPU memory"
    return psutil.virtual_memory().available, "memory"


def check_memory(available_bytes: int, kind: str, size: ModelSize, kv_tokens: int) -> Finding:
    block, kv = _size(size.block_bytes), _size(size.kv_token_bytes * kv_tokens)
    text = (
        f"{_size(available_bytes)} of {kind} available; a block takes {block} and {kv} for {kv_tokens} tokens of KV, "
        f"a client's ends {_size(size.ends_bytes)}"
    )
    fitting = size.fitting_blocks(available_bytes, kv_tokens)
    if fitting == 0:
        return Finding("memory", BLOCKER, f"{text}: no block fits", "end other programs, or give a lower --kv-tokens")
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
    if not doctor.config.peers:
        return
    await _check_peers(doctor, replace(folder.info, dtype=doctor.config.dtype) if folder is not None else None)


async def _check_peers(doctor: Doctor, model: ModelInfo | None) -> None:
    from llmnode.net.host import open_network

    answers: list[PeerAnswer] = []
    failures: list[PeerError] = []
    addresses = list(dict.fromkeys(doctor.config.peers))
    doctor.working(f"asking {len(addresses)} peers")
    async with open_network([], LinkPolicy()) as network, trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(_check_peer, doctor, network, address, answers, failures)
    if len(failures) == len(addresses):  # a node goes on with those that answer
        doctor.found(Finding("peers", BLOCKER, f"no peer answers: {failures[0]}", PEERS_FIX))
    elif model is not None and answers:
        doctor.found(*check_coverage(answers, model))


async def _check_peer(
    doctor: Doctor, network: Network, address: str, answers: list[PeerAnswer], failures: list[PeerError]
) -> None:
    from llmnode.client.connection import open_connection

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
        text = f"{address} connected in {_ms(dialled_s - started_s)} and has no blocks ({refusal.reason})"
        doctor.found(Finding("peer", OK, text))
    except PeerError as error:
        failures.append(error)
        doctor.found(Finding("peer", WARNING, str(error), PEERS_FIX))
    else:
        answers.append(PeerAnswer(address, description, dialled_s - started_s, answered_s - dialled_s))
        blocks = Span(description.span_start, description.span_end)
        took = f"connected in {_ms(dialled_s - started_s)}, answered in {_ms(answered_s - dialled_s)}"
        doctor.found(Finding("peer", OK, f"{address} has blocks {blocks} of {description.model}; {took}"))


def check_coverage(answers: Sequence[PeerAnswer], model: ModelInfo) -> list[Finding]:
    """Do the peers that answered hold this model, and all of it? No blocker: they may know others, or wait for us."""
    findings: list[Finding] = []
    spans: list[Span] = []
    for answer in answers:
        description = answer.description
        if description.model_digest != model.digest:
            text = f"{answer.address} serves {description.model}, of other weights than our {model.name}"
            findings.append(Finding("peers", WARNING, text, "give the MODEL that it serves"))
        elif description.dtype != model.dtype:
            text = f"{answer.address} computes in {description.dtype}, not in {model.dtype}"
            findings.append(Finding("peers", WARNING, text, f"give --dtype {description.dtype}"))
        else:
            spans.append(Span(description.span_start, description.span_end))
    if missing := uncovered(model.blocks, spans):
        text = f"none of these peers has blocks {', '.join(map(str, missing))} of {model.name}"
        findings.append(
            Finding("peers", WARNING, text, "unless others of their swarm have them, start servers for them")
        )
    elif not findings:
        findings.append(Finding("peers", OK, f"together they have all {model.blocks} blocks"))
    return findings


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
