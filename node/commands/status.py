"""`llmnode status`: its options, its questions to the swarm, and its tables. The values are in `node/status.py`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable
from llmnode.node.commands.joining import FIND, add_mdns, add_peers, way_in
from llmnode.node.commands.options import add_command
from llmnode.node.terminal import open_console, show_json, tell
from llmnode.node.watching import DOUBLE_FIX, UNREAD, UPDATE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.peers.clocks import ClockVerdict
    from llmnode.core.server_figures import ServerFigures
    from llmnode.net.invite import Invite
    from llmnode.node.commands.options import Commands
    from llmnode.node.status import ModelStatus, ServerReport

BESIDE_BAR = 76
"""Columns of the terminal that the rest of a row takes."""
LEAST_BAR = 4
MIB = 1 << 20
ASKED_AT_ONCE = 32
ASKED_FOR_S = 12.0
STYLES = {"online": "green", "joining": "yellow"}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        run,
        "show who serves which blocks, and which blocks nobody serves",
        "  llmnode status INVITE\n  llmnode status --peers ADDRESS\n  llmnode status --peers ADDRESS --json\n"
        "  (exit status 1 if no model is served whole)",
    )
    add_peers(parser, "servers or relays to ask")
    add_mdns(parser, FIND)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.status import as_json, by_model
    from llmnode.node.stopping import run_async
    from llmnode.swarm.membership import wall_clock_ms

    announcements, answers, clocks, unread = run_async(_ask, way_in(arguments))
    models = by_model(announcements, answers)
    if arguments.json:
        show_json(as_json(models, unread, wall_clock_ms()))
    else:
        _show(models)
        if unread:
            tell(f"{UNREAD.format(unread)}, so servers may be missing; {UPDATE}")
    if clocks.is_ours:
        tell(f"{clocks.text}, so that servers may seem to be missing; {clocks.fix}")
    return 0 if any(not model.holes for model in models) else 1


async def _ask(to: Invite) -> tuple[list[Announcement], dict[PeerId, ServerReport], ClockVerdict, int]:
    """The announced servers, the answers of those that can be reached, clocks, and the count of unread ones.

    Address groups have turns, and there is a limit for all: strangers can announce any number of servers.
    """
    import random

    import trio

    from llmnode.core.address_groups import announced_group
    from llmnode.core.bounded_store import in_turn
    from llmnode.core.policy import LinkPolicy, RoutePolicy
    from llmnode.errors import ConfigError, PeerError
    from llmnode.node.status import ServerReport
    from llmnode.swarm.join import join_swarm
    from llmnode.wire.server_figures import figures_of

    answers: dict[PeerId, ServerReport] = {}
    timeout_s = RoutePolicy().connect_timeout_s

    async def describe(each: Announcement) -> None:
        with suppress(PeerError, ConfigError), trio.move_on_after(timeout_s):
            connection = await pool.connect(each.addresses)
            asked_s = trio.current_time()
            description = await connection.describe(timeout_s)
            round_trip_us = int((trio.current_time() - asked_s) * 1e6)
            figures = figures_of(description)
            answers[each.peer] = ServerReport(description, connection.relayed, round_trip_us, figures)

    async def describe_next(waiting: Iterator[Announcement]) -> None:
        for each in waiting:
            await describe(each)

    async with join_swarm(to.peers, LinkPolicy(), swarm_key=to.key, is_near=to.is_near) as (pool, swarm):
        announcements = swarm.view.announcements()
        known = {each.peer: each for each in announcements}
        groups = {each.peer: announced_group(each.addresses[0]) or "" for each in announcements if each.addresses}
        waiting = iter([known[peer] for peer in in_turn(groups, len(groups), random.Random())])
        with trio.move_on_after(ASKED_FOR_S):
            async with trio.open_nursery() as nursery:
                for _ in range(ASKED_AT_ONCE):
                    nursery.start_soon(describe_next, waiting)
        return announcements, answers, swarm.judge_clocks(), swarm.unread


def _show(models: Sequence[ModelStatus]) -> None:
    console = open_console(stderr=False, highlight=False)
    if not models:
        console.print("nobody serves anything: start with `llmnode serve`")
    for model in models:
        console.print(_table(model, max(LEAST_BAR, console.width - BESIDE_BAR)))
        for each in model.servers:
            if each.has_double:
                told = f"two nodes use the identity of peer {printable(each.peer)}, and one hides the other"
                console.print(f"{told}: {DOUBLE_FIX}", style="bold red", markup=False)
        if model.figures:
            console.print(_figures_table(model.figures))
        if model.holes:
            holes = ", ".join(str(hole) for hole in model.holes)
            console.print(f"nobody serves blocks {holes}", style="bold red", markup=False)
        else:
            console.print("[green]every block is served[/]")


def _work(answer: ServerReport | None) -> list[str]:
    """The last five columns: steps; the share that came straight from a server, and went to one; kB; link and RTT."""
    if answer is None:
        return ["", "", "", "[yellow]none[/]", ""]
    work = answer.description
    per_cent = 100 / max(work.steps, 1)
    given, pushed = work.steps_given_directly * per_cent, work.results_pushed * per_cent
    tokens = max(work.positions, 1)
    crossed = f"{work.received_bytes / tokens / 1000:.1f}/{work.sent_bytes / tokens / 1000:.1f}"
    link, rtt_ms = "relay" if answer.is_relayed else "direct", answer.round_trip_us / 1000
    return [
        str(work.steps),
        f"{given:.0f}/{pushed:.0f} %",
        crossed,
        link,
        f"{rtt_ms:.1f}" if rtt_ms < 10 else f"{rtt_ms:.0f}",
    ]


def _figures_table(figures: Mapping[PeerId, ServerFigures]) -> Table:
    """The predictions for servers, made when they had loaded their blocks, beside their measurements."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    names = ("sessions\nat once", "tokens/s\npredicted", "\nmeasured", "\noff", "MiB\npredicted", "\nmeasured", "\noff")
    table.add_column("peer", no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")
    for peer, each in figures.items():
        rates = (each.predicted_tokens_per_s, each.measured_tokens_per_s)
        sizes = (each.predicted_bytes / MIB, each.measured_bytes / MIB)
        table.add_row(
            escape(peer[-8:]),
            f"{each.sessions:.1f}",
            *(f"{rate:.1f}" if rate else "not yet" for rate in rates),
            _off(each.speed_error),
            *(f"{size:.0f}" if size else "-" for size in sizes),
            _off(each.memory_error),
        )
    return table


def _off(error: float | None) -> str:
    return "-" if error is None else f"{error:+.0%}"


def _table(model: ModelStatus, bar_columns: int) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from llmnode.node.status import bar

    title = escape(printable(f"{model.model}, {model.dtype}, {model.blocks} blocks"))
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    measured = ("ms per\nblock", "free\nKV", "steps", "direct\nin/out", "kB/token\nin/out", "link", "RTT\nms")
    for column in ("peer", "blocks", "", "state", *measured):
        table.add_column(column, no_wrap=True)
    for each in model.servers:
        offer, style = each.offer, STYLES.get(each.offer.state, "default")
        table.add_row(
            escape(each.peer[-8:]),
            escape(str(offer.span)),
            f"[{style}]{bar(offer.span, model.blocks, bar_columns)}[/]",
            f"[{style}]{offer.state}[/]",
            f"{offer.block_us / 1000:.2f}" if offer.block_us else "-",
            str(offer.kv_tokens_free),
            *_work(model.answers.get(each.peer)),
        )
    for hole in model.holes:
        table.add_row(
            "[red]nobody[/]", f"[red]{escape(str(hole))}[/]", f"[red]{bar(hole, model.blocks, bar_columns, '╳')}[/]"
        )
    return table
