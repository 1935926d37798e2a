"""An internet of network namespaces: one for each place, with a TUN device, and a thread that is all routers between.

`with open_internet() as internet`, `internet.add("home", MASQUERADE)`; then run processes, or open sockets, there. A
place may be behind a NAT, far away, cut off, or have another address from now on. All of it is gone when the context
ends. Needs root on Linux (see `why_not`); neither netfilter nor a kernel with netem.

A packet that nobody wants is dropped, and `Internet.dropped` tells: no router here sends errors.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from netns.nat import Nat
from netns.packets import Endpoint, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netns.nat import Kind
    from netns.packets import Packet

TUN = "/dev/net/tun"
DEVICE = "internet"
"""Its name in each namespace."""
_PREFIX = "llmnode-"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 65536
_AT_A_TIME = 64
"""Packets of one place, before others have their turn."""
_UNDER_WAY = 20_000
"""Packets; more are dropped, as by a queue that is full."""


Opened = TypeVar("Opened")


class Drop(NamedTuple):
    """A packet that ended on the way, with the addresses that it had there: inside ones, if it never left its NAT."""

    source: Endpoint
    target: Endpoint


@dataclass(eq=False)
class Place:
    """A namespace, its link to the world, and its NAT if it has one. Made by `Internet.add`.

    `delay_s` is the way to the world or from it; `is_cut` may be set, too.
    """

    name: str
    namespace: str
    inside: str
    """Its own address."""
    tun: int
    delay_s: float
    nat: Nat | None
    is_cut: bool = False

    @property
    def address(self) -> str:
        """The address that others see."""
        return self.nat.outside if self.nat else self.inside

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` here."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """A socket of this place, wherever it is used."""
        return _inside(self.namespace, lambda: socket.socket(socket.AF_INET, kind, protocol))


class Internet:
    """Made by `open_internet`."""

    def __init__(self) -> None:
        self.carried: Counter[tuple[str, str]] = Counter()
        """Bytes delivered from one place to another, by their names."""
        self.dropped: SimpleQueue[Drop] = SimpleQueue()
        self._rng = random.Random(0)
        self._numbers = count(1)
        self._places: list[Place] = []
        self._by_address: dict[str, Place] = {}
        self._selector = selectors.DefaultSelector()
        self._under_way: list[tuple[float, int, Place, Packet]] = []
        self._sent = count()
        self._stopped, self._stop = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._route, name="internet")

    def add(self, name: str, kind: Kind | None = None, *, delay_s: float = 0.0) -> Place:
        """A place with a public address, or behind a NAT of `kind`. `name` has letters and digits, and is new."""
        number = next(self._numbers)
        outside = self._fresh_address()
        inside = f"10.{number >> 8}.{number & 255}.2" if kind else outside
        namespace = make_namespace(name)
        place = Place(name, namespace, inside, -1, delay_s, Nat(kind, outside, self._rng) if kind else None)
        self._places.append(place)
        place.tun = _inside(namespace, _open_tun)
        commands = ["link set lo up", f"addr add {inside}/32 dev {DEVICE}", f"link set {DEVICE} up"]
        run_ip("-n", namespace, "-batch", "-", batch=[*commands, f"route add default dev {DEVICE}"])
        self._by_address[outside] = place
        self._selector.register(place.tun, selectors.EVENT_READ, place)
        return place

    def renumber(self, place: Place, kind: Kind | None = None, *, adopts: bool = True) -> None:
        """Its NAT has a new address, knows nothing of what was before, and is of `kind` if that is given.

        `adopts`: see `Nat`.
        """
        assert place.nat is not None, "without a NAT its own address would change"
        del self._by_address[place.address]
        place.nat = Nat(kind or place.nat.kind, self._fresh_address(), self._rng, adopts=adopts)
        self._by_address[place.address] = place

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Processes in a namespace must have ended before."""
        self._stop.close()
        if self._thread.is_alive():
            self._thread.join()
        self._selector.close()
        self._stopped.close()
        for place in self._places:
            if place.tun >= 0:
                os.close(place.tun)
            remove_namespace(place.namespace)

    def _fresh_address(self) -> str:
        """Never used before, and one that software takes for public (the ranges for documentation are not)."""
        number = next(self._numbers)
        return f"11.22.{number >> 8}.{number & 255}"

    def _route(self) -> None:
        while True:
            timeout_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for key, _ in self._selector.select(timeout_s):
                if key.data is None:
                    return
                self._take_from(key.data)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, source, packet = heapq.heappop(self._under_way)
                self._deliver(source, packet)

    def _take_from(self, place: Place) -> None:
        for _ in range(_AT_A_TIME):
            try:
                data = os.read(place.tun, _PACKET_BYTES)
            except BlockingIOError:
                return
            packet = parse(bytearray(data))
            if packet is not None:  # not IPv6's search for routers, for example
                self._send(place, packet)

    def _send(self, place: Place, packet: Packet) -> None:
        now = time.monotonic()
        nat = place.nat
        passes = packet.source.address == place.inside and not place.is_cut and len(self._under_way) < _UNDER_WAY
        if not passes or (nat is not None and not nat.send(packet, now)):
            self._drop(packet)
            return
        target = self._by_address.get(packet.target.address)
        due = now + place.delay_s + (target.delay_s if target else 0.0)
        heapq.heappush(self._under_way, (due, next(self._sent), place, packet))

    def _deliver(self, source: Place, packet: Packet) -> None:
        target = self._by_address.get(packet.target.address)
        if target is None or source.is_cut or target.is_cut:
            self._drop(packet)
            return
        if target.nat is not None and not target.nat.receive(packet, time.monotonic()):
            self._drop(packet)
            return
        self.carried[source.name, target.name] += len(packet.data)
        os.write(target.tun, packet.data)

    def _drop(self, packet: Packet) -> None:
        self.dropped.put(Drop(packet.source, packet.target))


@contextmanager
def open_internet() -> Iterator[Internet]:
    """Removes first anything that a killed run has left."""
    remove_leftovers()
    internet = Internet()
    try:
        internet.start()
        yield internet
    finally:
        internet.close()


def why_not() -> str:
    """Why there can be no such internet here; "" if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing (iproute2)"
    if not Path(TUN).exists():
        return f"{TUN} is missing"
    try:
        remove_namespace(make_namespace("probe"))
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made here: {error.stderr.strip()}"
    return ""


def make_namespace(name: str) -> str:
    """The whole name of a new one. `name` is new in this process."""
    namespace = f"{_PREFIX}{os.getpid()}-{name}"
    run_ip("netns", "add", namespace)
    return namespace


def remove_namespace(namespace: str) -> None:
    run_ip("netns", "delete", namespace)


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed."""
    for line in run_ip("netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            remove_namespace(name)


def run_ip(*arguments: str, batch: Sequence[str] = ()) -> str:
    """The output of `ip`, which reads `batch` on stdin."""
    done = subprocess.run(["ip", *arguments], input="\n".join(batch), capture_output=True, text=True, check=True)
    return done.stdout


def _inside(namespace: str, open_it: Callable[[], Opened]) -> Opened:
    """Call it in a namespace: a thread of its own enters that, and ends there; what it has opened stays of there."""

    def enter_and_open() -> Opened:
        with open(f"/run/netns/{namespace}") as file:
            enter(file.fileno())
        return open_it()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(enter_and_open).result()


def enter(namespace: int) -> None:
    """`os.setns`, which Python has since 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _open_tun() -> int:
    tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun
