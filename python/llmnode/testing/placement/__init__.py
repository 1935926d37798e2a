"""Swarms at the level of throughputs: thousands of nodes that place themselves by the node's own functions."""

from __future__ import annotations

from llmnode.testing.placement.hosts import Host, Uptime, daily_sine, read_trace, two_classes
from llmnode.testing.placement.simulator import Conditions, Outcome, Rule, simulate_placement

__all__ = [
    "Conditions",
    "Host",
    "Outcome",
    "Rule",
    "Uptime",
    "daily_sine",
    "read_trace",
    "simulate_placement",
    "two_classes",
]
