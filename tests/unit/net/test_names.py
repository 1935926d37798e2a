"""Peers that are dialled by the name of their host."""

from __future__ import annotations

import pytest

from llmnode.core.policy import LinkPolicy, RelayPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.host import open_network
from unit.in_trio import in_trio

HERE = "/ip4/127.0.0.1/tcp/0"


def by_name(address: str, name: str = "localhost", protocol: str = "dns4") -> str:
    return address.replace("/ip4/127.0.0.1/", f"/{protocol}/{name}/", 1)


@pytest.mark.parametrize("protocol", ["dns", "dns4"])
@in_trio
async def test_a_name_that_the_system_knows_is_dialled(protocol: str) -> None:
    async with open_network([HERE], LinkPolicy()) as server, open_network([], LinkPolicy()) as client:
        link = await client.dial(by_name(server.addresses[0], protocol=protocol))
        assert link.peer == server.peer


@in_trio
async def test_a_relay_may_have_a_name() -> None:
    async with (
        open_network([HERE], LinkPolicy(), relay_policy=RelayPolicy()) as relay,
        open_network([HERE], LinkPolicy(), relays=[by_name(relay.addresses[0])]) as server,
        open_network([], LinkPolicy()) as client,
    ):
        through, at_ip = server.addresses
        assert through.startswith("/dns4/localhost/")
        assert at_ip.startswith("/ip4/127.0.0.1/")
        assert (await client.dial(through)).relayed


@in_trio
async def test_a_name_that_nobody_has_is_told() -> None:
    async with open_network([HERE], LinkPolicy()) as server, open_network([], LinkPolicy()) as client:
        with pytest.raises(PeerUnreachable, match=r"cannot connect to /dns4/nowhere\.invalid"):
            await client.dial(by_name(server.addresses[0], "nowhere.invalid"))
