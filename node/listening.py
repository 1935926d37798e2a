"""Where a server listens, and whether mDNS tells of it, if its user does not say so: from values to a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.peers.dial_gate import is_local, scope_of
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HERE = "/ip4/127.0.0.1/tcp/0"
EVERYWHERE = "/ip4/0.0.0.0/tcp/0"
_RISK = f"anybody who reaches it there may use it; --listen {HERE} is for this machine alone"


@dataclass(frozen=True, slots=True)
class Listening:
    """Multiaddrs to listen at, whether mDNS tells of them, and a warning, or ""."""

    listen: Sequence[str]
    mdns: bool
    warning: str = ""


def choose_listening(
    listen: Sequence[str], contacts: Iterable[str], own_ips: Iterable[str], *, is_private: bool, mdns: bool | None
) -> Listening:
    """`listen` and `mdns` are what the user says, [] and None if nothing; `contacts` are the peers and relays named.

    - A swarm that is joined on purpose, by contacts beyond this machine or by --mdns, has this node at every interface.
    - Without any of these the node is in the private networks of this machine, for those that mDNS brings. `own_ips`
      are the addresses of this machine.
    - A swarm whose contacts are all on this machine stays there, and so does one with --no-mdns, and a private one.

    Raises ConfigError for --mdns where nothing could be told of.
    """
    named = list(contacts)
    if mdns and is_private:
        raise ConfigError("--mdns: a private swarm is told to nobody; its members need its invite")
    if listen:
        reached = any(_scope(each) != "machine" for each in listen)
        if mdns and not reached:
            raise ConfigError(f"--mdns: nobody else reaches {' '.join(listen)}; give another --listen, or none")
        return Listening(listen, mdns is not False and reached and not is_private)
    if mdns or any(_scope(each) != "machine" for each in named):
        warning = f"listening at every interface, since this node joins a swarm of other machines: {_RISK}"
        return Listening([EVERYWHERE], mdns is not False and not is_private, warning)
    private = sorted({each for each in own_ips if is_local(each)})
    if named or is_private or mdns is False:
        return Listening([HERE], mdns=False)
    if not private:
        warning = (
            f"listening on this machine alone, since it is in no private network; for others: --listen {EVERYWHERE}"
        )
        return Listening([HERE], mdns=False, warning=warning)
    warning = f"listening at {' '.join(private)}, and found there by mDNS (--no-mdns to be neither): {_RISK}"
    return Listening([f"/ip4/{each}/tcp/0" for each in private], mdns=True, warning=warning)


def _scope(address: str) -> str | None:
    """The network of a multiaddr's host: "machine" for the loopback."""
    return scope_of(address.split("/")[2]) if address.count("/") >= 2 else None
