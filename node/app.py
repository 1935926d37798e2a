"""The composition root: puts network, executor and server together, and runs them until told to stop."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import LinkPolicy, ServePolicy
from llmnode.core.span import Span, parse_span
from llmnode.errors import ConfigError, single_error
from llmnode.net.host import open_network
from llmnode.node.serve.server import Server
from llmnode.node.startup import collection_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.executor import SpanExecutor
    from llmnode.core.ids import PeerId
    from llmnode.models.folder import ModelFolder


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `llmnode serve` was asked for. `blocks` is START:END; `threads` is torch's, None for its own choice."""

    model: str | None
    blocks: str
    listen: Sequence[str]
    kv_tokens: int
    threads: int | None
    until_stdin_closes: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that takes sessions."""

    peer: PeerId
    addresses: Sequence[str]
    model: str
    span: Span
    tensor_bytes: int


async def serve(config: ServeConfig, report: Callable[[str], None], on_ready: Callable[[Ready], None]) -> None:
    """Serve until SIGINT, SIGTERM or, if asked for, the end of stdin. `report` is told in a line what takes long.

    Raises ConfigError (blocks, address, missing model) or ModelError.
    """
    with single_error():
        async with trio.open_nursery() as nursery:
            await nursery.start(_cancel_on_signal, nursery.cancel_scope)
            if config.until_stdin_closes:
                nursery.start_soon(_cancel_on_stdin_end, nursery.cancel_scope)
            await _serve(config, report, on_ready)


async def _serve(config: ServeConfig, report: Callable[[str], None], on_ready: Callable[[Ready], None]) -> None:
    if config.until_stdin_closes and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("--until-stdin-closes needs stdin to be a pipe from the program that starts the server")
    parse_span(config.blocks)  # before the seconds that it takes to know how many there are
    report("loading torch")
    folder, executor = await trio.to_thread.run_sync(_load, config, report, abandon_on_cancel=True)
    # The compute thread must not keep the event loop from its heartbeats for longer than this.
    sys.setswitchinterval(0.0005)
    span = executor.span
    from llmnode.compute.worker import ThreadWorker
    from llmnode.models.parts import tensor_bytes

    async with open_network(config.listen, LinkPolicy()) as network:
        on_ready(Ready(network.peer, network.addresses, folder.info.name, span, tensor_bytes(executor.model)))
        policy = ServePolicy(kv_tokens=config.kv_tokens)
        await Server(ThreadWorker(executor), folder.info, policy).run(network)


def _load(config: ServeConfig, report: Callable[[str], None]) -> tuple[ModelFolder, SpanExecutor]:
    with collection_paused():
        import torch

        from llmnode.compute.executor import load_executor
        from llmnode.models.source import open_model

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        folder = open_model(config.model, report)
        span = parse_span(config.blocks, folder.info.blocks)
        report(f"reading blocks {span} of {folder.info.name}")
        return folder, load_executor(folder, span, config.kv_tokens)


async def _cancel_on_signal(
    scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _signal in signals:
            scope.cancel()
            return


async def _cancel_on_stdin_end(scope: trio.CancelScope) -> None:
    """A parent holds our stdin open; however it ends, so do we."""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        while await stdin.receive_some(1024):
            pass
    scope.cancel()
