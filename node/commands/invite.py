"""`llmnode invite`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.node.commands.options import add_command, check_peers

if TYPE_CHECKING:
    import argparse

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
        "--swarm-key", type=Path, required=True, metavar="FILE", help="the swarm's key; made if there is none"
    )
    parser.add_argument(
        "--peers", nargs="+", default=[], metavar="ADDRESS", help="relays or servers of the swarm, to join it through"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.net.swarm_key import make_key, read_key, write_invite

    check_peers(arguments.peers)
    path: Path = arguments.swarm_key
    is_new = not path.exists()
    invite = write_invite(make_key(path) if is_new else read_key(path), arguments.peers)
    if is_new:
        print(f"llmnode: made the key of a new swarm, {path}", file=sys.stderr)
    if not arguments.peers:
        print("llmnode: it names no peers to join through: add --peers once one runs", file=sys.stderr)
    print("llmnode: whoever has this can join: send it to members alone, over what nobody else reads", file=sys.stderr)
    print(
        json.dumps({"invite": invite, "swarm_key": str(path), "peers": arguments.peers}) if arguments.json else invite
    )
    return 0
