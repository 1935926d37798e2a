"""Swarms at the level of throughputs: thousands of nodes that place themselves by the node's own functions."""

from __future__ import annotations

from llmnode.testing.placement.host_files import read_hosts, read_trace
from llmnode.testing.placement.hosts import Host, Uptime, daily_sine, two_classes
from llmnode.testing.placement.simulator import Rule, SwarmConditions, SwarmFigures, simulate_placement

__all__ = [
    "Host",
    "Rule",
    "SwarmConditions",
    "SwarmFigures",
    "Uptime",
    "daily_sine",
    "read_hosts",
    "read_trace",
    "simulate_placement",
    "two_classes",
]
