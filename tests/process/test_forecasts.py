"""`status` has each figure of a `plan` beside what was measured since: by texts here, and by the own server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.client.connect import aconnect
from llmnode.client.portal import open_portal
from llmnode.client.sampling import Sampling
from llmnode.core.speed import SHARED_SESSIONS
from llmnode.machine.cache_folder import cache_folder
from llmnode.node.chat import Chat, StopFlag
from llmnode.node.connect_options import OpenClient
from llmnode.node.forecasts import LEAST_TOKENS
from llmnode.swarm.own_nodes import FOLDER as OWN_NODES
from process import in_process
from process.own_cache import cache_without_peers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

PLAN = [sys.executable, "-P", "-m", "llmnode.node", "plan", "--blocks", "0:12", "--threads", "1"]
PROMPT_TOKENS = 16
ASKED = "One, two, three, four,"
TEXT = ["--prompt", ASKED, "--max-new-tokens", str(LEAST_TOKENS)]


def generate(peers: Sequence[str], *options: str) -> None:
    done = in_process.llmnode("generate", *TEXT, *options, "--peers", *peers)
    assert done.returncode == 0, done.stderr


def chat(peers: Sequence[str]) -> None:
    with open_portal() as portal, portal.enter(aconnect(peers)) as client:
        Chat(OpenClient(portal, client), Sampling(), LEAST_TOKENS, max_length=256).answer(ASKED, StopFlag())


def look(peers: Sequence[str]) -> list[dict[str, Any]]:
    done = in_process.llmnode("status", "--json", "--peers", *peers)
    (model,) = json.loads(done.stdout)["models"]
    figures: list[dict[str, Any]] = model["forecast"]["figures"]
    return figures


def test_each_figure_of_a_plan_has_its_measurement_once_there_is_one(
    nodes: Sequence[Any], peers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_without_peers(tmp_path / "cache")
    (cache / OWN_NODES).symlink_to(cache_folder(OWN_NODES))
    monkeypatch.setenv("LLMNODE_CACHE", str(cache))
    command = [*PLAN, "--prompt-tokens", str(PROMPT_TOKENS), "--peers", *peers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    one, first, several, memory, upload = look(peers)
    sessions = (len(nodes) + 1) * SHARED_SESSIONS
    assert [first["name"], several["name"]] == [f"first token of {PROMPT_TOKENS}", f"{sessions} sessions"]
    assert [each["measured"] for each in (one, first, several)] == [None] * 3, "there was no text yet"
    assert all(each["predicted"] > 0 for each in (one, first, several, memory, upload))
    assert memory["measured"] > 0, "the first server has the blocks of the plan"
    assert upload["measured"] > 0
    (server,) = [each for each in nodes if each.ready["blocks"] == [0, 12]]
    assert server.address == peers[0]

    chat(peers)
    one_of_chat, first_of_chat, several, *_ = look(peers)
    assert one_of_chat["measured"] > 0 and first_of_chat["measured"] > 0
    assert first_of_chat["error"] is None, "a dialogue has its template, too"
    assert first_of_chat["measured_for"].endswith(" tokens")
    assert several["measured"] is None

    generate(peers)
    one, first, several, *_ = look(peers)
    assert one["measured"] not in (None, one_of_chat["measured"])
    assert first["measured"] not in (None, first_of_chat["measured"])
    assert first["error"] == pytest.approx(first["predicted"] / first["measured"] - 1)
    assert several["measured"] is None

    generate(peers, "--samples", "2", "--temperature", "0.8", "--seed", "1")
    one_after, first_after, several, *_ = look(peers)
    assert (one_after, first_after) == (one, first), "these texts were not alone"
    assert several["measured"] > 0
    assert (several["measured_for"], several["error"]) == ("for 2 sessions", None)
