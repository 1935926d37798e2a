"""`llmnode adapters`: the adapters that servers announce, by model. `core/served_adapters.py` finds one by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable
from llmnode.node.commands.joining import FIND, add_mdns, add_peers, way_in
from llmnode.node.commands.options import add_command
from llmnode.node.terminal import open_console, show_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from rich.table import Table

    from llmnode.core.announcement import Announcement
    from llmnode.core.served_adapters import ServedAdapter
    from llmnode.net.invite import Invite
    from llmnode.node.commands.options import Commands

MOST_SHOWN = 200
"""Peers may announce any number. The table names this many; `--json` has all that the view has."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "adapters",
        run,
        "show the LoRA adapters that servers announce, for `--adapter` of chat and generate",
        "  llmnode adapters INVITE\n  llmnode adapters --peers ADDRESS --json\n"
        "  (their names, ranks and blocks are the word of the servers that announce them)",
    )
    add_peers(parser, "servers or relays to ask")
    add_mdns(parser, FIND)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.core.served_adapters import served_adapters
    from llmnode.core.view import online
    from llmnode.node.stopping import run_async

    found = served_adapters(online(run_async(_ask, way_in(arguments))))
    if arguments.json:
        show_json({"adapters": [_json(each) for each in found]})
    else:
        _show(found)
    return 0


async def _ask(to: Invite) -> Sequence[Announcement]:
    from llmnode.core.policy import LinkPolicy
    from llmnode.swarm.join import join_swarm

    async with join_swarm(to.peers, LinkPolicy(), swarm_key=to.key, is_near=to.is_near) as (_, swarm):
        return swarm.view.announcements()


def _json(each: ServedAdapter) -> dict[str, Any]:  # Any: JSON
    return {
        "name": each.adapter.name,
        "digest": each.adapter.digest.hex(),
        "rank": each.adapter.rank,
        "base": each.servers[0].offer.model,
        "base_digest": each.profile.model_digest.hex(),
        "dtype": each.profile.precision.name,
        "holes": [[hole.start, hole.end] for hole in each.missing],
        "announced_by": [server.peer for server in each.servers],
    }


def _show(found: Sequence[ServedAdapter]) -> None:
    console = open_console(stderr=False, highlight=False)
    if not found:
        console.print("no server announces an adapter: start one with `llmnode serve --adapters FOLDER`")
        return
    console.print(_table(found[:MOST_SHOWN]))
    if len(found) > MOST_SHOWN:
        console.print(f"and {len(found) - MOST_SHOWN} more: see --json")
    console.print("This is the word of the servers. A client with the adapter's folder checks the digest itself.")


def _table(found: Sequence[ServedAdapter]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("adapter", "rank", "base", "dtype", "blocks", "servers", "digest"):
        table.add_column(column, overflow="fold" if column == "digest" else "ellipsis")
    for each in found:
        holes = ", ".join(str(hole) for hole in each.missing)
        values = (
            each.adapter.name,
            str(each.adapter.rank),
            each.servers[0].offer.model,
            each.profile.precision.name,
            f"not {holes}" if holes else "all",
            str(len(each.servers)),
            each.adapter.digest.hex(),
        )
        table.add_row(*(escape(printable(value)) for value in values))
    return table
