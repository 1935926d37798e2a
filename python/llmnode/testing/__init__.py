"""Twins in memory of the ports: whole nodes run in one task tree, without a socket or torch, on trio's mock clock too.

`open_internet` has the networks, `MemoryDirectory` the directory, `ExactWorker` computes in exact arithmetic.
"""

from llmnode.testing.directory import MemoryDirectory
from llmnode.testing.network import MemoryInternet, MemoryNetwork, open_internet
from llmnode.testing.worker import ExactWorker, exact_output

__all__ = ["ExactWorker", "MemoryDirectory", "MemoryInternet", "MemoryNetwork", "exact_output", "open_internet"]
