"""`llmnode invite`: one line that is enough to join a swarm."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node.commands.joining import add_mdns, check_peers, warning_of_reach, ways_with_model
from llmnode.node.commands.options import add_command
from llmnode.node.terminal import say, show, show_json
from llmnode.node.values import model, swarm_key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.core.peers.invited import DialledFrom
    from llmnode.net.invite import Invite
    from llmnode.node.commands.options import Commands
    from llmnode.node.inviting import ServedModel

ALONE = "no node runs on this machine, no peer of a former run answers"
IN_FILE = "FILE_WITH_INVITE"
"""How commands are given an invite with a key: other users of a machine can read its command lines."""
NO_MDNS = "and mDNS is switched off"
NOT_NEARBY = "and mDNS finds none in this network"


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "invite",
        run,
        "print one line, and a QR code of it, that is enough to join a swarm",
        "  llmnode invite                                           (of the swarm that this machine or network is in)\n"
        "  llmnode invite --model org/name                          (with this model, if several are served there)\n"
        "  llmnode invite --peers ADDRESS                           (as `llmnode serve` or a relay printed it)\n"
        "  llmnode chat INVITE                                      (on other machines; or generate, status, serve)\n\n"
        "a private swarm has a key, without which nobody connects:\n"
        "  llmnode invite --swarm-key swarm.key                     (makes the key, if there is none)\n"
        "  llmnode relay --swarm-key swarm.key --listen /ip4/0.0.0.0/tcp/4001\n"
        "  llmnode invite --swarm-key swarm.key                     (on the same machine, while the relay runs)\n"
        "  llmnode invite --swarm-key swarm.key --peers ADDRESS     (elsewhere, as the relay printed it)\n"
        "  llmnode chat FILE                                        (on other machines: a file with it; or serve)",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="relays or servers of the swarm, to join it through (default: those that answer now, of a node that runs "
        "on this machine, else those that mDNS finds, else those of former runs)",
    )
    add_mdns(parser, "find servers in this network, if no peers are named (mDNS; default: on, unless it is private)")
    parser.add_argument(
        "--model",
        type=model,
        metavar="NAME",
        help="the model of the swarm: org/name or org/name@revision on the Hugging Face hub (default: that of a "
        "node on this machine, else the only one of the servers that were found, and none with --peers. For an invite "
        "without a model, chat and generate take "
        "--model MODEL INVITE, and serve takes MODEL --swarm-key INVITE; without a MODEL they use the embedded one)",
    )
    parser.add_argument(
        "--swarm-key",
        type=swarm_key,
        metavar="INVITE|FILE",
        help="the key of a private swarm: a file with it, which is made if there is none; or an invite with the key, "
        "as text or in a file",
    )
    parser.add_argument(
        "--qr",
        action=argparse.BooleanOptionalAction,
        help="show a QR code of the line too (default: if stdout is a terminal)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.core.peers.invited import widest
    from llmnode.net.invite import write_invite
    from llmnode.net.swarm_key import make_key

    given: Path | str | None = arguments.swarm_key
    file = None if isinstance(given, str) else given  # else it is an invite
    check_peers(arguments.peers)
    if file is not None and not os.path.exists(file):
        # All that could fail comes before: a key that was made would be there the next time.
        named = None if arguments.model is None else _name_elsewhere(arguments.model, IN_FILE)
        found, reach = _of_peers(arguments.peers, make_key(file), named), widest(arguments.peers)
        say(f"made the key of a new swarm, {file}")
    else:
        found, reach = _found(arguments, None if given is None else _key_in(given))
    invite = write_invite(found)
    if not found.peers:
        say("it names no peers to join through: start a relay or a server with this key, and then do this again")
    elif told := warning_of_reach(reach):
        say(told)
    if found.key is not None:
        say("anybody with this invite can join: send it to members alone, over a channel that nobody else can read")
        say("give commands a file with it: other users of a machine can read its command lines")
    if arguments.json:
        answer = {"invite": invite, "swarm_key": file and str(file), "peers": found.peers, "model": found.model}
        show_json(answer)
        return 0
    show(invite)
    if arguments.qr or (arguments.qr is None and sys.stdout.isatty()):
        _show_qr(invite)
    return 0


def _key_in(given: Path | str) -> bytes:
    """The key in a file of its own, in an invite, or in a file with one. Raises ConfigError."""
    from llmnode.net.swarm_key import entry

    if (key := entry((), given).key) is None:
        if isinstance(given, str):
            raise ConfigError("--swarm-key is the invite of a public swarm, and no key: leave it out")
        raise ConfigError(f"{given} has the invite of a public swarm, and no key: leave --swarm-key out")
    return key


def _found(arguments: argparse.Namespace, key: bytes | None) -> tuple[Invite, DialledFrom]:
    """The peers that are named, or that answer now, and the model; and from where the peers are dialled. Raises
    ConfigError.
    """
    from llmnode.core.peers.invited import DialledFrom, widest

    asked: str | None = arguments.model
    form = "INVITE" if key is None else IN_FILE
    if arguments.peers:
        named = None if asked is None else _name_elsewhere(asked, form)
        return _of_peers(arguments.peers, key, named), widest(arguments.peers)
    from llmnode.node.inviting import GIVE, find_invited

    found = find_invited(key, say, mdns=arguments.mdns is not False)
    if found is None and key is None:
        why = NO_MDNS if arguments.mdns is False else NOT_NEARBY
        raise ConfigError(
            f"no peers are named, and none were found: {ALONE}, {why}; start `llmnode serve` or `llmnode relay` here, "
            f"or {GIVE}"
        )
    if found is None:
        return _of_peers((), key, _model_of(asked, (), form)), DialledFrom.NOWHERE
    say(f"the invite names {' '.join(found.peers)}")
    return _of_peers(found.peers, key, _model_of(asked, found.models, form)), found.reach


def _of_peers(peers: Sequence[str], key: bytes | None, named: str | None) -> Invite:
    from llmnode.net.invite import Invite

    return Invite(tuple(peers), key, named)


def _model_of(asked: str | None, served: Sequence[ServedModel], form: str) -> str | None:
    """The name of the model for the invite, by what is `served` where it leads; None if that leaves a choice.

    Any server can say that it has any model. So no server's word keeps the user from an invite. Commands are to
    be given the invite in this `form`.
    """
    if asked is not None:
        names = [each.elsewhere for each in served if asked in (each.name, each.elsewhere) and each.elsewhere]
        named = names[0] if len(names) == 1 else _name_elsewhere(asked, form)
        if served and named not in [each.elsewhere for each in served]:
            say(f"no server that answers has {named}: {_listed(served)}")
        return named
    ours = [each for each in served if each.is_ours]
    if not served:
        return None
    if len(ours or served) > 1:
        say(f"it names no model, since the servers have several: {_listed(served)}; to name one: --model")
        return None
    chosen, *others = served  # ours is the first
    if chosen.elsewhere is None:
        ways = "; ".join(ways_with_model(form))
        whose = f"the servers have {chosen.name} in files, which all users of the invite need, too"
        say(f"it names no model: {whose}; {ways}")
        return None
    if others:
        own = f"it names the model of your own servers, {chosen.elsewhere}"
        say(f"{own}; others have {_listed(others)}; to name one of these: --model")
    elif ours or chosen.groups > 1:
        say(f"it names the model that the servers have, {chosen.elsewhere}; for another one: --model")
    else:
        say(
            f"it names {chosen.elsewhere}, which only strangers at one address say that they serve: all users of the "
            "invite download it; for another one: --model"
        )
    return chosen.elsewhere


def _listed(served: Sequence[ServedModel]) -> str:
    return ", ".join(each.elsewhere or f"{each.name} (in files)" for each in served)


def _name_elsewhere(asked: str, form: str) -> str:
    """The name of the model for other machines. Raises ConfigError if they cannot have it by a name."""
    from llmnode.models.names import name_elsewhere
    from llmnode.models.open_model import open_model

    folder = open_model(asked, say)
    if (name := name_elsewhere(folder.name, folder.digest)) is None:
        raise ConfigError(
            f"--model {asked}: only this machine has these files: leave it out, and give the files to the users of the "
            f"invite; {'; '.join(ways_with_model(form))}"
        )
    return name


def _show_qr(invite: str) -> None:
    from rich.text import Text

    from llmnode.node.qr import MOST_CHARS, can_show, qr_lines
    from llmnode.node.terminal import open_console

    if len(invite) > MOST_CHARS:
        say(f"a QR code of {len(invite)} characters could hardly be read: name fewer --peers")
        return
    console = open_console(stderr=False, soft_wrap=True)
    if not can_show(console.encoding):
        say(f"no QR code is shown: {console.encoding} has no characters for it; set LC_ALL=C.UTF-8 if you can")
        return
    lines = qr_lines(invite)
    if len(lines[0]) > console.width:
        say(f"the QR code takes {len(lines[0])} columns, and this terminal has {console.width}: make it wider")
        return
    for line in lines:
        console.print(Text(line, style="black on white"))
