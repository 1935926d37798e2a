"""Explains to the user why a peer could not be dialled. Opens no connection."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from libp2p.exceptions import MultiError
from libp2p.security.noise.exceptions import NoiseFailure, PeerIDMismatchesPubkey

if TYPE_CHECKING:
    from multiaddr import Multiaddr

NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
FIRST_WORDS = {
    b"HTTP/": "it answers by HTTP, so another program has this port",
    b"SSH-": "it answers by SSH, so another program has this port",
    b"\x15\x03": "it answers by TLS, so another program has this port",
    b"\x16\x03": "it answers by TLS, so another program has this port",
    b"\x13/multistream/": "it is a node of libp2p that has other ways to encrypt",
}


def explain_failure(error: BaseException, address: Multiaddr) -> str:
    """The cause of a failed dial to `address`, with advice."""
    cause = root_of(error)
    if isinstance(cause, PeerIDMismatchesPubkey):
        return f"({cause}): copy its address anew; only with --identity a node is the same at its next start"
    if isinstance(cause, socket.gaierror):
        return f"(no such name: {cause.strerror}): see that it is written as it should be, and that DNS knows it"
    if isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED:
        return f"(Connection refused: nothing listens there): {_where_it_listens(address)}"
    if isinstance(cause, OSError) and cause.errno in NO_WAY:
        version = next(iter(address.protocols())).name
        other = "; this machine may have no IPv6: use an address of IPv4" if version in ("ip6", "dns6") else ""
        return f"({os.strerror(cause.errno)}): there is no way there from this machine{other}"
    return f"({innermost(error)})"


def _where_it_listens(address: Multiaddr) -> str:
    protocol = next(iter(address.protocols())).name
    if protocol in ("ip4", "ip6") and ipaddress.ip_address(host := address.value_for_protocol(protocol)).is_loopback:
        return f"{host} is this machine itself: see that the node runs; on another machine it needs another --listen"
    return "see that the node runs, and listens at that address and port"


def name_stranger(answer: bytes) -> str:
    """A name for the program that answers in the place of a node of libp2p with Noise, found by its first bytes."""
    for words, name in FIRST_WORDS.items():
        if answer.startswith(words):
            return name
    return "it is no node of libp2p, so another program has this port"


def root_of(error: BaseException) -> BaseException:
    """The root cause; libp2p wraps an OSError in several layers. A failure of Noise is a root cause."""
    while not isinstance(error, NoiseFailure):
        match error:
            case BaseExceptionGroup(exceptions=inner) | MultiError(errors=inner) if inner:
                error = inner[0]
            case _ if cause := error.__cause__ or error.__context__:
                error = cause
            case _:
                break
    return error


def innermost(error: BaseException) -> str:
    """The root cause in a few words."""
    cause = root_of(error)
    return str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
