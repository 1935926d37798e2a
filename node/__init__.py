"""The program: serving nodes, the command line, the demo and the benchmarks. `Node` is loaded when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.node.embed import Node as Node

__all__ = ["Node"]


def __getattr__(name: str) -> object:
    if name != "Node":
        raise AttributeError(f"module 'llmnode.node' has no attribute {name!r}")
    from llmnode.node.embed import Node

    return Node
