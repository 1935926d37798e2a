"""Nodes of today and newer ones beside nodes of before protocol 2: a swarm can be updated node by node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

import llmnode
from llmnode import _native
from llmnode.core.policy import LinkPolicy
from llmnode.swarm.join import join_swarm
from llmnode.wire.frame import LINK_VERSIONS
from process.conftest import Node
from process.small_server import ANSWER_S
from process.small_server import expected_tokens as greedy
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    from llmnode.wire.messages import Description

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]
ARCHIVES = sorted((TESTS / "process/earlier").glob("*.tar.xz"))
PROMPT = [5, 17, 99, 3, 42]
NEW_TOKENS = 24
HEARD_WITHIN_S = 20.0
GROW = "import unit.grown; unit.grown.grow()"
"""Run first, it makes a process a node that is newer than today's: all that may have a field more has one."""
SERVER = "import llmnode.node.cli; llmnode.node.cli.run()"
CLIENT = """
import json, sys, torch, llmnode
folder, peer, prompt, new_tokens = json.loads(sys.argv[1])
with llmnode.connect(folder, peers=[peer]) as model:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
print(json.dumps(output[0, len(prompt):].tolist()))
"""


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def earlier(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment in which Python finds the code of before. The native module is today's: it has not changed."""
    assert request.config.cache is not None
    root = request.config.cache.mkdir(f"llmnode-{request.param.name.partition('.')[0]}")
    with tarfile.open(request.param) as archive:
        archive.extractall(root, filter="data")
    assert _native.__file__ is not None
    native = root / "llmnode" / Path(_native.__file__).name
    native.unlink(missing_ok=True)
    native.symlink_to(_native.__file__)
    return {**os.environ, "PYTHONPATH": str(root)}


@pytest.fixture(scope="module")
def newer() -> dict[str, str]:
    """The environment in which Python finds the code of today, and `GROW`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(llmnode.__file__).parents[1]), str(TESTS)])}


@dataclass(frozen=True)
class Model:
    folder: Path
    expected: list[int]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    model = make_model("llama", tied=False)
    model.save_pretrained(folder)
    return Model(folder, greedy(model, PROMPT, NEW_TOKENS))


def start(
    stack: ExitStack, environment: Mapping[str, str], model: Model, blocks: str, *peers: str, program: str = ""
) -> Node:
    command = [
        sys.executable,
        "-P",
        "-c",
        f"{program}\n{SERVER}",
        "serve",
        str(model.folder),
        "--blocks",
        blocks,
        "--threads",
        "1",
    ]
    command += ["--worker", "thread", "--kv-tokens", "1000", "--json", "--until-stdin-closes"]
    command += ["--peers", *peers] if peers else []
    pipe = subprocess.PIPE
    node = Node(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    stack.callback(node.stop)
    node.wait_ready()
    return node


def generate(environment: Mapping[str, str], model: Model, peer: str, program: str = "") -> list[int]:
    """The tokens that a client in a process of its own gets."""
    what = json.dumps([str(model.folder), peer, PROMPT, NEW_TOKENS])
    command = [sys.executable, "-P", "-c", f"{program}\n{CLIENT}", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout)
    return tokens


def described(contact: Node, nodes: list[Node]) -> list[tuple[int | None, Description]]:
    """The protocols that `nodes` speak, and how they describe themselves. `contact` must know all of them."""
    return trio.run(_described, contact.address, nodes)


async def _described(contact: str, nodes: list[Node]) -> list[tuple[int | None, Description]]:
    async with join_swarm([contact], LinkPolicy()) as (pool, swarm):
        with trio.fail_after(HEARD_WITHIN_S):
            while True:
                known = {each.peer: each for each in swarm.view.announcements()}
                if known.keys() == {node.ready["peer"] for node in nodes}:
                    break
                await swarm.wait_changed()
        assert swarm.unread == 0
        connections = [await pool.connect(known[node.ready["peer"]].addresses) for node in nodes]
        descriptions = [await connection.describe(ANSWER_S) for connection in connections]
        return [(each.version, description) for each, description in zip(connections, descriptions, strict=True)]


def test_nodes_of_several_versions_are_one_swarm(earlier: dict[str, str], newer: dict[str, str], small: Model) -> None:
    """Clients of all versions get the tokens of transformers, whichever server they ask first.

    Servers push to each other from before to newer, and from newer to before.
    """
    with contextlib.ExitStack() as stack:
        first = start(stack, earlier, small, "0:2")
        middle = start(stack, newer, small, "2:4", first.address, program=GROW)
        last = start(stack, earlier, small, f"4:{BLOCKS}", middle.address)
        nodes = [first, middle, last]
        for node in nodes:
            assert [version for version, _ in described(node, nodes)] == [1, LINK_VERSIONS[0], 1]
        assert generate(earlier, small, middle.address) == small.expected
        assert generate(newer, small, first.address, program=GROW) == small.expected
        with llmnode.connect(str(small.folder), peers=[last.address]) as model:
            assert greedy(model, PROMPT, NEW_TOKENS) == small.expected
        ahead, between, behind = (description for _, description in described(last, nodes))
        assert ahead.steps == between.steps == behind.steps == 3 * NEW_TOKENS
        for sender, receiver in [(ahead, between), (between, behind)]:
            assert sender.results_pushed == receiver.steps_given_directly > NEW_TOKENS
