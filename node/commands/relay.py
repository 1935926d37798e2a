"""`llmnode relay`: a node that holds no blocks, where others join the swarm and reach those that cannot be dialled."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from llmnode.node.commands.joining import add_peers, private_invite, warning_of_reach, way_in
from llmnode.node.commands.options import (
    add_announce,
    add_command,
    add_identity,
    add_listen,
    log_to_stderr,
)
from llmnode.node.terminal import show, show_json, tell

if TYPE_CHECKING:
    import argparse

    from llmnode.net.host import Libp2pNetwork
    from llmnode.net.invite import Invite
    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "relay",
        run,
        "introduce the nodes of a swarm to each other, and connect them with those that nobody can dial",
        "  llmnode relay --listen /ip4/0.0.0.0/tcp/4001 --identity relay.key\n"
        "  llmnode serve INVITE                            (as the relay printed it; on other machines)\n"
        "  llmnode serve INVITE --relay ADDRESS            (on one behind a NAT: the relay's address)\n"
        "  llmnode invite                                  (on the same machine: names servers and their model, too)\n"
        "  llmnode chat INVITE",
    )
    add_listen(
        parser,
        "every interface if peers beyond its private networks are named, these networks if peers there are named, "
        "else this machine alone",
    )
    add_announce(parser)
    add_peers(parser, "other relays or servers of the same swarm")
    add_identity(parser)
    parser.add_argument("--verbose", action="store_true", help="say on stderr which links open and end, and why")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="stop when stdin ends, as a child of a program"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, with the address, when it is ready")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.stopping import run_async

    if arguments.verbose:
        log_to_stderr()
    run_async(_relay, arguments, way_in(arguments, needs_peers=False))
    return 0


async def _relay(arguments: argparse.Namespace, to: Invite) -> None:
    import trio

    from llmnode.machine.startup import leave_out_loaded
    from llmnode.net.listeners import listenable_ips
    from llmnode.node.app import open_relay
    from llmnode.node.listening import check_places, choose_listening
    from llmnode.node.status_lines import Telling
    from llmnode.node.stopping import stopped_by_signals
    from llmnode.swarm.own_nodes import note_running

    notice = partial(Telling(None).notice, as_json=arguments.json)
    is_private = to.key is not None
    listen, announce = arguments.listen or [], arguments.announce or []
    chosen = choose_listening(listen, to.peers, listenable_ips(), is_private=is_private, mdns=False)
    check_places(chosen.listen, announce, to)  # before the warning
    if chosen.warning:
        tell(f"warning: {chosen.warning}")
    async with (
        stopped_by_signals(until_stdin_closes=arguments.until_stdin_closes) as stop,
        open_relay(chosen.listen, announce, to, arguments.identity, notice) as network,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(note_running, network, to.peers, to.key)
        leave_out_loaded()
        stop.in_order()
        _ready(network, arguments, is_private=is_private)
        await stop.requested.wait()
        nursery.cancel_scope.cancel()


def _ready(network: Libp2pNetwork, arguments: argparse.Namespace, *, is_private: bool) -> None:
    from llmnode.core.peers.invited import Candidate, choose_invited, widest
    from llmnode.net.invite import Invite, write_invite

    peers = choose_invited([Candidate(network.addresses)])
    invite = None if is_private or not peers else write_invite(Invite(peers))
    if arguments.json:
        event = {
            "event": "ready",
            "peer": network.peer,
            "addresses": network.addresses,
            "listening": network.listening,
            "invite": invite,
        }
        show_json(event)
        return
    show(f"ready: relay at {' '.join(network.addresses)}")
    if arguments.identity is None:
        show("its address changes at each start: --identity FILE keeps it")
    if invite is not None:
        show(f"to use or join its swarm: llmnode chat|generate|status|serve {invite}")
        show("an invite that names the model, too: llmnode invite")
    elif peers:
        show(private_invite(arguments.swarm_key, peers))
    if not peers:
        tell("nobody can dial this relay, so there is no invite: name an address of it with --announce ADDRESS")
    elif told := warning_of_reach(widest(peers)):
        tell(told)
