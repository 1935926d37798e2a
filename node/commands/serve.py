"""`llmnode serve`: a node that runs until it is told to stop."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.node.commands.joining import add_mdns, add_peers, private_invite, ways_with_model
from llmnode.node.commands.options import (
    add_announce,
    add_blocks,
    add_command,
    add_identity,
    add_listen,
    add_relay,
    add_worker,
    log_to_stderr,
    worker_config,
)
from llmnode.node.terminal import show, show_json, tell
from llmnode.node.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.net.invite import Invite
    from llmnode.node.app import NodeConfig
    from llmnode.node.commands.options import Commands
    from llmnode.node.running_node import RunningNode


PAPER_PERCENT = 20.0


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        "serve a span of the model's blocks until stopped",
        "  llmnode serve                                    (joins the swarm of this network, or begins one)\n"
        "  llmnode serve INVITE                             (as `llmnode invite` or `llmnode serve` printed it)\n"
        "  llmnode serve --blocks 0:15 --listen /ip4/127.0.0.1/tcp/4001\n"
        "  llmnode serve --blocks auto --peers ADDRESS      (as `llmnode serve` or `llmnode relay` printed it)\n"
        "  llmnode serve FOLDER --blocks 8 --peers ADDRESS --listen /ip4/0.0.0.0/tcp/4001 --identity node.key\n"
        "  llmnode serve --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.7/tcp/4001  (behind a port forward)\n"
        "  llmnode serve --peers RELAY --relay RELAY        (behind a NAT: the address that `llmnode relay` printed)",
    )
    add_blocks(parser)
    parser.add_argument(
        "--rebalance",
        action=argparse.BooleanOptionalAction,
        help="move to other blocks when the swarm needs this server more there; a server with --blocks START:END stays "
        "(default: on for --blocks N and --blocks auto)",
    )
    parser.add_argument(
        "--paper-rule",
        nargs="?",
        type=float,
        const=PAPER_PERCENT,
        metavar="PERCENT",
        help="move by the rule of the Petals paper instead of by the plan that all servers share: when the swarm would "
        f"have this much more throughput (default {PAPER_PERCENT:g}); write --paper-rule=PERCENT before an INVITE",
    )
    add_peers(parser, "servers or relays of the swarm to join", invite=False)
    add_mdns(
        parser,
        "tell nodes in the networks of this machine, and without --peers find theirs (mDNS; default: on where other "
        "machines reach this node, and never for a private swarm)",
    )
    add_listen(
        parser,
        "every interface with --mdns, or if peers, an INVITE or a relay beyond its private networks are named; "
        "this machine alone if all are on it, or if none is named and the swarm is private or --no-mdns is given; else "
        "the private networks of this machine",
    )
    add_announce(parser)
    add_relay(parser)
    add_identity(parser)
    add_worker(parser)
    parser.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="LoRA adapters that PEFT has saved, to hold for clients that name them: FOLDER, or one on the hub "
        "(org/name), or NAME= before either; this node announces their names and digests (default: only those that "
        "clients bring)",
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=10.0,
        metavar="S",
        help="on Ctrl-C or SIGTERM, how long sessions may take to end before they have to move on (default 10)",
    )
    parser.add_argument("--verbose", action="store_true", help="say on stderr which links open and end, and why")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="stop when stdin ends, as a child of a program"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, for programs; the ready one has the address"
    )


def run(arguments: argparse.Namespace) -> int:
    from llmnode.net.listeners import listenable_ips
    from llmnode.node.app import check
    from llmnode.node.listening import choose_listening
    from llmnode.node.stopping import run_async

    if arguments.rebalance and ":" in (arguments.blocks or ""):
        raise ConfigError(
            f"--rebalance: a server with --blocks {arguments.blocks} stays there; give --blocks N, or --blocks auto"
        )
    if arguments.paper_rule is not None and (arguments.rebalance is False or ":" in (arguments.blocks or "")):
        raise ConfigError(
            "--paper-rule says when this server moves; give --blocks N or --blocks auto, without --no-rebalance"
        )
    if arguments.verbose:
        log_to_stderr()
    config = worker_config(arguments)
    to = config.way_in()
    listening = choose_listening(
        arguments.listen or [],
        [*to.peers, *arguments.relay],
        listenable_ips(),
        is_private=to.key is not None,
        mdns=arguments.mdns,
    )
    config = replace(
        config,
        rebalance=arguments.rebalance is not False,
        paper_rule=arguments.paper_rule,
        listen=listening.listen,
        mdns=listening.mdns,
        announce=arguments.announce or [],
        relays=arguments.relay,
        identity=arguments.identity,
        adapters=arguments.adapters,
    )
    if arguments.make_loader is not None:
        config = replace(config, make_loader=arguments.make_loader)
    check(config)  # before the warning
    drain_s = arguments.drain_s
    if not 0 <= drain_s < float("inf"):
        raise ConfigError(f"--drain-s {drain_s:g}: give 0 or more seconds")
    serve = partial(_serve, config, drain_s, listening.warning, until_stdin_closes=arguments.until_stdin_closes)
    run_async(partial(serve, arguments.swarm_key, as_json=arguments.json))
    return 0


async def _serve(
    config: NodeConfig,
    drain_s: float,
    warning: str,
    given_key: Path | str | None,
    *,
    until_stdin_closes: bool,
    as_json: bool,
) -> None:
    import trio

    from llmnode.machine.startup import leave_out_loaded
    from llmnode.node.app import open_node
    from llmnode.node.introspect import introspect_when_signalled, tell_figures
    from llmnode.node.status_lines import Telling, terminal
    from llmnode.node.stopping import stopped_by_signals
    from llmnode.swarm.own_nodes import note_running

    to = config.way_in()
    with Telling(None if as_json else terminal()) as telling:
        if warning:
            (_report_json if as_json else telling.tell)(f"warning: {warning}")
        async with (
            stopped_by_signals(until_stdin_closes=until_stdin_closes) as stop,
            open_node(
                config,
                _report_json if as_json else telling.tell,
                _addresses_json if as_json else _addresses,
                _worker_json if as_json else _worker,
                partial(telling.notice, as_json=as_json),
            ) as node,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(partial(introspect_when_signalled, node, as_json=as_json))
            leave_out_loaded()
            stop.in_order()
            telling.stop()
            await nursery.start(note_running, node.network, [*to.peers, *config.relays], to.key)
            if as_json:
                _ready_json(node)
            else:
                _ready(node, given_key)
            tell_figures(node, as_json=as_json)
            if not config.relays:
                nursery.start_soon(_warn_if_unreached, node, as_json)
            await stop.requested.wait()
            if stop.by_signal:
                await node.drain(drain_s, _draining_json if as_json else _draining)
            tell_figures(node, as_json=as_json)
            nursery.cancel_scope.cancel()


async def _warn_if_unreached(node: RunningNode, as_json: bool) -> None:
    """A server that nobody can dial is chosen by clients all the same, and costs each of them seconds."""
    from llmnode.core.peers.nat import Reached
    from llmnode.node.reach import explain

    reaches = await node.look()
    for reach in reaches:
        if reach.reached is not Reached.NO:
            continue
        text, fix = explain(reach, reaches)
        if as_json:
            event = {"event": "unreached", "nat": str(reach.nat), "host": reach.host, "text": text, "fix": fix}
            show_json(event)
        tell(f"{text}; {fix}")


def _report_json(text: str) -> None:
    show_json({"event": "status", "text": text})


def _addresses(addresses: Sequence[str]) -> None:
    tell(_reached(addresses))


def _addresses_json(addresses: Sequence[str]) -> None:
    show_json({"event": "addresses", "addresses": list(addresses), "text": _reached(addresses)})


def _reached(addresses: Sequence[str]) -> str:
    return f"now reached at {' '.join(addresses)}" if addresses else "not reached any more: no relay reserves for us"


def _worker(text: str, _serves: bool) -> None:
    tell(text)


def _worker_json(text: str, serves: bool) -> None:
    show_json({"event": "worker", "serves": serves, "text": text})
    tell(text)


def _draining(sessions: int) -> None:
    tell(_left(sessions))


def _draining_json(sessions: int) -> None:
    show_json({"event": "draining", "sessions": sessions, "text": _left(sessions)})
    _draining(sessions)


def _left(sessions: int) -> str:
    return f"draining: {counted(sessions, 'session')} left; stop it again to leave at once"


def _invite(node: RunningNode) -> Invite | None:
    """An invite for others, without the key of a private swarm; None for a node that announces no address where others
    could be. It names no model of which only this machine has the files.
    """
    from llmnode.core.peers.invited import Candidate, choose_invited
    from llmnode.models.names import name_elsewhere
    from llmnode.net.invite import Invite

    peers = choose_invited([Candidate(node.addresses)])
    return Invite(peers, model=name_elsewhere(node.model.name, node.model.digest)) if peers else None


def _ready(node: RunningNode, given_key: Path | str | None = None) -> None:
    """`given_key` is a file with the key of its swarm, or an invite, as the user gave it."""
    from llmnode.net.invite import write_invite

    behind = "" if node.addresses == node.listening else f", listening at {' '.join(node.listening)}"
    show(printable(f"ready: blocks {node.span} of {node.model.name} at {' '.join(node.addresses)}{behind}"))
    for each in node.server.own_adapters:
        show(f"adapter {each.name}: rank {each.rank}, digest {each.digest.hex()}")
    if (invite := _invite(node)) is None:
        return
    if node.is_private:
        show(private_invite(given_key, invite.peers, invite.model))
        return
    if invite.model is not None:
        show(f"to use or join it: llmnode chat|generate|status|serve {write_invite(invite)}")
        return
    show("its files are on this machine alone: others need them too, and name them as MODEL")
    for line in ways_with_model(write_invite(invite)):
        show(line)


def _ready_json(node: RunningNode) -> None:
    from llmnode.net.invite import write_invite

    invite = None if node.is_private else _invite(node)  # its key belongs in no log
    event = {
        "event": "ready",
        "peer": node.peer,
        "addresses": list(node.addresses),
        "listening": list(node.listening),
        "model": node.model.name,
        "blocks": [node.span.start, node.span.end],
        "dtype": node.model.precision.name,
        "tensor_bytes": node.tensor_bytes,
        "adapters": [
            {"name": each.name, "rank": each.rank, "digest": each.digest.hex()} for each in node.server.own_adapters
        ],
        "invite": invite and write_invite(invite),
    }
    show_json(event)
