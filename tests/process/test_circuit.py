"""Servers that nobody can dial, as behind a NAT: they listen where nobody is told, and are reached through relays."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.client.connect import aconnect, load_parts
from process import forked, in_process
from process.test_swarm import LLMNODE, Child, greedy, start  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def next_event(child: Child, kind: str) -> dict[str, Any]:
    assert child.process.stdout is not None
    return next(event for event in map(json.loads, child.process.stdout) if event["event"] == kind)


def test_a_session_goes_through_relays_and_outlives_one(
    start: Callable[..., Child],  # noqa: F811
    transformers_model: Any,
    tmp_path: Path,
) -> None:
    as_relay = ("relay", "--identity", str(tmp_path / "relay.key"))
    relays = [start(*as_relay), start("relay")]
    addresses = [relay.address for relay in relays]
    reached = ("--threads", "1", "--relay", *addresses)  # which introduce them, too
    servers = [start("serve", "--blocks", blocks, *reached) for blocks in ("0:15", "15:30")]
    for server in servers:
        through = [f"{address}/p2p-circuit/p2p/{server.ready['peer']}" for address in addresses]
        assert server.ready["addresses"] == through
        assert not {each.rpartition("/p2p/")[0] for each in server.ready["listening"]} & set(through)

    async def use() -> None:
        async with aconnect(addresses, parts=load_parts()) as client:
            prompt = client.tokenizer.encode("The capital of France is")
            seen: list[int] = []

            async for token in client.generate(prompt, 16, stop_at_eos=False):
                seen.append(token.id)
                if len(seen) == 4:
                    relays[0].process.kill()
                    relays[0].process.wait()
            assert seen == greedy(transformers_model, prompt, 16)

    trio.run(use)
    for server in servers:
        own = [f"{address}/p2p-circuit/p2p/{server.ready['peer']}" for address in addresses]
        assert next_event(server, "addresses")["addresses"] == own[1:], "the relay that died is announced no more"
    place = addresses[0].partition("/p2p/")[0]
    start(*as_relay, "--listen", place).ready  # noqa: B018 - the same relay again
    for server in servers:
        own = [f"{address}/p2p-circuit/p2p/{server.ready['peer']}" for address in addresses]
        assert next_event(server, "addresses")["addresses"] == own

    shown = in_process.llmnode("status", "--peers", addresses[1], "--json")
    assert shown.returncode == 0, shown.stderr
    (model,) = json.loads(shown.stdout)["models"]
    assert model["holes"] == []
    assert [server["relayed"] for server in model["servers"]] == [True, True]
    assert model["servers"][0]["results_pushed"] > 0, "from server to server, through a relay"
    check_plan(addresses[1])
    servers[0].process.send_signal(signal.SIGUSR1)
    readout = next_event(servers[0], "readout")
    assert 0 <= readout["relayed"] <= readout["links"]


def check_plan(relay: str) -> None:
    """A machine behind a NAT sees what it would give with the way through its relay."""
    done = in_process.llmnode("plan", "--blocks", "0:1", "--threads", "1", "--relay", relay, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["servers"], plan["missing"]) == (2, []), "the relay introduces them"
    node = plan["node"]
    assert node["relay_round_trip_us"] > 0
    assert node["upload_bytes_per_s"] > 0, "to the relay"


def test_who_is_reached_through_no_relay_says_so(start: Callable[..., Child], tmp_path: Path) -> None:  # noqa: F811
    server = start("serve", "--blocks", "0:1", "--threads", "1")
    relay, peer = server.address, server.ready["peer"]
    serve = [*LLMNODE, "serve", "--blocks", "0:1", "--relay"]
    refused = forked.run([*serve, relay])
    assert refused.returncode == 1
    assert "relay" in refused.stderr and peer in refused.stderr
    wrong = forked.run([*serve, f"{relay}/p2p-circuit"])
    assert wrong.returncode == 2
