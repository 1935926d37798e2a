"""Links over a libp2p host: dialled, accepted, ended. A peer id is always proved by its key.

Knows nothing of models and sessions.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import psutil
import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import InvalidAddrError, info_from_p2p_addr
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from llmnode.core.ids import PeerId
from llmnode.errors import ConfigError, PeerUnreachable
from llmnode.net.identity import fresh_identity, identity_of, is_signed, open_identity
from llmnode.net.libp2p_host import open_host
from llmnode.net.link import Libp2pLink
from llmnode.wire.messages import ADDRESS_CHARS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from libp2p.abc import IHost, IMuxedConn, INetStream
    from libp2p.crypto.keys import KeyPair
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.peerinfo import PeerInfo

    from llmnode.core.policy import LinkPolicy

LINK_PROTOCOL = TProtocol("/llmnode/link/1")
LISTEN_ANY_LOOPBACK = "/ip4/127.0.0.1/tcp/0"

ANNOUNCED_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")

ACCEPT_QUEUE = 16
"""Links opened to us that nobody has taken yet; more are refused."""


@contextlib.asynccontextmanager
async def open_network(
    listen: Sequence[str], policy: LinkPolicy, identity: Path | bytes | None = None, announce: Sequence[str] = ()
) -> AsyncIterator[Libp2pNetwork]:
    """Run a host that listens at the multiaddrs `listen`; none means that it only dials.

    Others are told that it is at `announce`, by default where it listens. Its identity is that in the file `identity`,
    or of that key, by default a fresh one. Raises ConfigError for an address that is malformed, of another transport,
    or taken, and for a file that holds no identity.
    """
    addresses = [_parse_listen(address) for address in listen]
    for address in addresses:
        _check_bindable(address)
    announced = [parse_announced(address) for address in announce]
    key_pair = _identity(identity)
    peer = PeerId(ID.from_pubkey(key_pair.public_key).to_base58())
    told = [_of_peer(address, peer) for address in announced]
    async with open_host(key_pair, addresses, policy, told) as host, trio.open_nursery() as nursery:
        network = Libp2pNetwork(host, nursery, policy, listens=bool(addresses), announced=[str(each) for each in told])
        host.set_stream_handler(LINK_PROTOCOL, network.take_stream)
        try:
            yield network
        finally:
            nursery.cancel_scope.cancel()


def _identity(identity: Path | bytes | None) -> KeyPair:
    if isinstance(identity, bytes):
        return identity_of(identity)
    return fresh_identity() if identity is None else open_identity(identity)


@dataclass(frozen=True, slots=True)
class OpenCounts:
    """What a network has open now. `streams` are of all protocols: links, and libp2p's own."""

    links: int
    connections: int
    streams: int


class Libp2pNetwork:
    """The `Network` port over a running libp2p host. Made by `open_network`."""

    def __init__(
        self, host: IHost, nursery: trio.Nursery, policy: LinkPolicy, *, listens: bool, announced: Sequence[str] = ()
    ) -> None:
        self.host = host
        self._nursery = nursery
        self._policy = policy
        self._listens = listens
        self._announced = announced
        self._links: dict[Libp2pLink, IMuxedConn] = {}
        self._opened, self._accepted = trio.open_memory_channel[Libp2pLink](ACCEPT_QUEUE)

    @property
    def peer(self) -> PeerId:
        return PeerId(self.host.get_id().to_base58())

    @property
    def addresses(self) -> list[str]:
        if self._announced:
            return list(self._announced)
        return _all_reachable(self.host.get_addrs()) if self._listens else []

    @property
    def listening(self) -> list[str]:
        """Where it listens, whatever it announces: multiaddrs that end in `/p2p/ID`."""
        if not self._listens:
            return []
        return _all_reachable([_with_peer(each, self.peer) for each in self.host.get_transport_addrs()])

    def count_open(self) -> OpenCounts:
        connections = cast("Swarm", self.host.get_network()).get_connections()
        streams = sum(len(connection.get_streams()) for connection in connections)
        return OpenCounts(links=len(self._links), connections=len(connections), streams=streams)

    @property
    def key(self) -> bytes:
        return self.host.get_private_key().to_bytes()

    def sign(self, message: bytes) -> bytes:
        return self.host.get_private_key().sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return is_signed(peer, message, signature)

    async def dial(self, address: str) -> Libp2pLink:
        info = parse_peer(address)
        peer = PeerId(info.peer_id.to_base58())
        try:
            with trio.fail_after(self._policy.dial_timeout_s):
                await self._until_ended_links_are_gone(peer)
                await self.host.connect(info)
                stream = cast("NetStream", await self.host.new_stream(info.peer_id, [LINK_PROTOCOL]))
        except trio.Cancelled:
            await self._forget_unused_connections(info.peer_id)
            raise
        except trio.TooSlowError:
            await self._forget_unused_connections(info.peer_id)
            raise PeerUnreachable(f"no answer from {address} in {self._policy.dial_timeout_s:g} s", peer=peer) from None
        except (BaseLibp2pError, SwarmException, StreamError, OSError) as error:
            await self._forget_unused_connections(info.peer_id)
            raise PeerUnreachable(f"cannot connect to {address} ({_innermost(error)})", peer=peer) from error
        link = self._link(stream, peer)
        self._nursery.start_soon(self._run, link, stream.muxed_conn)
        return link

    @contextlib.asynccontextmanager
    async def accept(self) -> AsyncIterator[Libp2pLink]:
        link = await self._accepted.receive()
        try:
            yield link
        finally:
            await link.end("no longer served")

    async def take_stream(self, stream: INetStream) -> None:
        """libp2p calls this, in a task of its own, for each stream that a peer opens with our protocol."""
        link = self._link(cast("NetStream", stream), PeerId(stream.muxed_conn.peer_id.to_base58()))
        try:
            living = [each for each in self._links_with(link.peer) if not each.has_ended]
            if len(living) >= self._policy.links_per_peer:
                raise trio.WouldBlock
            self._opened.send_nowait(link)
        except trio.WouldBlock:
            # Not left waiting: until somebody reads it, libp2p would keep all that the peer sends.
            await stream.reset()
            return
        await self._run(link, stream.muxed_conn)

    async def _run(self, link: Libp2pLink, connection: IMuxedConn) -> None:
        self._links[link] = connection
        try:
            await link.run()
        finally:
            del self._links[link]

    def _links_with(self, peer: PeerId) -> list[Libp2pLink]:
        return [link for link in self._links if link.peer == peer]

    async def _until_ended_links_are_gone(self, peer: PeerId) -> None:
        """A connection goes down with its link: who dials meanwhile would be given the dying one."""
        for link in self._links_with(peer):
            if link.has_ended:
                await link.wait_closed()

    async def _forget_unused_connections(self, peer: ID) -> None:
        """A connection over which no stream could be opened would be given to the next dial as well."""
        if not self._links_with(PeerId(peer.to_base58())):
            with trio.move_on_after(self._policy.farewell_s, shield=True):
                await self.host.disconnect(peer)

    def _link(self, stream: NetStream, peer: PeerId) -> Libp2pLink:
        async def drop() -> None:
            """A connection goes with its last link. This one alone: the peer may have dialled again already."""
            with trio.move_on_after(self._policy.farewell_s, shield=True):
                if list(self._links.values()).count(stream.muxed_conn) > 1:
                    await stream.reset()
                else:
                    assert stream.swarm_conn is not None
                    await stream.swarm_conn.close()

        return Libp2pLink(stream, peer, self._policy, drop)


def _all_reachable(addresses: Iterable[Multiaddr]) -> list[str]:
    return list(dict.fromkeys(each for address in addresses for each in _reachable(address)))


def _reachable(address: Multiaddr) -> list[str]:
    """A host that listens everywhere names the addresses of its interfaces; of the loopback only if it has no other."""
    version = next(iter(address.protocols())).name
    ip = ipaddress.ip_address(address.value_for_protocol(version))
    if not ip.is_unspecified:
        return [str(address)]
    own = [
        ipaddress.ip_address(each.address.partition("%")[0])
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [each for each in own if each.version == ip.version and not each.is_link_local]
    others = [each for each in usable if not each.is_loopback] or usable
    return [str(address).replace(f"/{ip}/", f"/{each}/", 1) for each in others]


def _check_bindable(address: Multiaddr) -> None:
    """libp2p would share a port that another process holds (SO_REUSEPORT), and is silent where it cannot listen.

    Raises ConfigError.
    """
    version, port = (protocol.name for protocol in address.protocols())
    ip = address.value_for_protocol(version)
    with socket.socket(socket.AF_INET if version == "ip4" else socket.AF_INET6) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ip, int(address.value_for_protocol(port))))
        except OSError as error:
            raise ConfigError(f"cannot listen at {address} ({error.strerror}): choose another --listen") from error


def _parse_listen(address: str) -> Multiaddr:
    try:
        parsed = Multiaddr(address)
        protocols = [protocol.name for protocol in parsed.protocols()]
    except (MultiaddrError, ValueError) as error:
        raise ConfigError(
            f"--listen {address!r} is not a multiaddr ({error}): write for example {LISTEN_ANY_LOOPBACK}"
        ) from error
    if len(protocols) != 2 or protocols[0] not in ("ip4", "ip6") or protocols[1] != "tcp":
        raise ConfigError(f"--listen {address!r}: only /ip4/ADDRESS/tcp/PORT and /ip6/ADDRESS/tcp/PORT are supported")
    return parsed


def parse_announced(address: str) -> Multiaddr:
    """Raises ConfigError for what nobody could dial."""
    form = "write where others reach you, as /ip4/ADDRESS/tcp/PORT, /ip6/ADDRESS/tcp/PORT or /dns/NAME/tcp/PORT"
    try:
        parsed = Multiaddr(address)
        protocols = [protocol.name for protocol in parsed.protocols()]
    except (MultiaddrError, ValueError) as error:
        raise ConfigError(f"--announce {address!r} is not a multiaddr ({error}): {form}") from error
    if protocols[:1] not in ([name] for name in ANNOUNCED_HOSTS) or protocols[1:] not in (["tcp"], ["tcp", "p2p"]):
        raise ConfigError(f"--announce {address!r}: {form}")
    host, port = parsed.value_for_protocol(protocols[0]), int(parsed.value_for_protocol("tcp"))
    if protocols[0] in ("ip4", "ip6") and ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"--announce {address!r}: nobody can dial {host}; {form}")
    if not port:
        raise ConfigError(f"--announce {address!r}: nobody can dial port 0; give the one that is forwarded to you")
    return parsed


def _of_peer(address: Multiaddr, peer: PeerId) -> Multiaddr:
    """What `parse_announced` returned, ending in `/p2p/PEER`. Raises ConfigError if it names another peer."""
    if "p2p" not in (protocol.name for protocol in address.protocols()):
        address = _with_peer(address, peer)
    elif (named := address.value_for_protocol("p2p")) != peer:
        raise ConfigError(
            f"--announce {address}: this node is {peer}, and not {named}; leave /p2p/{named} out,"
            " or give the file of that peer's key with --identity"
        )
    if len(str(address)) > ADDRESS_CHARS:
        raise ConfigError(
            f"--announce {address}: at most {ADDRESS_CHARS} characters are told to others; name it shorter"
        )
    return address


def _with_peer(address: Multiaddr, peer: PeerId) -> Multiaddr:
    return address.encapsulate(Multiaddr(f"/p2p/{peer}"))


def parse_peer(address: str) -> PeerInfo:
    """Peer id and address in a multiaddr that ends in `/p2p/ID`. Raises ConfigError with the form that is right."""
    try:
        return info_from_p2p_addr(Multiaddr(address))
    except (MultiaddrError, InvalidAddrError, ValueError) as error:
        raise ConfigError(
            f"{address!r} is not the address of a peer ({error}): write /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, "
            "as `llmnode serve` prints it"
        ) from error


def _innermost(error: BaseException) -> str:
    """The root cause in a few words; libp2p wraps an OSError in several layers."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
