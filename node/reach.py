"""Tells the operator of this node, in words, how others reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.peers.nat import Nat, Reached

if TYPE_CHECKING:
    from llmnode.core.peers.nat import Reach

NEIGHBOURS = "forward a port to it and --announce /ip4/{host}/tcp/PORT"
FIXES = {
    Nat.NONE: "open its port for TCP in the firewall, and listen there (--listen /ip4/0.0.0.0/tcp/PORT), or serve with "
    "--relay ADDRESS",
    Nat.STEADY: f"serve with --relay ADDRESS: peers then meet by hole punching; or {NEIGHBOURS}",
    Nat.SYMMETRIC: f"serve with --relay ADDRESS, through which all will go; or {NEIGHBOURS}",
    Nat.SOME: f"serve with --relay ADDRESS, or {NEIGHBOURS}; with --peers at two hosts `llmnode doctor` names the kind",
}


def explain(reach: Reach) -> tuple[str, str]:
    """The kind of NAT, and the fix; there is none if others reach the node."""
    seen = f"others see this node at {reach.host}"
    where = f"{seen}, its own address" if reach.nat is Nat.NONE else f"{seen}, behind {reach.nat}"
    if reach.reached is Reached.YES:
        return f"{where}, and can dial it at {reach.reached_at}", ""
    verdict = "and cannot dial it" if reach.reached is Reached.NO else "and have not tried to dial it"
    return f"{where}, {verdict}", FIXES[reach.nat].format(host=reach.host)
