"""A local network, with multicast: namespaces with an Ethernet device each, which a bridge in one more namespace joins.

`with open_lan("one", "two") as hosts`. All of it is gone when the context ends. Needs root on Linux, and devices of the
kinds veth and bridge: see `why_no_lan`.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from netns.internet import make_namespace, remove_leftovers, remove_namespace, run_ip, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

NETWORK = "192.168.77"
DEVICE = "lan"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of the network."""

    name: str
    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` here."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def open_lan(*names: str) -> Iterator[list[Host]]:
    remove_leftovers()
    switch = make_namespace("switch")
    hosts = []
    try:
        run_ip("-n", switch, "-batch", "-", batch=["link add bridge type bridge", "link set bridge up"])
        for number, name in enumerate(names, 1):
            host = Host(name, make_namespace(name), f"{NETWORK}.{number}")
            hosts.append(host)
            port = f"port{number}"
            run_ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", host.namespace)
            run_ip("-n", switch, "-batch", "-", batch=[f"link set {port} master bridge", f"link set {port} up"])
            commands = ["link set lo up", f"addr add {host.address}/24 dev {DEVICE}", f"link set {DEVICE} up"]
            run_ip("-n", host.namespace, "-batch", "-", batch=commands)
        yield hosts
    finally:
        for namespace in (*(each.namespace for each in hosts), switch):
            remove_namespace(namespace)


def why_no_lan() -> str:
    """Why there can be no such network here; "" if there can."""
    if reason := why_not():
        return reason
    try:
        with open_lan(f"probe{os.getpid()}"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no local network can be made here: {error.stderr.strip()}"
