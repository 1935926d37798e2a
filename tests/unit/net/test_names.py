"""Peers that are dialled by the name of their host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from llmnode.core.policy import LinkPolicy, RelayPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.dialling import first_to_connect
from llmnode.net.host import open_network
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def race(*answers_s: float) -> tuple[int, float]:
    """The number of the address that was taken, and the seconds that it took.

    Each address is reached after its number of seconds; one with a negative number is refused.
    """
    addresses = [Multiaddr(f"/ip4/192.0.2.{number}/tcp/1") for number in range(len(answers_s))]

    async def dial(address: Multiaddr) -> Any:  # Any: it stands for a connection
        number = addresses.index(address)
        if answers_s[number] < 0:
            raise OpenConnectionError(f"refused by {number}")
        await trio.sleep(answers_s[number])
        return number

    async def main() -> tuple[int, float]:
        began_s = trio.current_time()
        taken: Any = await first_to_connect(addresses, dial, 0.25)
        return taken, trio.current_time() - began_s

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("answers_s", "taken", "took_s"),
    [((0.1, 0.0), 0, 0.1), ((math.inf, 0.1), 1, 0.35), ((-1, 0.1), 1, 0.1), ((0.5, 0.5), 0, 0.5), ((0.3,), 0, 0.3)],
    ids=["the system's order counts", "a black hole", "refused at once", "slow is not silent", "a single one"],
)
def test_no_address_of_a_name_holds_up_the_others(answers_s: Sequence[float], taken: int, took_s: float) -> None:
    assert race(*answers_s) == (taken, pytest.approx(took_s))


def test_the_error_is_that_of_the_last_address() -> None:
    with pytest.raises(OpenConnectionError, match="refused by 2"):
        race(-1, -1, -1)
