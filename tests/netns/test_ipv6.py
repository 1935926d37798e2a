"""A server without `--listen` is used over IPv6. Its address there does not hold up a client that cannot reach it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from netns.internet import run_ip
from netns.lan import DEVICE, open_lan, why_no_lan
from netns.nodes import LLMNODE, PROMPT, children
from process import forked
from process.own_cache import cache_without_peers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from netns.lan import Host
    from netns.nodes import Question

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]

SERVE = [*LLMNODE, "serve", "--json", "--until-stdin-closes", "--threads", "1", "--no-mdns"]
RELAY = [*LLMNODE, "relay", "--json", "--until-stdin-closes"]
FEW_TOKENS = 4
NETWORK = "2a00:77"
NOBODY = "02:00:00:00:00:77"
"""No machine has this hardware address: what is sent to it is lost without an answer."""


@pytest.fixture(scope="module")
def lan() -> Iterator[list[Host]]:
    """The first has addresses of both versions, and the second of IPv6 alone; the third is a user's."""
    if reason := why_no_lan():
        pytest.skip(reason)
    with open_lan("both", "six", "user") as hosts:
        for number, host in enumerate(hosts, 1):
            run_ip("-n", host.namespace, "addr", "add", f"{NETWORK}::{number}/64", "dev", DEVICE, "nodad")
        run_ip("-n", hosts[1].namespace, "addr", "del", f"{hosts[1].address}/24", "dev", DEVICE)
        yield hosts


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "cache")))


def check_generates(host: Host, question: Question, *addresses: str) -> None:
    command = [*LLMNODE, "generate", "--json", "--prompt", PROMPT, "--max-new-tokens", str(FEW_TOKENS)]
    done = forked.run(host.command(*command, "--peers", *addresses))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == question.expected[:FEW_TOKENS]


def test_servers_are_used_over_ipv6_and_an_address_that_leads_nowhere_holds_up_nobody(
    lan: list[Host], question: Question
) -> None:
    both, six, user = lan
    with children() as start:
        relay = start(user, *RELAY, "--listen", f"/ip6/{NETWORK}::3/tcp/4001")
        first = start(both, *SERVE, "--blocks", "0:15", "--peers", relay.address)
        second = start(six, *SERVE, "--blocks", "15:30", "--peers", relay.address)
        places = [address.split("/")[1:5] for address in first.ready["addresses"]]
        port = places[0][3]
        assert places == [["ip6", f"{NETWORK}::1", "tcp", port], ["ip4", both.address, "tcp", port]]
        assert [address.split("/")[2] for address in second.ready["addresses"]] == [f"{NETWORK}::2"]
        check_generates(user, question, second.address)
        run_ip("-n", user.namespace, "neigh", "replace", f"{NETWORK}::1", "lladdr", NOBODY, "dev", DEVICE)
        check_generates(user, question, *first.ready["addresses"])
