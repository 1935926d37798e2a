"""`llmnode layout`: which blocks each machine of a cluster should serve, before it serves any."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmnode.core.placement.host_rows import MOST_BLOCKS
from llmnode.core.placement.machines import MOST_MACHINES, read_machines
from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.node import values
from llmnode.node.commands.fitted_table import FittedTable
from llmnode.node.commands.options import add_command, at_least_one
from llmnode.node.status_lines import Telling, terminal
from llmnode.node.terminal import open_console, show_json
from llmnode.node.text import counted

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from llmnode.core.placement.stages import Layout
    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "layout",
        run,
        "say which blocks each machine of your cluster should serve, for the most tokens a second of all sessions",
        "  llmnode layout machines.csv --model-blocks 80\n"
        "  llmnode layout machines.csv --model-blocks 80 --most-hops 8 --json\n\n"
        "machines.csv has a row for each machine, or several with different numbers of blocks:\n"
        "  host,blocks,tokens_per_s\n"
        "  big-1,20,310\n"
        "  small-1,8,95\n\n"
        "tokens_per_s is its speed with that number of blocks, as `llmnode speed --blocks 0:20` measures it there;\n"
        "the largest number in its rows is the most that it can hold. Give each machine its blocks by\n"
        "`llmnode serve --blocks START:END`. A swarm of strangers needs no layout: there `llmnode serve` finds them",
    )
    parser.add_argument(
        "machines", type=values.path, metavar="FILE", help=f"CSV with the machines, {MOST_MACHINES} at most"
    )
    parser.add_argument(
        "--model-blocks", type=int, required=True, metavar="N", help="the number of blocks of the whole model"
    )
    parser.add_argument(
        "--most-hops",
        type=int,
        metavar="N",
        help="the most machines on the shortest way through the model (default any number)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.core.placement.servers import most_throughput
    from llmnode.core.placement.stages import best_of, layouts

    blocks = at_least_one(arguments.model_blocks, "--model-blocks", MOST_BLOCKS)
    hops = math.inf if arguments.most_hops is None else at_least_one(arguments.most_hops, "--most-hops")
    machines = read_machines(arguments.machines, blocks)
    if (held := sum(len(each.speeds) for each in machines)) < blocks:
        raise ConfigError(
            f"{arguments.machines}: its machines hold {held} of {blocks} blocks together: add some, or have them hold"
            " more, as `llmnode serve --quant int8` does"
        )
    with Telling(terminal()) as telling:
        telling.tell(f"comparing layouts of {counted(len(machines), 'machine')}")
        best = best_of(blocks, layouts(blocks, machines), most_hops=hops)
    bound = most_throughput(blocks, machines)
    if arguments.json:
        show_json(_as_json(blocks, best, bound))
    else:
        console = open_console(stderr=False)
        console.print(FittedTable(_table(best)))
        console.print(_summary(blocks, best, bound), highlight=False)
    return 0


def _table(layout: Layout) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("host", no_wrap=True)
    table.add_column("--blocks", no_wrap=True, justify="right")
    table.add_column("tokens/s", no_wrap=True, justify="right")
    for each in layout:
        span = f"{each.span.start}:{each.span.end}"
        table.add_row(escape(printable(each.peer)), span, f"{each.speed:.1f}")
    return table


def _summary(blocks: int, layout: Layout, bound: float) -> str:
    from llmnode.core.placement.servers import throughput
    from llmnode.core.placement.stages import fewest_hops

    speed, hops = throughput(blocks, layout), int(fewest_hops(blocks, layout))
    return (
        f"together {speed:.1f} tokens/s of many sessions, {speed / bound:.0%} of the upper bound of all layouts;"
        f" one session passes {counted(hops, 'machine')} at least. Links are not counted."
    )


def _as_json(blocks: int, layout: Layout, bound: float) -> dict[str, Any]:  # Any: JSON
    from llmnode.core.placement.servers import throughput
    from llmnode.core.placement.stages import fewest_hops

    return {
        "tokens_per_s": throughput(blocks, layout),
        "bound_tokens_per_s": bound,
        "fewest_hops": int(fewest_hops(blocks, layout)),
        "machines": [
            {"host": each.peer, "blocks": [each.span.start, each.span.end], "tokens_per_s": each.speed}
            for each in layout
        ],
    }
