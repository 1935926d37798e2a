"""Where a server listens, and whether mDNS tells of it, if its user does not say so: from values to a value.

It also checks the addresses that a user gives to a node, before anything is done or said.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmnode.core.peers.dial_gate import PUBLIC, is_local, scope_of
from llmnode.core.policy import SwarmPolicy
from llmnode.errors import ConfigError
from llmnode.net.addresses import parse_announced, parse_listen, parse_peer, parse_relay

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.net.invite import Invite

HERE = "/ip4/127.0.0.1/tcp/0"
EVERYWHERE_4, EVERYWHERE_6 = "/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"


@dataclass(frozen=True, slots=True)
class Listening:
    """Multiaddrs to listen at, whether mDNS tells of them, and a warning, or ""."""

    listen: Sequence[str]
    mdns: bool
    warning: str = ""


def choose_listening(
    listen: Sequence[str],
    contacts: Iterable[str],
    own_ips: Iterable[str],
    *,
    is_private: bool,
    mdns: bool | None,
    in_program: bool = False,
) -> Listening:
    """`listen` and `mdns` are what the user says, [] and None if nothing; `contacts` are the peers and relays named.
    `in_program`: the warning names the fields of `NodeConfig` instead of the options of `llmnode serve`.

    - With contacts beyond this machine and its private networks, or with --mdns, the node is at every interface.
    - With contacts in private networks, or without any, it is in those of this machine. `own_ips` are the addresses of
      this machine, without those of IPv6 if nothing can listen at them.
    - A swarm whose contacts are all on this machine stays there. So does one that begins with --no-mdns or a key.

    The warning says where others reach the node. Raises ConfigError for --mdns where nothing could be told of.
    """
    if mdns and is_private:
        raise ConfigError("--mdns: a private swarm is told to nobody; its members need its invite")
    tells = mdns is not False and not is_private
    named = list(contacts)
    beyond = [each for each in map(_host, named) if not _is_here(each)]
    own = sorted(set(own_ips))
    warning = partial(_warning, is_private=is_private, in_program=in_program)
    private = _in_private_networks(own, beyond)
    if listen:
        reached = not all(_is_here(_host(each)) for each in listen)
        if mdns and not reached:
            raise ConfigError(f"--mdns: nobody else reaches {' '.join(listen)}; give another --listen, or none")
        tells = tells and reached
        return Listening(listen, tells, warning(" ".join(listen), tells) if reached else "")
    if mdns or (beyond and not (private and all(map(is_local, beyond)))):
        why = "--mdns is given" if mdns else "a peer or relay beyond its private networks is named"
        where = everywhere(own)
        interfaces = "every interface of IPv4 and IPv6" if EVERYWHERE_6 in where else "every IPv4 interface"
        return Listening(where, tells, warning(f"{interfaces}, since {why}", tells))
    if not beyond and (named or is_private or mdns is False):
        return Listening([HERE], mdns=False)
    if not private:
        option = _option(everywhere(own), in_program=in_program)
        why = f"listening on this machine alone, since it is in no private network; for others: {option}"
        return Listening([HERE], mdns=False, warning=why)
    at_private = [f"/ip{6 if ':' in each else 4}/{each}/tcp/0" for each in private]
    return Listening(at_private, tells, warning(" ".join(private), tells))


def everywhere(own_ips: Iterable[str]) -> list[str]:
    """Every interface: of IPv6, too, where others may reach one of `own_ips` beyond its own link."""
    reached_at_6 = [each for each in own_ips if ":" in each and (scope_of(each) == PUBLIC or is_local(each))]
    return [EVERYWHERE_4, EVERYWHERE_6] if reached_at_6 else [EVERYWHERE_4]


def _in_private_networks(own: Sequence[str], named: Sequence[str]) -> list[str]:
    """Our addresses there. Those of IPv6 come and go: they count if one is `named`, or if the machine has no IPv4."""
    counts_6 = any(":" in each for each in named) or all(":" in each or each.startswith("127.") for each in own)
    return [each for each in own if is_local(each) and (counts_6 or ":" not in each)]


def check_places(listen: Sequence[str], announce: Sequence[str], way_in: Invite, relays: Sequence[str] = ()) -> None:
    """Raises ConfigError for an address of a node, or of its peers, that is malformed, and for too many."""
    told, most = len(announce) + len(relays), SwarmPolicy().addresses
    if told > most:
        also = f" and --relay {len(relays)}" if relays else ""
        raise ConfigError(f"--announce is given {len(announce)} times{also}: {most} addresses are the most")
    for parse, addresses in (
        (parse_listen, listen),
        (parse_announced, announce),
        (parse_peer, way_in.peers),
        (parse_relay, relays),
    ):
        for address in addresses:
            parse(address)


def _warning(where: str, tells: bool, *, is_private: bool, in_program: bool) -> str:
    switch = "mdns=False" if in_program else "--no-mdns"
    found = f", and found there by mDNS in private networks ({switch} switches that off)" if tells else ""
    users = "members of its private swarm may" if is_private else "anybody who reaches it there may"
    here = _option([HERE], in_program=in_program)
    return f"listening at {where}{found}: {users} use it; {here} is for this machine alone"


def _option(listen: Sequence[str], *, in_program: bool) -> str:
    return f"listen={list(listen)}" if in_program else " ".join(f"--listen {each}" for each in listen)


def _host(address: str) -> str:
    """The host of a multiaddr; "" if it has none."""
    return address.split("/")[2] if address.count("/") >= 2 else ""


def is_on_this_machine(address: str) -> bool:
    """Whether the host of a multiaddr is this machine."""
    return _is_here(_host(address))


def _is_here(host: str) -> bool:
    return host.lower() == "localhost" or scope_of(host) == "machine"
