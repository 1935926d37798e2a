"""`llmnode status`: its options and its output. `node/asking.py` asks the swarm, `node/status.py` has the values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.node.commands.joining import FIND, add_mdns, add_peers, way_in
from llmnode.node.commands.options import add_command
from llmnode.node.commands.status_tables import (
    BESIDE_BAR,
    LEAST_BAR,
    figures_table,
    forecast_table,
    status_table,
    watch_table,
)
from llmnode.node.terminal import open_console, show_json, tell
from llmnode.node.watching import DOUBLE_FIX, UNREAD, UPDATE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.live import Live

    from llmnode.net.invite import Invite
    from llmnode.node.asking import Look
    from llmnode.node.commands.options import Commands
    from llmnode.node.forecasts import Forecasts
    from llmnode.node.status import ModelStatus

EVERY_S = 2.0
LEAST_EVERY_S, MOST_EVERY_S = 0.5, 3600.0
LEAST_LOOK_S = 5.0
"""A look of several waits this long for servers that do not answer, or longer: until the next look."""
NOBODY = "nobody serves anything: start with `llmnode serve`"


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        run,
        "show who serves which blocks, and which blocks nobody serves",
        "  llmnode status INVITE\n  llmnode status --peers ADDRESS\n  llmnode status --peers ADDRESS --json\n"
        "  llmnode status --watch               (what the servers do now, until Ctrl-C)\n"
        "  llmnode status --watch --every 10 --json\n"
        "  (exit status 1 if no model is served whole)",
    )
    add_peers(parser, "servers or relays to ask")
    add_mdns(parser, FIND)
    parser.add_argument("--watch", action="store_true", help="show what the servers do now, again and again")
    parser.add_argument("--every", type=float, metavar="S", help=f"seconds between two looks (default {EVERY_S:g})")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; with --watch one line a look")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.stopping import run_async

    every_s = EVERY_S if arguments.every is None else arguments.every
    if arguments.every is not None and not arguments.watch:
        raise ConfigError("--every goes with --watch")
    if not LEAST_EVERY_S <= every_s <= MOST_EVERY_S:  # NaN is neither
        raise ConfigError(f"--every takes {LEAST_EVERY_S:g} to {MOST_EVERY_S:g} seconds")
    if arguments.watch:
        run_async(_watch, way_in(arguments), every_s, arguments.json)
        return 0
    to = way_in(arguments)
    look, forecasts = run_async(_look_once, to)
    if arguments.json:
        _print_json(look, None, forecasts)
    else:
        _show(look.models, forecasts)
        if look.unread:
            tell(f"{UNREAD.format(look.unread)}, so servers may be missing; {UPDATE}")
    if look.clocks.is_ours:
        tell(f"{look.clocks.text}, so that servers may seem to be missing; {look.clocks.fix}")
    return 0 if any(not model.holes for model in look.models) else 1


async def _look_once(to: Invite) -> tuple[Look, Forecasts]:
    from llmnode.core.policy import LinkPolicy
    from llmnode.node.asking import look_at
    from llmnode.node.forecasts import read_forecasts
    from llmnode.swarm.join import join_swarm

    async with join_swarm(to.peers, LinkPolicy(), swarm_key=to.key, is_near=to.is_near) as (pool, swarm):
        return await look_at(pool, swarm), await read_forecasts(to.key)


async def _watch(to: Invite, every_s: float, as_lines: bool) -> None:
    """Look and show until a signal comes."""
    import trio
    from rich.live import Live

    from llmnode.core.policy import LinkPolicy
    from llmnode.node.asking import look_at
    from llmnode.node.forecasts import read_forecasts
    from llmnode.node.stopping import stopped_by_signals
    from llmnode.swarm.join import join_swarm

    console = open_console(stderr=False, highlight=False)
    is_live = console.is_terminal and not as_lines
    live = Live(console=console, auto_refresh=False) if is_live else None
    draw = _drawn_by(console, live)
    async with (
        stopped_by_signals(ends_by_ctrl_c=True),
        join_swarm(to.peers, LinkPolicy(), swarm_key=to.key, is_near=to.is_near) as found,
    ):
        before = None
        with live or nullcontext():
            while True:
                look = await look_at(*found, max(every_s, LEAST_LOOK_S))
                if as_lines:
                    _print_json(look, before, await read_forecasts(to.key))
                else:
                    draw(look, before)
                before = look
                await trio.sleep(every_s)


def _drawn_by(console: Console, live: Live | None) -> Callable[[Look, Look | None], None]:
    """Draws each look in the place of the one before, or, where stdout is no terminal, below it."""
    from rich.table import Table

    def draw(look: Look, before: Look | None) -> None:
        picture = Table.grid()
        for each in _now(look, before, max(LEAST_BAR, console.width - BESIDE_BAR)):
            picture.add_row(each)
        if live is None:
            console.print(picture)
        else:
            live.update(picture, refresh=True)

    return draw


def _now(look: Look, before: Look | None, bar_columns: int) -> Iterator[RenderableType]:
    from rich.text import Text

    from llmnode.node.commands.fitted_table import FittedTable

    earlier = {each.key: each for each in before.models} if before else {}
    for model in look.models:
        yield FittedTable(watch_table(model, earlier.get(model.key), bar_columns))
        yield _coverage(model)
        rate = model.whole_tokens_per_s(earlier.get(model.key))
        if rate is not None:
            yield Text(f"{rate:.1f} tokens/s through all blocks, prompts among them")
    if not look.models:
        yield Text(NOBODY)
    if look.unread:
        yield Text(f"{UNREAD.format(look.unread)}, so servers may be missing; {UPDATE}", style="yellow")


def _print_json(look: Look, before: Look | None, forecasts: Forecasts) -> None:
    from llmnode.node.status import as_json
    from llmnode.swarm.membership import wall_clock_ms

    show_json(as_json(look.models, look.unread, wall_clock_ms(), before.models if before else (), forecasts))


def _show(models: Sequence[ModelStatus], forecasts: Forecasts) -> None:
    from llmnode.node.commands.fitted_table import FittedTable
    from llmnode.swarm.membership import wall_clock_ms

    console = open_console(stderr=False, highlight=False)
    if not models:
        console.print(NOBODY)
    for model in models:
        console.print(FittedTable(status_table(model, max(LEAST_BAR, console.width - BESIDE_BAR))))
        for each in model.servers:
            if each.has_double:
                told = f"two nodes use the identity of peer {printable(each.peer)}, and one hides the other"
                console.print(f"{told}: {DOUBLE_FIX}", style="bold red", markup=False)
        if model.figures:
            console.print(FittedTable(figures_table(model.figures)))
        if (found := model.compared(forecasts)) is not None:
            at_ms, figures = found
            console.print(FittedTable(forecast_table(figures, (wall_clock_ms() - at_ms) / 1000)))
        console.print(_coverage(model))


def _coverage(model: ModelStatus) -> RenderableType:
    from rich.text import Text

    if model.holes:
        return Text(f"nobody serves blocks {', '.join(map(str, model.holes))}", style="bold red")
    return Text("every block is served", style="green")
