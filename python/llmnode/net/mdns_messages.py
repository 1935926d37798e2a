"""The messages by which nodes of a local network find each other, after libp2p's specification of mDNS discovery.

One asks for `_llmnode._udp.local`. Each answers with a name, which says nothing, and its addresses as `dnsaddr=` texts.
The service is llmnode's own (libp2p's is `_p2p._udp.local`), so that no other program of libp2p is dialled. zeroconf
reads and writes the bytes of DNS. Its sockets, cache and threads are not used. Opens no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroconf import DNSIncoming, DNSOutgoing, DNSPointer, DNSQuestion, DNSText

from llmnode.net.addresses import host_and_port, peer_at_ip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from llmnode.core.policy import MdnsPolicy

SERVICE = "_llmnode._udp.local."
_MARK = b"\x08_llmnode\x04_udp"
"""The labels of SERVICE: a datagram without them is not about llmnode, and is not parsed."""
_POINTER, _TEXT, _ANY, _INTERNET = 12, 16, 255, 1  # RFC 1035
_ANSWER = 0x8400  # a response, with authority
_KEY = b"dnsaddr="
_TEXT_BYTES = 255


@dataclass(frozen=True, slots=True)
class Heard:
    """The content of one datagram of `host`: whether it `asks` for other nodes, and addresses, by peer id."""

    host: str
    asks: bool
    peers: dict[str, tuple[str, ...]]


def write_question() -> bytes:
    message = DNSOutgoing(0)
    message.add_question(DNSQuestion(SERVICE, _POINTER, _INTERNET))
    return message.packets()[0]


def write_answer(name: str, addresses: Sequence[str], lifetime_s: int) -> bytes:
    """The answer of the peer at `addresses`, which end in its id. A lifetime of 0 takes it back."""
    place = f"{name}.{SERVICE}"
    texts = [text for each in addresses if len(text := _KEY + each.encode()) <= _TEXT_BYTES]
    content = b"".join(bytes([len(text)]) + text for text in texts)
    message = DNSOutgoing(_ANSWER)
    message.add_answer_at_time(DNSPointer(SERVICE, _POINTER, _INTERNET, lifetime_s, place), 0)
    message.add_additional_answer(DNSText(place, _TEXT, _INTERNET, lifetime_s, content))
    return message.packets()[0]


def is_about_us(datagram: bytes) -> bool:
    """Whether it is worth parsing: other programs of a network use mDNS, too."""
    return _MARK in datagram.lower()


def read_message(datagram: bytes, host: str, policy: MdnsPolicy) -> Heard | None:
    """The content of a datagram from the IP address `host`; None for one that is malformed.

    Anybody may have sent it. So a peer is believed to be at an address only if the datagram came from there.
    """
    message = DNSIncoming(datagram)
    if not message.valid:
        return None
    if message.is_query():
        questions = message.questions
        asks = any(each.type in (_POINTER, _ANY) and each.name.lower() == SERVICE for each in questions)
        return Heard(host, asks, {})
    peers: dict[str, tuple[str, ...]] = {}
    for text in _texts(message):
        address = text.removeprefix(_KEY).decode("ascii", "replace")
        info = peer_at_ip(address) if text.startswith(_KEY) else None
        place = host_and_port(info.addrs[0]) if info is not None else None
        if info is None or place is None or place[0] != host:
            continue
        peer = str(info.peer_id)
        known = peers.get(peer, ())
        if (known or len(peers) < policy.peers_per_host) and len(known) < policy.addresses:
            peers[peer] = (*known, address)
    return Heard(host, False, peers)


def _texts(message: DNSIncoming) -> Iterator[bytes]:
    """The strings of the TXT records of our service."""
    for record in message.answers():
        if isinstance(record, DNSText) and record.ttl > 0 and record.name.lower().endswith(f".{SERVICE}"):
            yield from _split(record.text)


def _split(content: bytes) -> Iterable[bytes]:
    while content:
        length, content = content[0], content[1:]
        yield content[:length]
        content = content[length:]
