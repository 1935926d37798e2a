"""Messages of mDNS: what is written is read, a peer names itself alone, and a stranger's bytes are within limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from zeroconf import DNSIncoming, DNSOutgoing, DNSText

from llmnode.core.policy import MdnsPolicy
from llmnode.net.mdns_messages import SERVICE, is_about_us, read_message, write_answer, write_question

POLICY = MdnsPolicy()
HOST = "192.168.1.7"


def peer(number: int = 0) -> str:
    return ID.from_pubkey(create_new_key_pair(bytes([number]) * 32).public_key).to_base58()


def at(host: str = HOST, port: int = 4001, number: int = 0) -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{peer(number)}"


def heard(datagram: bytes, host: str = HOST) -> tuple[bool, dict[str, tuple[str, ...]]]:
    message = read_message(datagram, host, POLICY)
    assert message is not None and message.host == host and is_about_us(datagram)
    return message.asks, message.peers


def test_what_is_written_is_read() -> None:
    assert heard(write_question()) == (True, {})
    addresses = (at(), at(port=4002))
    assert heard(write_answer("name", addresses, 120)) == (False, {peer(): addresses})


def test_an_answer_has_the_form_of_the_specification() -> None:
    pointer, text = DNSIncoming(write_answer("name", [at()], 120)).answers()
    assert (pointer.name, getattr(pointer, "alias", "")) == (SERVICE, f"name.{SERVICE}")
    assert isinstance(text, DNSText) and text.text[1:] == b"dnsaddr=" + at().encode()


def test_a_peer_is_believed_to_be_where_its_datagram_came_from_and_nowhere_else() -> None:
    others = ["192.168.1.8", "10.0.0.1", "127.0.0.1", "8.8.8.8"]
    lies = [at(host) for host in others] + [f"/dns4/localhost/tcp/1/p2p/{peer()}", f"/ip4/{HOST}/udp/1/p2p/{peer()}"]
    lies += [f"{at()}/p2p-circuit/p2p/{peer(1)}", f"/ip4/{HOST}/tcp/0/p2p/{peer()}", "nonsense", f"/ip4/{HOST}/tcp/1"]
    assert heard(write_answer("name", lies, 120)) == (False, {})
    assert heard(write_answer("name", [at(), at("192.168.1.8")], 120), "192.168.1.8")[1] == {
        peer(): (at("192.168.1.8"),)
    }


def test_an_answer_that_is_taken_back_names_nobody() -> None:
    assert heard(write_answer("name", [at()], 0)) == (False, {})


def test_one_datagram_names_few_peers_and_few_addresses() -> None:
    many = write_answer("name", [at(port=port) for port in range(1, 12)], 120)
    assert heard(many)[1] == {peer(): tuple(at(port=port) for port in range(1, POLICY.addresses + 1))}
    crowd = write_answer("name", [at(number=number) for number in range(12)], 120)
    assert len(heard(crowd)[1]) == POLICY.peers_per_host


def test_other_services_are_not_about_us() -> None:
    message = DNSOutgoing(0)
    assert not is_about_us(message.packets()[0])
    printer = write_answer("name", [at()], 120).replace(b"_llmnode", b"_printer")
    assert not is_about_us(printer) and read_message(printer, HOST, POLICY).peers == {}  # type: ignore[union-attr]


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda noise: write_question() + noise))
def test_any_bytes_are_read(noise: bytes) -> None:
    read_message(noise, HOST, POLICY)


@given(st.data())
def test_a_damaged_answer_names_nobody_elsewhere(data: st.DataObject) -> None:
    whole = bytearray(write_answer("name", [at(), at(port=2)], 120))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    message = read_message(bytes(whole[: data.draw(st.integers(0, len(whole)))]), HOST, POLICY)
    named = message.peers.values() if message is not None else ()
    assert all(address.startswith(f"/ip4/{HOST}/tcp/") for of_peer in named for address in of_peer)
