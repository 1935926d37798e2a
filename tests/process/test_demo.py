"""`llmnode demo`: what it prints, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from process.forked import TEMPLATE, Forked

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

DEMO = [sys.executable, "-P", "-m", "llmnode.node", "demo", "--servers", "2", "--threads", "1"]
STOP_S = 20


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """The demo's temporary folder, to see what stays in it."""
    folder = tmp_path / "temp"
    folder.mkdir()
    return folder


class RunningDemo:
    """A demo that is generating a text too long to end by itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        children = psutil.Process(process.pid).children()
        self.servers = [each for each in children if each.name() != TEMPLATE]

    def finish(self) -> tuple[int, str]:
        """Exit status and stderr, once everything is gone."""
        _, stderr = self.process.communicate(timeout=60)
        _, alive = psutil.wait_procs(self.servers, timeout=STOP_S)
        for server in alive:
            server.kill()
        assert not alive, f"left behind: {alive}"
        return self.process.returncode, stderr


@pytest.fixture(params=[Forked])
def generating(temp: Path, request: pytest.FixtureRequest) -> Iterator[RunningDemo]:
    """The demo and its servers start as users' do if it is a `subprocess.Popen`, and else as copies."""
    process = request.param(
        [*DEMO, "--max-new-tokens", "4000", "--prompt", "1 2 3 4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(temp),
    )
    assert process.stdout is not None
    assert process.stdout.read(len("1 2 3 4") + 8), "the first tokens of the text"
    demo = RunningDemo(process)
    assert len(demo.servers) == 2
    yield demo
    if process.poll() is None:
        process.kill()
        process.wait()
    assert list(temp.iterdir()) == []


def test_json_is_one_object_on_the_last_line(temp: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--json", "--chat", "--prompt", "Say hello", "--max-new-tokens", "8"],
        capture_output=True,
        text=True,
        timeout=200,
        env=_environment(temp),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert [server["blocks"] for server in summary["servers"]] == [[0, 15], [15, 30]]
    assert all(server["peer"].startswith("12D3KooW") and server["pss_mib"] > 200 for server in summary["servers"])
    assert 1 <= len(summary["token_ids"]) <= 8
    assert summary["text"]
    assert summary["text"] in done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith("llmnode: starting 2 servers on this machine")
    for server in summary["servers"]:
        start, end = server["blocks"]
        assert f"llmnode: blocks [{start}, {end}): ready, peer {server['peer']}" in others
    assert summary["tokens_per_s"] > 0
    assert summary["time_to_first_token_s"] > 0
    assert summary["client_pss_mib"] > 200
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize("generating", [subprocess.Popen], indirect=True)
def test_ctrl_c_ends_everything(generating: RunningDemo) -> None:
    generating.process.send_signal(signal.SIGINT)
    status, stderr = generating.finish()
    assert status == 130
    assert stderr.splitlines()[-1] == "llmnode: interrupted"
    assert "Traceback" not in stderr


def test_sigterm_ends_everything(generating: RunningDemo) -> None:
    generating.process.terminate()
    status, stderr = generating.finish()
    assert status == -signal.SIGTERM
    assert "Traceback" not in stderr


def test_servers_end_with_a_demo_that_was_killed(generating: RunningDemo) -> None:
    generating.process.kill()
    status, _ = generating.finish()
    assert status == -signal.SIGKILL


def test_a_server_that_dies_ends_the_demo_with_an_error_that_names_its_blocks(generating: RunningDemo) -> None:
    generating.servers[1].kill()
    status, stderr = generating.finish()
    assert status == 1
    last = stderr.splitlines()[-1]
    assert last.startswith("llmnode: the server of blocks [15, 30) ended")
    assert "Traceback" not in stderr


def _environment(temp: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(temp)}
