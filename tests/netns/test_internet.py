"""The internet of namespaces itself: sockets of Linux talk through it as they would through such NATs."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from netns.internet import open_internet
from netns.nat import MASQUERADE, PORT_RESTRICTED, SYMMETRIC
from netns.packets import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from netns.internet import Internet, Place
    from netns.nat import Kind

pytestmark = pytest.mark.netns

KINDS = [None, MASQUERADE, PORT_RESTRICTED, SYMMETRIC]
PORT = 4001
PATIENCE_S = 10.0
LARGE = bytes(range(256)) * 250
"""Many packets, that fit into the buffers of Linux."""


class Talk:
    """A TCP connection between two places; `seen` is how the server sees the client."""

    def __init__(self, client: socket.socket, server: socket.socket, seen: Endpoint) -> None:
        self.client = client
        self.server = server
        self.seen = seen

    def ask(self) -> None:
        """Until an answer, or an error, comes to the client."""
        self.client.sendall(b"?")
        self.client.recv(1)

    def echo(self, data: bytes = b"hello") -> None:
        self.client.sendall(data)
        self.server.sendall(receive(self.server, len(data)))
        assert receive(self.client, len(data)) == data


@pytest.fixture(scope="module")
def server(internet: Internet) -> Place:
    return internet.add("server")


@pytest.fixture
def opened() -> Iterator[Callable[..., socket.socket]]:
    """Sockets of places, bound if a port is given, and closed after the test."""
    with ExitStack() as stack:

        def open_socket(place: Place, port: int | None = None, kind: int = socket.SOCK_STREAM) -> socket.socket:
            made = stack.enter_context(place.socket(socket.SocketKind(kind)))
            made.settimeout(PATIENCE_S)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port is not None:
                made.bind((place.inside, port))
            return made

        yield open_socket


@pytest.fixture
def connect(opened: Callable[..., socket.socket]) -> Iterator[Callable[..., Talk]]:
    """Connect two places, from a port if it is given."""
    with ExitStack() as stack:

        def connect(client: Place, server: Place, port: int | None = None) -> Talk:
            listener = opened(server, PORT)
            listener.listen()
            caller = opened(client, port)
            caller.connect((server.address, PORT))
            answering, seen = listener.accept()
            listener.close()
            stack.enter_context(answering).settimeout(PATIENCE_S)
            return Talk(caller, answering, Endpoint(*seen))

        yield connect


def receive(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        some = connection.recv(size - len(got))
        assert some, "it has been closed"
        got += some
    return got


def await_drop(internet: Internet, source: str, target: Endpoint) -> None:
    """Wait until the network has dropped a packet from the address `source` to `target`."""
    while True:
        drop = internet.dropped.get(timeout=PATIENCE_S)
        if (drop.source.address, drop.target) == (source, target):
            return


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tcp_and_udp_pass_every_kind(
    kind: Kind | None,
    internet: Internet,
    server: Place,
    connect: Callable[..., Talk],
    opened: Callable[..., socket.socket],
) -> None:
    home = internet.add(f"echo{KINDS.index(kind)}", kind)
    talk = connect(home, server, 5000)
    assert talk.seen.address == home.address
    assert (talk.seen.port == 5000) == (kind is None or kind.keeps_port)
    talk.echo()
    talk.client.sendall(LARGE)
    assert receive(talk.server, len(LARGE)) == LARGE
    assert internet.carried[home.name, server.name] > len(LARGE)

    asking, answering = opened(home, 6000, socket.SOCK_DGRAM), opened(server, PORT, socket.SOCK_DGRAM)
    asking.sendto(b"question", (server.address, PORT))
    question, seen = answering.recvfrom(100)
    answering.sendto(question[::-1], seen)
    assert asking.recvfrom(100) == (b"noitseuq", (server.address, PORT))


def test_an_echo_comes_back_through_a_nat(internet: Internet, server: Place) -> None:
    home = internet.add("ping", SYMMETRIC)
    with home.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.settimeout(PATIENCE_S)
        raw.sendto(struct.pack("!BBHHH", 8, 0, ~(0x0800 + 77 + 1) & 0xFFFF, 77, 1), (server.address, 0))
        answer, source = raw.recvfrom(100)
    assert source[0] == server.address
    assert struct.unpack("!BBHHH", answer[20:28])[3:] == (77, 1)


def test_symmetric_shows_each_target_another_port(
    internet: Internet, server: Place, connect: Callable[..., Talk], opened: Callable[..., socket.socket]
) -> None:
    other = internet.add("other")
    for kind, same in ((PORT_RESTRICTED, True), (SYMMETRIC, False)):
        home = internet.add(f"many{same}", kind)
        asking = opened(home, 6000, socket.SOCK_DGRAM)
        seen = []
        for target in (server, other):
            answering = opened(target, PORT, socket.SOCK_DGRAM)
            asking.sendto(b"?", (target.address, PORT))
            seen.append(answering.recvfrom(10)[1])
            answering.close()
        assert (seen[0] == seen[1]) is same


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_a_stranger_does_not_get_in(
    kind: Kind, internet: Internet, server: Place, opened: Callable[..., socket.socket]
) -> None:
    home = internet.add(f"closed{KINDS.index(kind)}", kind)
    listener = opened(home, PORT)
    listener.listen()
    stranger = opened(server)
    stranger.setblocking(False)
    stranger.connect_ex((home.address, PORT))
    await_drop(internet, server.address, Endpoint(home.address, PORT))
    assert not internet.carried[server.name, home.name]


def open_at_once(
    internet: Internet, kind: Kind, opened: Callable[..., socket.socket]
) -> tuple[list[Place], list[socket.socket]]:
    """Two behind NATs of `kind` dial each other at once, where a NAT that keeps ports would have them."""
    places = [internet.add(f"{side}{kind.name}", kind, delay_s=0.05) for side in ("left", "right")]
    sockets = [opened(place, PORT) for place in places]
    for mine, other in zip(sockets, reversed(places), strict=True):
        mine.setblocking(False)
        mine.connect_ex((other.address, PORT))
    return places, sockets


def test_two_behind_masquerade_reach_each_other_by_dialling_at_once(
    internet: Internet, opened: Callable[..., socket.socket]
) -> None:
    _, (left, right) = open_at_once(internet, MASQUERADE, opened)
    for each in (left, right):
        each.settimeout(PATIENCE_S)
    left.sendall(b"hello")
    assert receive(right, 5) == b"hello"
    right.sendall(b"there")
    assert receive(left, 5) == b"there"


def test_two_behind_symmetric_do_not(internet: Internet, opened: Callable[..., socket.socket]) -> None:
    (left, right), _ = open_at_once(internet, SYMMETRIC, opened)
    await_drop(internet, left.address, Endpoint(right.address, PORT))
    await_drop(internet, right.address, Endpoint(left.address, PORT))
    assert not internet.carried[left.name, right.name]
    assert not internet.carried[right.name, left.name]


@pytest.mark.parametrize("adopts", [True, False])
def test_a_talk_does_not_outlive_a_new_address(
    adopts: bool, internet: Internet, server: Place, connect: Callable[..., Talk]
) -> None:
    home = internet.add(f"moving{adopts}", MASQUERADE)
    talk = connect(home, server)
    talk.echo()
    old = home.address
    internet.renumber(home, adopts=adopts)
    assert home.address != old
    talk.server.sendall(b"to the old address")
    await_drop(internet, server.address, Endpoint(old, talk.seen.port))
    if adopts:
        with pytest.raises(ConnectionResetError):
            talk.ask()
    else:
        talk.client.sendall(b"from the new one")
        await_drop(internet, home.inside, Endpoint(server.address, PORT))
    again = connect(home, server)
    assert again.seen.address == home.address
    again.echo()


def test_a_cut_link_is_silent_until_it_is_healed(
    internet: Internet, server: Place, connect: Callable[..., Talk]
) -> None:
    home = internet.add("cut", MASQUERADE)
    talk = connect(home, server)
    home.is_cut = True
    talk.client.sendall(b"lost, and sent again")
    await_drop(internet, home.inside, Endpoint(server.address, PORT))
    talk.server.sendall(b"this way, too")
    await_drop(internet, server.address, talk.seen)
    home.is_cut = False
    assert receive(talk.server, 20) == b"lost, and sent again"
    assert receive(talk.client, 13) == b"this way, too"


def test_delays_add_up(internet: Internet, connect: Callable[..., Talk]) -> None:
    near, far = internet.add("near", delay_s=0.01), internet.add("far", MASQUERADE, delay_s=0.04)
    talk = connect(far, near)
    started = time.monotonic()
    talk.echo()
    assert time.monotonic() - started >= 2 * (0.01 + 0.04)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_after_an_interrupted_test(internet: Internet) -> None:
    def interrupted() -> None:
        with open_internet() as short:
            short.add("short", MASQUERADE)
            assert f"llmnode-{os.getpid()}-short" in namespaces()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "short" not in namespaces()


def test_what_a_killed_run_has_left_is_removed(internet: Internet) -> None:
    script = (
        "import os; from netns.internet import open_internet as o; way = o(); way.__enter__().add('left'); os._exit(9)"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", script], env=path)
    assert child.wait() == 9
    left = f"llmnode-{child.pid}-left"
    assert left in namespaces()
    with open_internet():
        assert left not in namespaces()
        assert f"llmnode-{os.getpid()}-server" in namespaces()
