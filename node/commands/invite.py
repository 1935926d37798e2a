"""`llmnode invite`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.node.commands.options import add_command, check_peers
from llmnode.node.terminal import say, show, show_json
from llmnode.node.values import path

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "invite",
        run,
        "make a private swarm, or let others into it: prints what they give to --swarm-key",
        "  llmnode invite --swarm-key swarm.key                     (makes the key, if there is none)\n"
        "  llmnode relay --swarm-key swarm.key --listen /ip4/0.0.0.0/tcp/4001\n"
        "  llmnode invite --swarm-key swarm.key --peers ADDRESS     (as the relay printed it)\n"
        "  llmnode serve --swarm-key INVITE                         (on other machines)\n"
        "  llmnode chat --swarm-key INVITE",
    )
    parser.add_argument(
        "--swarm-key", type=path, required=True, metavar="FILE", help="the swarm's key; made if there is none"
    )
    parser.add_argument(
        "--peers", nargs="+", default=[], metavar="ADDRESS", help="relays or servers of the swarm, to join it through"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.net.swarm_key import make_key, read_key, write_invite

    check_peers(arguments.peers)
    file: Path = arguments.swarm_key
    is_new = not file.exists()
    invite = write_invite(make_key(file) if is_new else read_key(file), arguments.peers)
    if is_new:
        say(f"made the key of a new swarm, {file}")
    if not arguments.peers:
        say("it names no peers to join through: add --peers once one runs")
    say("whoever has this can join: send it to members alone, over what nobody else reads")
    if arguments.json:
        show_json({"invite": invite, "swarm_key": str(file), "peers": arguments.peers})
    else:
        show(invite)
    return 0
