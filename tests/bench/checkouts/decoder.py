"""A program for `checkouts.py`: decodes through its own servers, a burst for each line of its stdin.

It runs in both checkouts, with the package of each. So it uses only what every version has had: `llmnode serve --json`,
and `llmnode.connect`. Its arguments are the numbers of servers, clients, tokens of a burst, and threads. It says
`ready`. Then it says what a token of each burst took: milliseconds, and those of CPU of the nodes, of their workers and
of the clients.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import torch

import llmnode
from bench.kit.cpu import cpu_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode import DistributedModelForCausalLM

BLOCKS = 30
WARM_UP = 16
SERVE = (sys.executable, "-P", "-m", "llmnode.node", "serve", "--json", "--until-stdin-closes")


def main() -> None:
    servers, clients, tokens, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        nodes: list[int] = []
        addresses: list[str] = []
        for index in range(servers):
            span = f"{BLOCKS * index // servers}:{BLOCKS * (index + 1) // servers}"
            peers = ["--peers", *addresses] if addresses else []
            command = [*SERVE, "--blocks", span, "--threads", str(threads), *peers]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            node = stack.enter_context(subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=null))
            assert node.stdout is not None
            events = map(json.loads, node.stdout)
            addresses.append(next(event["addresses"][0] for event in events if event["event"] == "ready"))
            nodes.append(node.pid)
        workers = [child.pid for pid in nodes for child in psutil.Process(pid).children()]
        models = [stack.enter_context(llmnode.connect(peers=addresses)) for _ in range(clients)]
        decode(models, WARM_UP)
        print("ready", flush=True)
        for _ in sys.stdin:
            decode(models, 2)  # whatever has slept wakes up
            before = times(nodes, workers)
            decode(models, tokens)
            took = [now - then for now, then in zip(times(nodes, workers), before, strict=True)]
            print(json.dumps([1e3 * each / (tokens * clients) for each in took]), flush=True)


def decode(models: Sequence[DistributedModelForCausalLM], tokens: int) -> None:
    """Every client generates this many tokens. All do so at once."""
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones_like(ids)

    def generate(model: DistributedModelForCausalLM) -> None:
        model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)

    others = [threading.Thread(target=generate, args=(model,)) for model in models]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()


def times(nodes: Sequence[int], workers: Sequence[int]) -> tuple[float, float, float, float]:
    """In seconds: the clock, and the CPU of the nodes, of the workers and of this process."""
    return time.perf_counter(), sum(map(cpu_s, nodes)), sum(map(cpu_s, workers)), time.process_time()


if __name__ == "__main__":
    main()
