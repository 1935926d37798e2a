"""A server whose worker is a process of its own: that may be killed, and the node serves on; it ends with the node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

import llmnode
from llmnode.core.span import Span
from llmnode.node import Node
from process.small_server import expected_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"
HALF = 8
ALL = Span(0, 30)
END_S = 60

NODE = """
import json, sys, trio
from llmnode.node.app import NodeConfig, open_node
async def main():
    async with open_node(NodeConfig(blocks="0:1", threads=1)) as node:
        print(json.dumps(sorted(sys.modules)))
trio.run(main)
"""


EMBEDDING = """
import json, psutil
from llmnode.node import Node
with Node(blocks="0:1", threads=1) as node:
    (worker,) = psutil.Process().children()
    print(json.dumps([node.blocks, worker.environ()["PYTHONPATH"].partition(":")[0]]))
"""


def workers_of_this_process() -> list[psutil.Process]:
    """The workers of nodes in this process. Processes that other tests have ended may be its children, too."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # or a zombie
            if "llmnode.compute.child" in each.cmdline():
                found.append(each)
    return found


def worker_of(server: subprocess.Popen[str]) -> psutil.Process:
    (worker,) = psutil.Process(server.pid).children()
    return worker


def test_a_session_outlives_the_worker_of_its_server_which_then_serves_again(
    start_servers: Callable[..., list[Any]], transformers_model: Any
) -> None:
    (mortal,) = start_servers([ALL])
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    with llmnode.connect(peers=[mortal.address]) as model:
        prompt = model.tokenizer.encode(PROMPT)
        ids = torch.tensor([prompt])
        with model.open_cache(64) as cache:
            ids = model.generate(ids, cache=cache, max_new_tokens=HALF, **options)
            (other,) = start_servers([ALL], peers=[mortal.address])
            model._portal.call(lambda: model._client.swarm.meet(other.address))  # or the first may be back before
            worker_of(mortal.process).kill()
            lost = mortal.next_event("worker")
            ids = model.generate(ids, cache=cache, max_new_tokens=HALF, **options)
            (session,) = cache._sessions
            assert session.route[-1].peer == other.ready["peer"]
            assert ids[0].tolist() == [*prompt, *expected_tokens(transformers_model, prompt, 2 * HALF)]
        again = mortal.next_event("worker")
        other.stop()
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=HALF, **options)
        assert ids[0].tolist() == [*prompt, *expected_tokens(transformers_model, prompt, HALF)]
    assert (lost["serves"], again["serves"]) == (False, True)
    assert "killed (SIGKILL)" in lost["text"]


def test_a_node_in_a_program_changes_its_blocks_and_its_session_goes_on_elsewhere(
    start_servers: Callable[..., list[Any]], transformers_model: Any
) -> None:
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    (first,) = start_servers([Span(0, 15)])
    with Node(blocks="15:30", peers=[first.address], threads=1) as node, llmnode.connect(peers=node.addresses) as model:
        prompt = model.tokenizer.encode(PROMPT)
        with model.open_cache(64) as cache:
            ids = model.generate(torch.tensor([prompt]), cache=cache, max_new_tokens=HALF, **options)
            (late,) = start_servers([Span(15, 30)], peers=[first.address])
            model._portal.call(lambda: model._client.swarm.meet(late.address))
            peer = node.running.peer
            (worker,) = workers_of_this_process()
            node.change_span(0, 15, drain_s=0.0)
            assert (node.blocks, node.running.peer) == ((0, 15), peer)
            assert worker.is_running(), (
                "there was memory for both spans, so the blocks were loaded beside the former ones"
            )
            ids = model.generate(ids, cache=cache, max_new_tokens=HALF, **options)
            (session,) = cache._sessions
            assert [each.lost for each in session.recoveries] == [peer]
            assert ids[0].tolist() == [*prompt, *expected_tokens(transformers_model, prompt, 2 * HALF)]
        first.stop()
        with model.open_cache(64) as cache:
            ids = model.generate(torch.tensor([prompt]), cache=cache, max_new_tokens=HALF, **options)
            (session,) = cache._sessions
            assert session.route[0].peer == peer
            node.change_span(0, 16)
            ids = model.generate(ids, cache=cache, max_new_tokens=HALF, **options)
            assert not session.recoveries, "it goes on with the former blocks"
        assert ids[0].tolist() == [*prompt, *expected_tokens(transformers_model, prompt, 2 * HALF)]


def test_a_node_imports_no_torch_for_its_worker_is_a_process_unless_told_otherwise() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", NODE], capture_output=True, text=True, check=True, timeout=END_S)
    loaded = set(json.loads(done.stdout))
    assert "libp2p" in loaded
    assert not loaded & {"accelerate", "bitsandbytes", "huggingface_hub", "numpy", "torch", "transformers"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads what only Linux says of processes")
def test_nor_does_llmnode_serve_though_it_says_a_name_of_its_model(nodes: list[Any]) -> None:
    def has_torch(process: psutil.Process) -> bool:
        return any(each.path.endswith("libtorch_cpu.so") for each in process.memory_maps())

    for node in nodes:
        assert node.ready["invite"]
        assert not has_torch(psutil.Process(node.process.pid))
        assert has_torch(worker_of(node.process))


def test_a_node_in_a_program_needs_no_guard_and_no_file_and_finds_what_the_program_has_found(tmp_path: Path) -> None:
    """This is like a notebook, where llmnode may be in a folder that only `sys.path` names."""
    (tmp_path / "llmnode").symlink_to(Path(llmnode.__file__).parent)
    found = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-P", "-"], input=found + EMBEDDING, capture_output=True, text=True, check=True, timeout=END_S
    )
    blocks, child = json.loads(done.stdout)
    assert blocks == [0, 1]
    assert child == str(tmp_path)


def test_a_worker_may_be_a_thread_of_the_node(start_servers: Callable[..., list[Any]]) -> None:
    (node,) = start_servers([Span(0, 1)], more=["--worker", "thread"])
    assert not psutil.Process(node.process.pid).children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_ends_with_its_node_however_that_ends(
    number: signal.Signals, start_as_users_do: Callable[..., list[Any]]
) -> None:
    (node,) = start_as_users_do([Span(0, 1)])
    worker = worker_of(node.process)
    node.process.send_signal(number)
    gone, _ = psutil.wait_procs([worker], timeout=END_S)
    assert gone
    node.process.wait(END_S)
    assert node.process.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL)


def test_what_a_worker_of_its_own_process_cannot_load_is_told_in_a_line() -> None:
    command = [sys.executable, "-P", "-m", "llmnode.node", "serve", "/nowhere", "--blocks", "0:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 2
    loading, said = done.stderr.splitlines()
    assert "loading torch" in loading
    assert "'/nowhere' is neither" in said
