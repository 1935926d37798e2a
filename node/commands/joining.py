"""The options by which a command gets into a swarm: an invite, peers, the key of a private swarm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node import values

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from llmnode.net.invite import Invite


def add_peers(parser: argparse.ArgumentParser, what: str, *, invite: bool = True) -> None:
    """--peers and --swarm-key, and INVITE instead of these, for `way_in`."""
    group = parser.add_mutually_exclusive_group()
    if invite:
        group.add_argument(
            "invite",
            nargs="?",
            metavar="INVITE",
            help="all that it takes to join: the line that `llmnode invite` or `llmnode serve` printed, or a file "
            "with it",
        )
    parser.add_argument("--peers", nargs="+", default=[], metavar="ADDRESS", help=what)
    group.add_argument(
        "--swarm-key",
        type=values.swarm_key,
        metavar="INVITE|FILE",
        help="of a private swarm: an invite, which names peers too, or a file with its key or with an invite "
        "(see `llmnode invite`)",
    )


def way_in(arguments: argparse.Namespace, *, needs_peers: bool = True) -> Invite:
    """From the options of `add_peers`: a typing error is told before the seconds that loading takes.

    Raises ConfigError, also if no peers are named and it `needs_peers`.
    """
    from llmnode.net.invite import INVITE, is_invite
    from llmnode.net.swarm_key import entry

    invite = getattr(arguments, "invite", None)
    if invite is not None and not is_invite(invite) and not Path(invite).is_file():
        raise ConfigError(
            f"INVITE is no invite, and no file with one: an invite begins with {INVITE}; addresses go after --peers"
        )
    found = entry(arguments.peers, arguments.swarm_key if invite is None else invite)
    if needs_peers and not found.peers:
        raise ConfigError("no peers are named: give an INVITE, or --peers ADDRESS as `llmnode serve` prints it")
    check_peers(found.peers)
    return found


def check_peers(peers: Sequence[str]) -> None:
    """Raises ConfigError."""
    from llmnode.net.addresses import parse_peer

    for peer in peers:
        parse_peer(peer)
