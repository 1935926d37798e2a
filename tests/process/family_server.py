"""A process that serves spans of several models at once, each at an address of its own: torch is imported once.

A line of JSON on stdin asks for one, `{"folder": PATH, "blocks": [START, END]}`; the line on stdout that answers has
its `address` besides. Ends with stdin.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import trio

from llmnode.compute.load_executor import load_executor
from llmnode.compute.thread_worker import ThreadWorker
from llmnode.core.policy import LinkPolicy, ServePolicy
from llmnode.core.span import Span
from llmnode.models.open_model import open_model
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import serve_links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KV_TOKENS = 1000


async def main() -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # as in node/app.py
    async with trio.open_nursery() as nursery:
        async for line in _lines_of_stdin():
            nursery.start_soon(_serve, json.loads(line))
        nursery.cancel_scope.cancel()


async def _serve(wanted: dict[str, Any]) -> None:  # Any: JSON
    folder = open_model(wanted["folder"])
    executor = load_executor(folder, Span(*wanted["blocks"]), KV_TOKENS)
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network:
        print(json.dumps({**wanted, "address": network.addresses[0]}), flush=True)
        server = Server(network, folder.info, ServePolicy())
        server.serve(ThreadWorker(executor))
        await serve_links(server)


async def _lines_of_stdin() -> AsyncIterator[bytes]:
    rest = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        async for chunk in stdin:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line


if __name__ == "__main__":
    trio.run(main)
