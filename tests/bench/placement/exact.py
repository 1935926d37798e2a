"""The best placement of a few servers, by an integer program that HiGHS solves to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.core.placement.servers import worthwhile_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.placement.servers import PlacedServer


def best_throughput(blocks: int, servers: Sequence[PlacedServer], limit_s: float = 60.0) -> float:
    """The throughput of the best placement. Raises RuntimeError if that is not proved in `limit_s`.

    Each server has one variable for each span that it could serve, and serves one. The throughput is at most the sum of
    speeds at every block.
    """
    import highspy  # its expressions have no types

    program = highspy.Highs()  # type: ignore[no-untyped-call]
    program.silent()
    program.setOptionValue("time_limit", limit_s)
    program.setOptionValue("mip_rel_gap", 1e-6)
    throughput = program.addVariable(lb=0.0)
    at_block: list[list[Any]] = [[] for _ in range(blocks)]
    for server in servers:
        choices = []
        for length in worthwhile_lengths(server.speeds):
            for start in range(blocks - length + 1):
                serves = program.addBinary()
                choices.append(serves)
                for block in range(start, start + length):
                    at_block[block].append(server.speeds[length - 1] * serves)
        program.addConstr(sum(choices) == 1)
    for terms in at_block:
        program.addConstr(sum(terms) >= throughput)
    program.maximize(throughput)
    if program.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS has no optimum in {limit_s:g} s: {program.getModelStatus()}")
    return float(program.val(throughput))
