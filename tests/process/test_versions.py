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
from typing import TYPE_CHECKING, Any

import pytest
import trio

import llmnode
from llmnode import _native
from llmnode.core.policy import LinkPolicy
from llmnode.swarm.join import join_swarm
from llmnode.wire.frame import LINK_VERSIONS
from process.conftest import STOP_S
from process.forked import Forked
from process.small_server import ANSWER_S
from process.small_server import expected_tokens as greedy
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llmnode.wire.messages import Description

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]
ARCHIVES = sorted((TESTS / "process/earlier").glob("*.tar.xz"))
PROMPT = [5, 17, 99, 3, 42]
NEW_TOKENS = 24
HEARD_WITHIN_S = 20.0
GROW = "import unit.grown; unit.grown.grow()"
"""Run first, it makes a process one of newer nodes than today's: all that may have a field more has one."""
AS_BEFORE = """
from llmnode import _native

class Connection:
    def __init__(self, *arguments, **named):
        self._connection = _native_connection(*arguments, **named)

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def read(self, stream, bytes_max, now_s):
        return self._connection.read(stream, bytes_max, now_s, 16 << 20)

_native_connection, _native.Connection = _native.Connection, Connection
"""
"""Run first, it gives the code of before today's native module as it was: `read` was told no size of a window."""
PROGRAM = """
import contextlib, json, sys, torch, llmnode
from llmnode.node import Node

def serve(folder, blocks, *peers):
    node = stack.enter_context(Node(folder, blocks=blocks, peers=peers, worker="thread", threads=1, kv_tokens=1000))
    return node.addresses[0]

def generate(folder, peer, prompt, new_tokens):
    with llmnode.connect(folder, peers=[peer]) as model:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return output[0, len(prompt):].tolist()

with contextlib.ExitStack() as stack:
    for line in sys.stdin:
        function, arguments = json.loads(line)
        print(json.dumps({"serve": serve, "generate": generate}[function](*arguments)), flush=True)
"""
"""Serves blocks and generates, as it is told. Both versions can run it."""


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def earlier(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment in which Python finds the code of before. The native module is today's, see `AS_BEFORE`."""
    assert request.config.cache is not None
    root = request.config.cache.mkdir(f"llmnode-{request.param.name.partition('.')[0]}")
    with tarfile.open(request.param) as archive:
        archive.extractall(root, filter="data")
    assert _native.__file__ is not None
    native = root / "llmnode" / Path(_native.__file__).name
    native.unlink(missing_ok=True)
    native.symlink_to(_native.__file__)
    return {**os.environ, "PYTHONPATH": str(root)}


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


@dataclass(frozen=True)
class Program:
    """A running `PROGRAM`."""

    process: subprocess.Popen[str]
    model: Model

    def serve(self, blocks: str, *peers: str) -> str:
        """The address of a new node of this process."""
        address: str = self._ask("serve", str(self.model.folder), blocks, *peers)
        return address

    def generate(self, peer: str) -> list[int]:
        """The tokens that a new client of this process gets."""
        tokens: list[int] = self._ask("generate", str(self.model.folder), peer, PROMPT, NEW_TOKENS)
        return tokens

    def _ask(self, function: str, *arguments: object) -> Any:  # Any: JSON
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([function, arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the program ended: {self.process.wait()}"
        return json.loads(answer)


@contextlib.contextmanager
def run(
    popen: type[subprocess.Popen[str]], environment: Mapping[str, str], model: Model, first: str
) -> Iterator[Program]:
    command = [sys.executable, "-P", "-c", f"{first}\n{PROGRAM}"]
    pipe = subprocess.PIPE
    with popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield Program(process, model)
            process.communicate(timeout=STOP_S)  # closes its stdin
        finally:
            process.kill()
    assert process.returncode == 0


def described(contact: str, nodes: list[str]) -> list[tuple[int | None, Description]]:
    """The protocols that `nodes` speak, and how they describe themselves. `contact` must know all of them."""
    return trio.run(_described, contact, nodes)


async def _described(contact: str, nodes: list[str]) -> list[tuple[int | None, Description]]:
    peers = [address.rpartition("/")[2] for address in nodes]
    async with join_swarm([contact], LinkPolicy()) as (pool, swarm):
        with trio.fail_after(HEARD_WITHIN_S):
            while {each.peer for each in swarm.view.announcements()} != set(peers):
                await swarm.wait_changed()
        assert swarm.unread == 0
        connections = [await pool.connect([address]) for address in nodes]
        descriptions = [await connection.describe(ANSWER_S) for connection in connections]
        return [(each.version, description) for each, description in zip(connections, descriptions, strict=True)]


def test_nodes_of_several_versions_are_one_swarm(earlier: dict[str, str], small: Model) -> None:
    """Clients of all versions get the tokens of transformers, whichever server they ask first.

    Servers push to each other from before to newer, and from newer to before.
    """
    newer = run(Forked, dict(os.environ), small, GROW)  # a copy: the code of today is this process's
    with run(subprocess.Popen, earlier, small, AS_BEFORE) as before, newer as after:
        first = before.serve("0:2")
        middle = after.serve("2:4", first)
        last = before.serve(f"4:{BLOCKS}", middle)
        nodes = [first, middle, last]
        for node in nodes:
            assert [version for version, _ in described(node, nodes)] == [1, LINK_VERSIONS[0], 1]
        assert before.generate(middle) == small.expected
        assert after.generate(first) == small.expected
        with llmnode.connect(str(small.folder), peers=[last]) as model:
            assert greedy(model, PROMPT, NEW_TOKENS) == small.expected
        ahead, between, behind = (description for _, description in described(last, nodes))
        assert ahead.steps == between.steps == behind.steps == 3 * NEW_TOKENS
        for sender, receiver in [(ahead, between), (between, behind)]:
            assert sender.results_pushed == receiver.steps_given_directly > NEW_TOKENS
