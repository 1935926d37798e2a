"""A real `llmnode serve` of a small random model, watched from outside; and a client of servers at known addresses."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from llmnode.client.ends import SharedEnds
from llmnode.client.generate import next_token
from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.core.route import Hop, Route
from llmnode.core.span import Span
from llmnode.models.load import Ends, load_ends
from llmnode.net.host import open_network
from llmnode.node.processes import with_worker
from llmnode.session.session import InferenceSession, open_session
from llmnode.swarm.peer_connection import PeerConnection, open_connection
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms
from process.other_policies import with_policies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.models.sources.folder import ModelFolder

STOP_S = 20.0
ANSWER_S = 30.0

# Malformed frames cost no link then, and nothing waits for its turn: floods reach everything behind the parsers.
FORGIVING = """
import trio
from llmnode.net.admission import ConnectionAdmission
from llmnode.node.serve.conduct import Conduct

async def forgive(*_):
    await trio.lowlevel.checkpoint()

Conduct.note_malformed = Conduct.wait_turn = Conduct.wait_want = ConnectionAdmission.wait_turn = forgive
ConnectionAdmission.accepts = lambda *_: True
"""

# `llmnode serve`, that tells on SIGUSR2 which trio tasks live, the processor time of the longest step of the event loop
# since the last time, the hosts that it has dialled, and the number of objects that a garbage collection looks through.
WATCHED_SERVE = """
import collections, functools, gc, json, os, signal, sys, time, trio
from llmnode.node.cli import run

def names(task):
    yield task.name
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from names(child)

class Steps(trio.abc.Instrument):
    longest_s = began_s = 0.0

    def before_task_step(self, _task):
        self.began_s = time.thread_time()

    def after_task_step(self, _task):
        self.longest_s = max(self.longest_s, time.thread_time() - self.began_s)

def note_dial(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        dialled.add(arguments[1][0])

def tell(*_):
    tasks = collections.Counter(names(trio.lowlevel.current_root_task()))
    said = {"event": "tasks", "tasks": tasks, "longest_step_s": steps.longest_s, "dialled": sorted(dialled)}
    said["collected"] = len(gc.get_objects())
    os.write(1, (json.dumps(said) + "\\n").encode())
    steps.longest_s = 0.0

steps, dialled = Steps(), set()
sys.addaudithook(note_dial)
trio.run = functools.partial(trio.run, instruments=[steps])
signal.signal(signal.SIGUSR2, tell)
run()
"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that a server and its worker hold. `tasks` are trio's, by name.

    The longest step is that of the server's event loop since the footprint before, in processor time. `dialled` are all
    hosts to which the server has begun to connect.
    """

    memory_mib: float
    files: int
    threads: int
    tasks: Counter[str]
    longest_step_s: float
    dialled: frozenset[str]
    collected: int
    """The objects of the server's own process that a full garbage collection looks through."""


@dataclass
class SmallServer:
    """A running server; `errors` is the file of its stderr."""

    process: subprocess.Popen[str]
    errors: Path
    address: str = ""

    def wait_ready(self) -> None:
        self.address = self._event("ready")["addresses"][0]

    def footprint(self) -> Footprint:
        self.process.send_signal(signal.SIGUSR2)
        said = self._event("tasks")
        processes = with_worker(self.process.pid)
        memory_mib = sum(each.memory_full_info().uss for each in processes) / 2**20
        files, threads = sum(each.num_fds() for each in processes), sum(each.num_threads() for each in processes)
        tasks, dialled = Counter(said["tasks"]), frozenset(said["dialled"])
        return Footprint(memory_mib, files, threads, tasks, said["longest_step_s"], dialled, said["collected"])

    def check_no_traceback(self) -> None:
        said = self.errors.read_text()
        assert "Traceback" not in said, said[max(0, said.index("Traceback") - 300) :][:5000]

    def _event(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        pytest.fail(f"the server ended: {self.errors.read_text()}")


@contextmanager
def serve_small(
    folder: Path, span: Span, kv_tokens: int, errors: Path, memory_bytes: int | None = None, *, forgives: bool = True
) -> Iterator[SmallServer]:
    """It must end well, and without having said anything of a traceback. `memory_bytes` is its budget for peers."""
    budget = {} if memory_bytes is None else {"BudgetPolicy.memory_bytes": memory_bytes}
    program = FORGIVING * forgives + WATCHED_SERVE
    command = [*with_policies(budget, program), "serve", str(folder), "--blocks", f"{span.start}:{span.end}"]
    command += ["--kv-tokens", str(kv_tokens), "--threads", "1", "--json", "--verbose", "--until-stdin-closes"]
    pipe = subprocess.PIPE
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True) as process,
    ):
        server = SmallServer(process, errors)
        try:
            server.wait_ready()
            yield server
            process.communicate(timeout=STOP_S)  # as a parent that goes away
        finally:
            process.kill()
    server.check_no_traceback()
    assert process.returncode == 0


@dataclass
class SmallClient:
    """Sessions through servers that are known, without a swarm to find them."""

    model: ModelInfo
    ends: Ends
    route: Route
    connections: dict[PeerId, PeerConnection]
    policy: ClientPolicy

    def session(self, max_length: int) -> AbstractAsyncContextManager[InferenceSession]:
        return open_session(self.route, self.connections, SessionTerms(self.model, max_length, Codec.RAW, self.policy))

    async def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy tokens after each prompt, a session for each, all at once."""
        chosen: dict[int, list[int]] = {}
        ends = SharedEnds(self.ends)

        async def generate_one(index: int, prompt: list[int]) -> None:
            tokens: list[int] = []
            async with self.session(len(prompt) + new_tokens) as session:
                fresh = prompt
                while len(tokens) < new_tokens:
                    choice, _ = await next_token(session, ends, fresh)
                    fresh = [choice.id]
                    tokens += fresh
            chosen[index] = tokens

        async with trio.open_nursery() as nursery:
            for index, prompt in enumerate(prompts):
                nursery.start_soon(generate_one, index, prompt)
        return [chosen[index] for index in range(len(prompts))]


@asynccontextmanager
async def connected(
    addresses: Sequence[str], folder: ModelFolder, policy: ClientPolicy | None = None
) -> AsyncIterator[SmallClient]:
    """A client of the servers at `addresses`, whose spans follow each other."""
    async with open_network([], LinkPolicy()) as network, AsyncExitStack() as stack:
        connections: dict[PeerId, PeerConnection] = {}
        hops = []
        for address in addresses:
            connection = await stack.enter_async_context(open_connection(await network.dial(address)))
            held = await connection.describe(ANSWER_S)
            connections[connection.peer] = connection
            hops.append(Hop(connection.peer, Span(held.span_start, held.span_end)))
        yield SmallClient(folder.info, load_ends(folder), tuple(hops), connections, policy or ClientPolicy())


@torch.inference_mode()
def expected_tokens(model: Any, prompt: list[int], new_tokens: int) -> list[int]:  # Any: as transformers types it
    """The tokens that transformers chooses greedily, in one process."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in output[0, len(prompt) :]]
