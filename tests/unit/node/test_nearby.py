"""Commands without peers where mDNS cannot help say so at once. Where it does help is tested in `tests/netns`."""

from __future__ import annotations

import socket
from ipaddress import IPv4Network
from typing import TYPE_CHECKING

import pytest

from llmnode.errors import ConfigError
from llmnode.net.mdns import PORT, LocalNetwork
from llmnode.node import nearby
from llmnode.node.nearby import find_swarm

if TYPE_CHECKING:
    from collections.abc import Callable


def failed(report: Callable[[str], None] = lambda _line: None) -> str:
    with pytest.raises(ConfigError) as raised:
        find_swarm(report)
    return str(raised.value)


def test_a_machine_without_a_private_network_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "local_networks", list)
    lines: list[str] = []
    assert "in no private IPv4 network" in failed(lines.append) and not lines


def test_a_port_that_another_program_keeps_for_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "local_networks", lambda: [LocalNetwork("10.0.0.1", IPv4Network("10.0.0.0/8"), 2)])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        try:
            other.bind(("", PORT))
        except OSError:
            pytest.skip("this machine has a program for mDNS, which shares its port")
        said = failed()
    assert "mDNS does not work here (Address already in use)" in said and "--peers ADDRESS" in said
