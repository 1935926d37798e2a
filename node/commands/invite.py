"""`llmnode invite`: one line that is enough to join a swarm."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node.commands.joining import check_peers, ways_with_model
from llmnode.node.commands.options import add_command
from llmnode.node.terminal import say, show, show_json
from llmnode.node.values import model, path

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "invite",
        run,
        "print one line, and a QR code of it, that is enough to join a swarm",
        "  llmnode invite --peers ADDRESS                           (as `llmnode serve` or a relay printed it)\n"
        "  llmnode invite --peers ADDRESS --model org/name          (with the model, in the revision that is here)\n"
        "  llmnode chat INVITE                                      (on other machines; or generate, status, serve)\n\n"
        "a private swarm has a key, without which nobody connects:\n"
        "  llmnode invite --swarm-key swarm.key                     (makes the key, if there is none)\n"
        "  llmnode relay --swarm-key swarm.key --listen /ip4/0.0.0.0/tcp/4001\n"
        "  llmnode invite --swarm-key swarm.key --peers ADDRESS     (as the relay printed it)",
    )
    parser.add_argument(
        "--peers", nargs="+", default=[], metavar="ADDRESS", help="relays or servers of the swarm, to join it through"
    )
    parser.add_argument(
        "--model",
        type=model,
        metavar="NAME",
        help="the model of the swarm: org/name or org/name@revision on the Hugging Face hub (default: none: "
        "then chat and generate take --model MODEL INVITE, and serve takes MODEL --swarm-key INVITE; without a MODEL "
        "they use the embedded one)",
    )
    parser.add_argument(
        "--swarm-key", type=path, metavar="FILE", help="the key of a private swarm; made if there is none"
    )
    parser.add_argument(
        "--qr",
        action=argparse.BooleanOptionalAction,
        help="show a QR code of the line too (default: if stdout is a terminal)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.net.invite import Invite, write_invite
    from llmnode.net.swarm_key import make_key, read_key

    file: Path | None = arguments.swarm_key
    if not arguments.peers and file is None:
        raise ConfigError("no peers are named: give --peers ADDRESS, as `llmnode serve` or `llmnode relay` prints it")
    check_peers(arguments.peers)
    named = None if arguments.model is None else _name_elsewhere(arguments.model)
    is_new = file is not None and not file.exists()
    key = None if file is None else make_key(file) if is_new else read_key(file)
    invite = write_invite(Invite(tuple(arguments.peers), key, named))
    if is_new:
        say(f"made the key of a new swarm, {file}")
    if not arguments.peers:
        say("it names no peers to join through: add --peers once one runs")
    if key is not None:
        say("whoever has this can join: send it to members alone, over what nobody else reads")
    if arguments.json:
        answer = {"invite": invite, "swarm_key": file and str(file), "peers": arguments.peers, "model": named}
        show_json(answer)
        return 0
    show(invite)
    if arguments.qr or (arguments.qr is None and sys.stdout.isatty()):
        _show_qr(invite)
    return 0


def _name_elsewhere(asked: str) -> str:
    """The name of the model for other machines. Raises ConfigError if they cannot have it by a name."""
    from llmnode.models.names import name_elsewhere
    from llmnode.models.open_model import open_model

    folder = open_model(asked, say)
    if (name := name_elsewhere(folder.name, folder.digest)) is None:
        raise ConfigError(
            f"--model {asked}: only this machine has these files: leave it out, and give the files to those whom you "
            f"invite; {'; '.join(ways_with_model('INVITE'))}"
        )
    return name


def _show_qr(invite: str) -> None:
    from rich.text import Text

    from llmnode.node.qr import MOST_CHARS, qr_lines
    from llmnode.node.terminal import open_console

    if len(invite) > MOST_CHARS:
        say(f"a QR code of {len(invite)} characters could hardly be read: name fewer --peers")
        return
    console = open_console(stderr=False, soft_wrap=True)
    lines = qr_lines(invite)
    if len(lines[0]) > console.width:
        say(f"the QR code takes {len(lines[0])} columns, and this terminal has {console.width}: make it wider")
        return
    for line in lines:
        console.print(Text(line, style="black on white"))
