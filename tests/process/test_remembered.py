"""A swarm of real processes is found again when all peers that its user names are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.core.peers.dial_gate import scope_of
from llmnode.core.span import Span
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.net.addresses import own_ips
from llmnode.swarm.former_peers import FILE
from process import forked, in_process
from process.own_cache import cache_without_peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

LLMNODE = [sys.executable, "-P", "-m", "llmnode.node"]
AT_ONCE_S = 60.0
"""Most of it is the start of the program, on a busy machine."""


def own_address() -> str:
    """An address of this machine that is not its loopback, whose swarms are not remembered. Skips without one."""
    for ip in own_ips():
        if ip.version == 4 and scope_of(str(ip)) not in (None, "machine", "link"):
            return str(ip)
    pytest.skip("this machine has no address but those of its loopback")


def generate(peer: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """`llmnode generate`, and the seconds that it took."""
    began_s = time.monotonic()
    command = [*LLMNODE, "generate", "--json", "--max-new-tokens", "4", "--prompt", "1, 2, 3,", "--peers", peer]
    done = forked.run(command)
    return done, time.monotonic() - began_s


def test_a_second_start_finds_the_swarm_without_any_peer_that_was_named(
    start_servers: Callable[..., list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    empty, ours = cache_without_peers(tmp_path / "empty"), cache_without_peers(tmp_path / "ours")
    listen = ["--listen", f"/ip4/{own_address()}/tcp/0"]
    monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "theirs")))
    (named,) = start_servers([Span(0, 15)], more=listen)
    others = start_servers([Span(0, 15), Span(15, 30)], peers=[named.address], more=listen)

    monkeypatch.setenv("LLMNODE_CACHE", str(ours))
    before, usual_s = generate(named.address)
    assert before.returncode == 0, before.stderr
    file = ours / FILE
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_uid == os.geteuid()

    named.process.kill()
    named.process.wait()
    after, found_s = generate(named.address)
    assert after.returncode == 0, after.stderr
    assert json.loads(after.stdout)["token_ids"] == json.loads(before.stdout)["token_ids"]
    assert "none of the named peers answers" in after.stderr
    assert "none of the named peers answers" not in before.stderr
    assert found_s < usual_s + AT_ONCE_S
    record_property("usual_s", round(usual_s, 1))
    record_property("found_again_s", round(found_s, 1))

    made = in_process.llmnode("invite", "--no-mdns", "--json")
    assert made.returncode == 0 and "found by peers of a former run: 2 servers" in made.stderr
    invited = json.loads(made.stdout)
    assert set(invited["peers"]) == {each.address for each in others} and invited["model"] == EMBEDDED_MODEL

    (newcomer,) = start_servers([Span(15, 30)], peers=[named.address], more=listen)
    assert len(newcomer.ready["addresses"]) == 1, "a server finds it, too"

    monkeypatch.setenv("LLMNODE_CACHE", str(empty))
    forgotten = in_process.llmnode("generate", "--peers", named.address)
    assert forgotten.returncode != 0 and "cannot connect" in forgotten.stderr
