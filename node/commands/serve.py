"""`llmnode serve`: a node that runs until it is told to stop."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node.commands.options import (
    MODEL_HELP,
    add_announce,
    add_command,
    add_dtype,
    add_identity,
    add_kv_tokens,
    add_listen,
    at_least_one,
    log_to_stderr,
    threads,
)

if TYPE_CHECKING:
    import argparse

    from llmnode.node.app import NodeConfig, RunningNode
    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        "serve a span of the model's blocks until stopped",
        "  llmnode serve --blocks 0:15 --listen /ip4/127.0.0.1/tcp/4001\n"
        "  llmnode serve --blocks auto --peers ADDRESS      (as `llmnode serve` or `llmnode relay` printed it)\n"
        "  llmnode serve FOLDER --blocks 8 --peers ADDRESS --listen /ip4/0.0.0.0/tcp/4001 --identity node.key\n"
        "  llmnode serve --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001   (behind a port forward)",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--blocks",
        default="auto",
        metavar="BLOCKS",
        help="START:END, END excluded; or how many, and those that the swarm needs most are chosen; "
        "or auto: as many as memory allows (default auto)",
    )
    parser.add_argument(
        "--peers", nargs="+", default=[], metavar="ADDRESS", help="servers or relays of the swarm to join"
    )
    add_listen(parser)
    add_announce(parser)
    add_identity(parser)
    add_kv_tokens(parser)
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if any)"
    )
    add_dtype(parser, "what the blocks are computed in: float32 is exact (default)")
    parser.add_argument(
        "--drain-s",
        type=float,
        default=10.0,
        metavar="S",
        help="on Ctrl-C or SIGTERM, how long sessions may take to end before they have to move on (default 10)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads (default: torch's)")
    parser.add_argument("--verbose", action="store_true", help="say on stderr which links open and end, and why")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="stop when stdin ends, as a child of a program"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, for programs; the ready one has the address"
    )


def run(arguments: argparse.Namespace) -> int:
    import trio

    from llmnode.net.host import LISTEN_ANY_LOOPBACK
    from llmnode.node.app import NodeConfig

    if arguments.verbose:
        log_to_stderr()
    config = NodeConfig(
        model=arguments.model,
        blocks=arguments.blocks,
        peers=arguments.peers,
        listen=arguments.listen or [LISTEN_ANY_LOOPBACK],
        announce=arguments.announce or [],
        kv_tokens=at_least_one(arguments.kv_tokens, "--kv-tokens"),
        device=arguments.device,
        dtype=arguments.dtype,
        threads=threads(arguments),
        identity=arguments.identity,
    )
    drain_s = arguments.drain_s
    if not 0 <= drain_s < float("inf"):
        raise ConfigError(f"--drain-s {drain_s:g}: give 0 or more seconds")
    trio.run(_serve, config, drain_s, arguments.json, arguments.until_stdin_closes)
    return 0


async def _serve(config: NodeConfig, drain_s: float, as_json: bool, until_stdin_closes: bool) -> None:
    import trio

    from llmnode.node.app import open_node
    from llmnode.node.readout import read_out_when_signalled
    from llmnode.node.stopping import stopped_by_signals

    async with (
        stopped_by_signals(until_stdin_closes=until_stdin_closes) as stop,
        open_node(config, _report_json if as_json else _report) as node,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(partial(read_out_when_signalled, node, as_json=as_json))
        stop.in_order()
        (_ready_json if as_json else _ready)(node)
        await stop.requested.wait()
        if stop.by_signal:
            await node.drain(drain_s, _draining_json if as_json else _draining)
        nursery.cancel_scope.cancel()


def _report(text: str) -> None:
    print(f"llmnode: {text}", file=sys.stderr)


def _report_json(text: str) -> None:
    print(json.dumps({"event": "status", "text": text}), flush=True)


def _draining(sessions: int) -> None:
    _report(_left(sessions))


def _draining_json(sessions: int) -> None:
    print(json.dumps({"event": "draining", "sessions": sessions, "text": _left(sessions)}), flush=True)
    _draining(sessions)


def _left(sessions: int) -> str:
    return f"draining: {sessions} session{'s' * (sessions > 1)} left; again to leave at once"


def _ready(node: RunningNode) -> None:
    behind = "" if node.addresses == node.listening else f", listening at {' '.join(node.listening)}"
    print(f"ready: blocks {node.span} of {node.model.name} at {' '.join(node.addresses)}{behind}", flush=True)


def _ready_json(node: RunningNode) -> None:
    event = {
        "event": "ready",
        "peer": node.peer,
        "addresses": list(node.addresses),
        "listening": list(node.listening),
        "model": node.model.name,
        "blocks": [node.span.start, node.span.end],
        "tensor_bytes": node.tensor_bytes,
    }
    print(json.dumps(event), flush=True)
