"""Machines of one local network find each other by mDNS, by an invite, and without the server that it names."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from llmnode.models.names import EMBEDDED_MODEL
from netns.internet import run_ip
from netns.lan import DEVICE, open_lan, why_no_lan
from netns.nodes import LLMNODE, PROMPT, Child, children
from process import forked, in_process
from process.own_cache import cache_without_peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from netns.lan import Host
    from netns.nodes import Question

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]

SERVE = [*LLMNODE, "serve", "--json", "--until-stdin-closes", "--threads", "1"]
FEW_TOKENS = 4
FOUND = "found by mDNS: 2 servers of HuggingFaceTB/SmolLM2-135M-Instruct (blocks [0, 15), [15, 30))"
FLOOD_S = 4.0
FLOOD_CPU_SHARE = 0.3
"""A server that is flooded uses this share of one core, at most; without a limit it uses all of it."""
FLOOD_MIB = 16
# Names many peers at its own address, and sends as fast as it can.
FLOOD = f"""
import secrets, socket, sys, time
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from llmnode.net.mdns_messages import write_answer, write_question

host = sys.argv[1]
peers = [ID.from_pubkey(create_new_key_pair().public_key).to_base58() for _ in range(200)]
messages = [
    write_answer(secrets.token_hex(16), [f"/ip4/{{host}}/tcp/{{port}}/p2p/{{peer}}" for port in range(1, 9)], 120)
    for peer in peers
] + [write_question()]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
print("ready", flush=True)
sys.stdin.readline()
sent, until_s = 0, time.monotonic() + {FLOOD_S}
while time.monotonic() < until_s:
    sock.sendto(messages[sent % len(messages)], ("224.0.0.251", 5353))
    sent += 1
print(sent, flush=True)
"""


PROGRAM = f"""
import json, logging, sys, torch, llmnode
logging.basicConfig()
with llmnode.connect() as model:
    prompt = torch.tensor([model.tokenizer.encode(sys.argv[1])])
    output = model.generate(prompt, max_new_tokens={FEW_TOKENS}, do_sample=False)
print(json.dumps(output[0, prompt.shape[1]:].tolist()))
"""
"""It names no peers."""


@pytest.fixture(scope="module")
def lan() -> Iterator[list[Host]]:
    """Three machines: two for servers, and one for a user."""
    if reason := why_no_lan():
        pytest.skip(reason)
    with open_lan("first", "second", "third") as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLMNODE_MDNS", raising=False)
    monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "cache")))


def generate(host: Host, *flags: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """`llmnode generate`, whose imports are done, and the seconds that it took."""
    command = [*LLMNODE, "generate", "--json", "--prompt", PROMPT, "--max-new-tokens", str(FEW_TOKENS), *flags]
    began_s = time.monotonic()
    done = forked.run(host.command(*command))
    return done, time.monotonic() - began_s


def said_until_ready(child: Child) -> str:
    assert child.process.stdout is not None
    said = []
    for line in child.process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            child.__dict__["ready"] = event
            return "\n".join(said)
        said.append(event.get("text", ""))
    pytest.fail(f"{child.place.name} ended: {said}")


def test_two_servers_form_one_swarm_and_a_third_machine_uses_it_without_flags(
    lan: list[Host],
    question: Question,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    one, two, user = lan
    with children() as start:
        # A user would start it so. It is flooded, and its memory is measured.
        first: Any = start(one, *SERVE, "--blocks", "0:15", popen=subprocess.Popen)
        alone = said_until_ready(first)
        assert "warning: listening at 192.168.77.1, and found there by mDNS" in alone
        assert "this one begins a swarm" in alone and "serving HuggingFaceTB/SmolLM2-135M-Instruct" in alone
        second: Any = start(two, *SERVE, "--blocks", "15")
        joining = said_until_ready(second)
        assert "joining the swarm that mDNS has found in this network: 1 server of HuggingFaceTB/" in joining
        assert second.ready["blocks"] == [15, 30], "the blocks that the first lacks"

        done, took_s = generate(user)
        assert done.returncode == 0, done.stderr
        assert FOUND in done.stderr
        assert json.loads(done.stdout)["token_ids"] == question.expected[:FEW_TOKENS]
        monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "theirs")))  # it is another machine's
        made = forked.run(user.command(*LLMNODE, "invite", "--json"))
        assert made.returncode == 0 and FOUND in made.stderr, made.stderr
        invited = json.loads(made.stdout)
        assert set(invited["peers"]) == {first.address, second.address}, "at their addresses in this network"
        assert invited["model"] == EMBEDDED_MODEL, "the only one that is served"
        assert "in the private network of its peers alone" in made.stderr
        named, named_s = generate(user, "--peers", first.address)
        assert named.returncode == 0, named.stderr
        record_property("found_and_generated_s", round(took_s, 1))
        record_property("generated_with_peers_s", round(named_s, 1))

        told = forked.run(user.command(sys.executable, "-P", "-c", PROGRAM, PROMPT))
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout) == question.expected[:FEW_TOKENS]
        assert FOUND in told.stderr

        none, _ = generate(user, "--no-mdns")
        assert none.returncode == 2 and "no peers are named: give an INVITE" in none.stderr

        check_a_flood_costs_little(user, first.process.pid, record_property)
        assert generate(user)[0].returncode == 0
    gone, _ = generate(user)
    assert gone.returncode == 2 and "no node of llmnode answers in this network" in gone.stderr


def check_a_flood_costs_little(host: Host, server: int, record_property: Callable[[str, object], None]) -> None:
    """`host` floods the network, and the `server` of this process id stays small and mostly idle."""
    process = psutil.Process(server)
    flood = subprocess.Popen(
        host.command(sys.executable, "-P", "-c", FLOOD, host.address),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert flood.stdout is not None and flood.stdin is not None
    assert flood.stdout.readline() == "ready\n"
    cpu, memory = process.cpu_times(), process.memory_info().rss
    flood.stdin.write("go\n")
    flood.stdin.flush()
    sent = int(flood.stdout.readline())
    used_s = sum(process.cpu_times()[:2]) - sum(cpu[:2])
    grown_mib = (process.memory_info().rss - memory) / 2**20
    flood.communicate(timeout=20)
    record_property("flood", f"{sent} datagrams, {used_s:.2f} s of CPU in {FLOOD_S:g} s, {grown_mib:.1f} MiB")
    assert sent > 1000
    assert used_s < FLOOD_CPU_SHARE * FLOOD_S
    assert grown_mib < FLOOD_MIB


def test_a_server_that_listens_over_ipv6_alone_is_found(lan: list[Host], question: Question) -> None:
    one, _, user = lan
    for host, address in ((one, "fd77::1/64"), (user, "fd77::3/64")):
        run_ip("-n", host.namespace, "addr", "add", address, "dev", DEVICE, "nodad")
    with children() as start:
        server: Any = start(one, *SERVE, "--blocks", "0:30", "--listen", "/ip6/fd77::1/tcp/0")
        assert "warning: listening at /ip6/fd77::1/tcp/0, and found there by mDNS" in said_until_ready(server)
        assert [each.split("/")[2] for each in server.ready["addresses"]] == ["fd77::1"]
        done, _ = generate(user)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["token_ids"] == question.expected[:FEW_TOKENS]


def test_a_private_swarm_is_told_to_nobody(lan: list[Host], tmp_path: Path) -> None:
    one, _, user = lan
    key = tmp_path / "swarm.key"
    made = in_process.llmnode("invite", "--swarm-key", str(key))
    assert made.returncode == 0, made.stderr
    with children() as start:
        listen = f"/ip4/{one.address}/tcp/0"
        server: Any = start(one, *SERVE, "--blocks", "0:30", "--swarm-key", str(key), "--listen", listen)
        assert "mDNS" not in said_until_ready(server)
        done, _ = generate(user)
        assert done.returncode == 2 and "no node of llmnode answers in this network" in done.stderr
        done, _ = generate(user, "--swarm-key", str(key))
        assert done.returncode == 2 and "mDNS" not in done.stderr, "a member looks for nobody by mDNS"
        done, _ = generate(user, "--swarm-key", str(key), "--peers", server.ready["addresses"][0])
        assert done.returncode == 0, done.stderr


def test_an_invite_is_enough_elsewhere_and_a_second_start_needs_nobody_whom_it_names(
    lan: list[Host],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    question: Question,
    record_property: Callable[[str, object], None],
) -> None:
    one, two, user = lan
    with children() as start:
        monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "theirs")))
        listen = [["--no-mdns", "--listen", f"/ip4/{host.address}/tcp/0"] for host in (one, two)]
        named: Any = start(one, *SERVE, "--blocks", "0:15", *listen[0])
        said_until_ready(named)
        invite = named.ready["invite"]
        for blocks in ("0:15", "15:30"):
            said_until_ready(start(two, *SERVE, invite, "--blocks", blocks, *listen[1]))

        monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "ours")))
        for name in ("invited_s", "without_named_s"):
            done, took_s = generate(user, invite)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["token_ids"] == question.expected[:FEW_TOKENS]
            assert ("none of the named peers answers" in done.stderr) == (name == "without_named_s")
            record_property(name, round(took_s, 1))
            named.process.kill()
            named.process.wait()
