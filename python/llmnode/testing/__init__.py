"""Simulated swarms: whole nodes in one task tree, without a socket or torch, on a mock clock, broken by plan.

`simulate` runs a program so that a seed decides everything, `open_world` has the swarm, `FaultPlan` breaks it, and
`checks` says whether what must hold still does. Below them are twins of the ports: `open_internet` has the networks,
`MemoryDirectory` the directory, and `ExactWorker` computes in exact arithmetic.
"""

from llmnode.testing.checks import (
    Dialogue,
    before_deadline,
    check_coverage,
    check_kv_is_free,
    check_no_banned_peer,
    check_nobody_is_convicted,
)
from llmnode.testing.conditions import Conditions
from llmnode.testing.directory import MemoryDirectory
from llmnode.testing.exact_blocks import EXACT_MODEL, exact_input, exact_output
from llmnode.testing.faults import Cast, Fault, FaultPlan, Odds, shrunk
from llmnode.testing.network import MemoryInternet, MemoryNetwork, open_internet, peer_named
from llmnode.testing.simulate import inline, seeds, simulate, simulated, simulated_ms
from llmnode.testing.watched_finder import WatchedFinder
from llmnode.testing.worker import ExactExecutor, ExactWorker
from llmnode.testing.world import ServingNode, SimulatedClient, SimulatedNode, World, open_world

__all__ = [
    "EXACT_MODEL",
    "Cast",
    "Conditions",
    "Dialogue",
    "ExactExecutor",
    "ExactWorker",
    "Fault",
    "FaultPlan",
    "MemoryDirectory",
    "MemoryInternet",
    "MemoryNetwork",
    "Odds",
    "ServingNode",
    "SimulatedClient",
    "SimulatedNode",
    "WatchedFinder",
    "World",
    "before_deadline",
    "check_coverage",
    "check_kv_is_free",
    "check_no_banned_peer",
    "check_nobody_is_convicted",
    "exact_input",
    "exact_output",
    "inline",
    "open_internet",
    "open_world",
    "peer_named",
    "seeds",
    "shrunk",
    "simulate",
    "simulated",
    "simulated_ms",
]
