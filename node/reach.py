"""Tells the operator of this node, in words, how others reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.peers.nat import Nat, Reached
from llmnode.core.policy import ReachPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.peers.nat import Reach
    from llmnode.net.host import Libp2pNetwork

NAMES = {"ip4": "IPv4", "ip6": "IPv6"}
NEIGHBOURS = "forward a port to it and --announce /{version}/{host}/tcp/PORT"
LISTEN = {"ip4": "--listen /ip4/0.0.0.0/tcp/PORT", "ip6": "--listen /ip6/::/tcp/PORT"}
OPEN = "open its port for TCP over {name} in the firewall, and listen there ({listen})"
FIXES = {
    Nat.NONE: f"{OPEN}, or serve with --relay ADDRESS",
    Nat.STEADY: f"serve with --relay ADDRESS: peers then meet by hole punching; or {NEIGHBOURS}",
    Nat.SYMMETRIC: f"serve with --relay ADDRESS, through which all will go; or {NEIGHBOURS}",
    Nat.SOME: f"serve with --relay ADDRESS, or {NEIGHBOURS}; with --peers at two hosts `llmnode doctor` names the kind",
}


async def look_by_version(network: Libp2pNetwork, addresses: Sequence[str]) -> list[Reach]:
    """How the peers at `addresses` reach the node over IPv4, and then over IPv6, as far as they say it."""
    over_6 = [each for each in addresses if each.startswith("/ip6/")]
    over_4 = [each for each in addresses if each not in over_6]
    found = [await network.look(each, ReachPolicy()) for each in (over_4, over_6) if each]
    return [each for each in found if each is not None]


def explain(reach: Reach, reaches: Sequence[Reach] = ()) -> tuple[str, str]:
    """The kind of NAT, and the fix; there is none if others reach the node. `reaches` has that of another version, too.

    A node that is given `--announce`, `--listen` or `--relay` tells nobody of its other addresses.
    """
    seen = f"others see this node at {reach.host}"
    where = f"{seen}, its own address" if reach.nat is Nat.NONE else f"{seen}, behind {reach.nat}"
    if reach.reached is Reached.YES:
        return f"{where}, and can dial it at {reach.reached_at}", ""
    verdict = "and cannot dial it" if reach.reached is Reached.NO else "and have not tried to dial it"
    version, fix = _version(reach), FIXES[reach.nat]
    others = [each for each in reaches if _version(each) != version and each.reached is Reached.YES]
    for other in others:
        verdict += f"; over {NAMES[_version(other)]} they can"
        fix = OPEN if reach.nat is Nat.NONE else f"{fix}; then --announce {other.reached_at}, too"
    listen = " ".join(LISTEN[each] for each in sorted({version, *map(_version, others)}))
    return f"{where}, {verdict}", fix.format(host=reach.host, version=version, name=NAMES[version], listen=listen)


def _version(reach: Reach) -> str:
    return "ip6" if ":" in reach.host else "ip4"
