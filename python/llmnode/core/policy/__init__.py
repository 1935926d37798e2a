"""Limits and deadlines, each with its reason.

A number is a field of a policy if a caller or a test may want another value, or if two modules must agree on it. A
number that only one module knows, such as a size of a table or a bound on what a peer may send, is a constant there.
"""

from __future__ import annotations

from llmnode.core.policy.budget import BudgetPolicy, TurnPolicy
from llmnode.core.policy.client import (
    ClientPolicy,
    MovePolicy,
    PassPolicy,
    PushPolicy,
    RecoveryPolicy,
    RoutePolicy,
    SpotCheckPolicy,
    StandingPolicy,
    TrialPolicy,
    TrustPolicy,
)
from llmnode.core.policy.links import LinkPolicy, PackPolicy, PeerstorePolicy
from llmnode.core.policy.reaching import (
    CircuitPolicy,
    DialPolicy,
    PoolPolicy,
    PunchPolicy,
    ReachPolicy,
    RelayedPolicy,
    RelayPolicy,
)
from llmnode.core.policy.serving import AdmissionPolicy, BatchPolicy, LifePolicy, ServePolicy, WorkerPolicy
from llmnode.core.policy.swarm import DhtPolicy, JoinPolicy, MdnsPolicy, ProbePolicy, SwarmPolicy

__all__ = [
    "AdmissionPolicy",
    "BatchPolicy",
    "BudgetPolicy",
    "CircuitPolicy",
    "ClientPolicy",
    "DhtPolicy",
    "DialPolicy",
    "JoinPolicy",
    "LifePolicy",
    "LinkPolicy",
    "MdnsPolicy",
    "MovePolicy",
    "PackPolicy",
    "PassPolicy",
    "PeerstorePolicy",
    "PoolPolicy",
    "ProbePolicy",
    "PunchPolicy",
    "PushPolicy",
    "ReachPolicy",
    "RecoveryPolicy",
    "RelayPolicy",
    "RelayedPolicy",
    "RoutePolicy",
    "ServePolicy",
    "SpotCheckPolicy",
    "StandingPolicy",
    "SwarmPolicy",
    "TrialPolicy",
    "TrustPolicy",
    "TurnPolicy",
    "WorkerPolicy",
]
