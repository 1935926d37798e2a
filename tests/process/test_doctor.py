"""`llmnode doctor` on a machine that is well, and on one that is made ill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from process import in_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

DOCTOR = [sys.executable, "-P", "-m", "llmnode.node", "doctor"]
NOBODY = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"


def _run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *arguments], capture_output=True, text=True, timeout=100, check=False, env=os.environ | environ
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        yield taken.getsockname()[1]


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens any more."""
    with closing(socket.create_server(("127.0.0.1", 0))) as ended:
        return f"/ip4/127.0.0.1/tcp/{ended.getsockname()[1]}/p2p/{NOBODY}"


def test_all_is_well_and_the_peers_of_the_file_are_asked(nodes: list[Any], tmp_path: Path) -> None:
    addresses = [node.address for node in nodes]
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[doctor]\npeers = {json.dumps(addresses)}\nkv-tokens = 2048\n")
    done = _run(LLMNODE_CONFIG=str(settings))
    assert done.returncode == 0, done.stdout + done.stderr
    *findings, last = done.stdout.splitlines()
    assert last == "ready"
    assert all(line.startswith("ok ") for line in findings), done.stdout
    text = done.stdout
    assert "HuggingFaceTB/SmolLM2-135M-Instruct: family llama, 30 blocks" in text
    assert "for 2048 tokens of KV" in text and "30 of 30 blocks fit" in text
    assert f"{addresses[0]} has blocks [0, 12) of HuggingFaceTB" in text
    assert f"{addresses[1]} has blocks [12, 30) of HuggingFaceTB" in text
    assert "the swarm has all 30 blocks in float32, at 2 servers" in text
    assert "of the clocks of 2 of 2 peers" in text


def test_a_dead_peer_is_a_warning_beside_a_living_one_that_knows_the_others(nodes: list[Any], nobody: str) -> None:
    done = in_process.llmnode("doctor", "--peers", nobody, nodes[1].address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning peer    peer {NOBODY}: cannot connect to {nobody}" in done.stdout
    assert "ok      peers   the swarm has all 30 blocks in float32, at 2 servers" in done.stdout
    assert done.stdout.splitlines()[-1] == "ready"


def test_blocks_that_the_swarm_lacks_are_a_warning(nodes: list[Any]) -> None:
    done = in_process.llmnode("doctor", "--peers", nodes[0].address, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning peers   no server of the swarm has blocks [0, 30) of HuggingFaceTB" in done.stdout
    assert "fix: give --dtype float32" in done.stdout


def test_every_ill_is_found_and_the_first_is_the_blocker(taken_port: int, nobody: str, tmp_path: Path) -> None:
    listen = f"/ip4/127.0.0.1/tcp/{taken_port}"
    done = in_process.llmnode("doctor", str(tmp_path / "nowhere"), "--listen", listen, "--peers", nobody, "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    blockers = {finding["text"]: finding for finding in answer["findings"] if finding["verdict"] == "blocker"}
    assert len(blockers) == 3
    for words, fix in {
        f"'{tmp_path / 'nowhere'}' is neither": "give another MODEL",
        f"cannot listen at {listen}": "stop what holds the address",
        f"no peer answers: peer {NOBODY}: cannot connect to {nobody}": "start that server",
    }.items():
        (found,) = [finding for text, finding in blockers.items() if words in text]
        assert found["fix"].startswith(fix)
        assert found["text"] in done.stderr, "and told as it came"
    assert answer["ready"] is False
    assert answer["blocker"]["check"] == "model"
    assert "Traceback" not in done.stderr


def test_the_last_line_names_the_blocker_and_its_fix(taken_port: int) -> None:
    done = in_process.llmnode("doctor", "--listen", f"/ip4/127.0.0.1/tcp/{taken_port}", "--peers", "nonsense")
    assert done.returncode == 1
    assert "blocker peer    'nonsense' is not the address of a peer" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"blocker: cannot listen at /ip4/127.0.0.1/tcp/{taken_port} (Address already in use)")
    assert last.endswith("; fix: stop what holds the address, or give another --listen")


def test_ctrl_c_ends_it_in_one_line() -> None:
    doctor = subprocess.Popen(DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert doctor.stdout is not None
    assert doctor.stdout.readline().startswith("ok      python")
    doctor.stdout.readline(), doctor.stdout.readline()  # then come seconds of torch
    doctor.send_signal(signal.SIGINT)
    _, stderr = doctor.communicate(timeout=20)
    assert doctor.returncode == 130
    assert stderr == "llmnode: interrupted\n"
