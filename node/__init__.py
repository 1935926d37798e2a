"""The program: serving nodes, the command line, the demo and the benchmarks. `Node` is loaded when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.node.app import NodeConfig as NodeConfig
    from llmnode.node.embed import Node as Node

_HOMES = {"Node": "llmnode.node.embed", "NodeConfig": "llmnode.node.app"}

__all__ = ["Node", "NodeConfig"]


def __getattr__(name: str) -> object:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'llmnode.node' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value
