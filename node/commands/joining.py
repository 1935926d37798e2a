"""The options by which a command gets into a swarm: an invite, peers, the key of a private swarm, or mDNS."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node import values
from llmnode.node.terminal import say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.core.peers.invited import DialledFrom
    from llmnode.net.invite import Invite

PORT = 4001
"""The one that help texts suggest."""
FIND = "find a public swarm in this network, if no peers are named (mDNS; default: on)"


def add_mdns(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--mdns", action=argparse.BooleanOptionalAction, help=what)


def add_peers(parser: argparse.ArgumentParser, what: str, *, invite: bool = True) -> None:
    """--peers and --swarm-key, and INVITE instead of these, for `way_in`. Without `invite`, MODEL may be one, for
    `model_and_way_in`.
    """
    if invite:
        parser.add_argument(
            "invite",
            nargs="?",
            metavar="INVITE",
            help="all that it takes to join: the line that `llmnode invite` or `llmnode serve` printed, or a file "
            "with it",
        )
    parser.add_argument("--peers", nargs="+", default=[], metavar="ADDRESS", help=what)
    parser.add_argument(
        "--swarm-key",
        type=values.swarm_key,
        metavar="INVITE|FILE",
        help="of a private swarm: an invite, which names peers too, or a file with its key or with an invite "
        "(see `llmnode invite`)",
    )


def way_in(arguments: argparse.Namespace, *, needs_peers: bool = True) -> Invite:
    """From the options of `add_peers`: a typing error is told before the seconds that loading takes.

    If no peers are named and it `needs_peers`, those of this network are looked for, unless the swarm is private.
    Raises ConfigError, also if there are none.
    """
    from llmnode.net.invite import INVITE, is_invite

    invite = arguments.invite
    if invite is not None and not is_invite(invite) and not os.path.isfile(invite):
        raise ConfigError(
            f"INVITE is no invite, and no file with one: an invite begins with {INVITE}; addresses go after --peers"
        )
    found = _entry(arguments, "invite", invite)
    if needs_peers and not found.peers:
        return _nearby(arguments, found)
    check_peers(found.peers)
    return found


def model_and_way_in(arguments: argparse.Namespace) -> tuple[str | None, Invite]:
    """From MODEL|INVITE, and the options of `add_peers` if the command has them. A file may have the INVITE.

    Raises ConfigError.
    """
    from llmnode.net.invite import is_invite
    from llmnode.net.swarm_key import is_invite_file

    named: str | None = arguments.model
    is_way_in = named is not None and (is_invite(named) or is_invite_file(named))
    invite, model = (named, None) if is_way_in else (None, named)
    found = _entry(arguments, "model", invite)
    return model or found.hub_model, found


def swarm_to_join(arguments: argparse.Namespace, named: Invite) -> Invite:
    """The swarm that was `named`; else, if none was, that of this network. Raises ConfigError if there is none."""
    if not named.peers:
        return _nearby(arguments, named)
    check_peers(named.peers)
    return named


def _entry(arguments: argparse.Namespace, dest: str, invite: str | None) -> Invite:
    """The way in by the `invite` of the option `dest`, or without one. A key of the settings is used if the invite has
    none. If one of the two is on the command line, its key goes before that of the settings.
    """
    from llmnode.net.swarm_key import entry

    peers, key = getattr(arguments, "peers", ()), getattr(arguments, "swarm_key", None)
    if invite is None or key is None:
        return entry(peers, key, invite)
    if {dest, "swarm_key"} <= arguments.given:
        raise ConfigError(
            "argument --swarm-key: not allowed with argument INVITE, which has the key if its swarm is private: leave "
            "one of them out"
        )
    (first, used), (second, other) = (invite, "the invite"), (key, "swarm-key")
    if "swarm_key" in arguments.given:
        (first, used), (second, other) = (key, "--swarm-key"), (invite, "the invite")
    found = entry(peers, first)
    if found.key is not None:
        if first != second:
            say(f"{used} has the key of its swarm: {other} of the settings is not used")
        return found
    added = entry(found.peers, second)
    return replace(added, model=found.model or added.model)


def ways_with_model(invite: str) -> tuple[str, str]:
    """How to use and how to join a swarm by an `invite` without a model, as lines for its reader.

    An invite with a key is to be in a file: other users of a machine can read its command lines.
    """
    return (
        f"to use it: llmnode chat --model MODEL {invite}",
        f"to join it: llmnode serve MODEL --swarm-key {invite}",
    )


def warning_of_reach(reach: DialledFrom) -> str:
    """A line for the maker of an invite whose peers have this `reach`, if not everybody can dial them; "" otherwise."""
    from llmnode.core.peers.invited import DialledFrom

    match reach:
        case DialledFrom.INTERNET:
            return ""
        case DialledFrom.NETWORK:
            return (
                "this invite is of use in the private network of its peers alone: for others, start them with "
                "--announce ADDRESS, where they are reached from outside, or servers behind a NAT with --relay ADDRESS"
            )
        case DialledFrom.MACHINE:
            return (
                "this invite is of use on this machine alone, where its peers are: for others, start them with "
                + _everywhere()
            )
        case DialledFrom.NOWHERE:
            return "this invite is of no use: nobody can dial the addresses of its peers"


def _everywhere() -> str:
    """The options to listen at every interface: over IPv6, too, where this machine may be reached so."""
    from llmnode.net.listeners import listenable_ips
    from llmnode.node.listening import everywhere

    return " ".join(f"--listen {each.removesuffix('/0')}/{PORT}" for each in everywhere(listenable_ips()))


def private_invite(given_key: Path | str | None, peers: Sequence[str], model: str | None = None) -> str:
    """A line that says how to invite to a private swarm, of which a node was given the key: a file, or an invite.

    The node does not print the invite itself, though its user may see it: what a server prints ends up in logs.
    """
    from llmnode.net.invite import is_invite

    if given_key is None or is_invite(given_key):
        return "others join by the invite that this node was started with, which has the key"
    named = ["--model", model] if model is not None else []
    command = shlex.join(["llmnode", "invite", "--swarm-key", str(given_key), "--peers", *peers, *named])
    return f"its invite has the key, and is not shown here: {command}"


def _nearby(arguments: argparse.Namespace, named: Invite) -> Invite:
    from llmnode.node.nearby import GIVE, find_swarm

    if named.key is not None or arguments.mdns is False:
        raise ConfigError(f"no peers are named: {GIVE}")
    return replace(find_swarm(say), model=named.model)


def check_peers(peers: Sequence[str]) -> None:
    """Raises ConfigError."""
    from llmnode.net.addresses import parse_peer

    for peer in peers:
        parse_peer(peer)
