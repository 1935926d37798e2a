"""`llmnode adapters`: the adapters that servers announce, by model, those that the hub has for a base, and commits.

`core/served_adapters.py` finds one by its name.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from llmnode.core.hub_names import ADAPTER_TAG, HUB, split_hub_name
from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.node.commands.joining import FIND, add_mdns, add_peers, way_in
from llmnode.node.commands.options import add_command
from llmnode.node.terminal import open_console, show_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from rich.table import Table

    from llmnode.core.announcement import Announcement
    from llmnode.core.served_adapters import ServedAdapter
    from llmnode.models.sources.hub_list import HubAdapter, HubVersion
    from llmnode.net.invite import Invite
    from llmnode.node.commands.options import Commands

T = TypeVar("T")
MOST_SHOWN = 200
"""Peers may announce any number. The table names this many; `--json` has all that the view has.

The hub is asked for this many, and lists the most downloaded ones.
"""
_SHORT = 12
"""The digits of a commit that a table shows."""
_HUB_DEADLINE_S = 15.0
"""huggingface_hub tries six times, and waits between for 23 s together."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "adapters",
        run,
        "show the LoRA adapters that servers announce, and those of the Hugging Face hub, for `--adapter` of chat and "
        "generate",
        "  llmnode adapters INVITE\n  llmnode adapters --peers ADDRESS --json\n"
        "  llmnode adapters --hub ORG/NAME                  (what the hub has for this base; asks no swarm)\n"
        "  llmnode adapters INVITE --hub ORG/NAME --json    (both)\n"
        "  llmnode adapters --versions ORG/ADAPTER          (the commits of one adapter on the hub)\n"
        "  (names, ranks and blocks are the word of the servers that announce them, and of authors on the hub)",
    )
    add_peers(parser, "servers or relays to ask")
    add_mdns(parser, FIND)
    parser.add_argument(
        "--hub",
        metavar="ORG/NAME",
        help=f"list the adapters that the Hugging Face hub has for this base model, with their newest commits; the "
        f"{MOST_SHOWN} most downloaded ones. The swarm is then asked only if peers, an invite or --mdns are given",
    )
    parser.add_argument(
        "--versions",
        metavar="ORG/ADAPTER",
        help=f"list the commits of this adapter on the Hugging Face hub, the {MOST_SHOWN} newest ones. The swarm is "
        "then asked as with --hub",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.core.served_adapters import served_adapters
    from llmnode.core.view import online
    from llmnode.node.stopping import run_async

    base = None if arguments.hub is None else _on_hub(arguments.hub, "--hub")
    adapter = None if arguments.versions is None else _on_hub(arguments.versions, "--versions")
    found = on_hub = versions = None
    if (
        (base is None and adapter is None)
        or arguments.invite
        or arguments.peers
        or arguments.swarm_key
        or arguments.mdns
    ):
        found = served_adapters(online(run_async(_ask, way_in(arguments))))
    if base is not None:
        on_hub = run_async(_ask_hub, base)
    if adapter is not None:
        versions = run_async(_ask_versions, adapter)
    if arguments.json:
        of_swarm = {} if found is None else {"adapters": [_json(each) for each in found]}
        of_hub = {} if on_hub is None else {"hub": {"base": base, "adapters": [asdict(each) for each in on_hub]}}
        of_adapter = {} if versions is None else {"versions": {"adapter": adapter, "commits": [*map(asdict, versions)]}}
        show_json(of_swarm | of_hub | of_adapter)
        return 0
    if found is not None:
        _show(found)
    if base is not None and on_hub is not None:
        _show_hub(base, on_hub)
    if adapter is not None and versions is not None:
        _show_versions(adapter, versions)
    return 0


def _on_hub(text: str, option: str) -> str:
    """The name of a model on the hub. Raises ConfigError."""
    name = split_hub_name(text.removeprefix(HUB))
    if name is None:
        raise ConfigError(f"{option} {text!r} is no name of a model on the hub: give ORG/NAME")
    if name.revision is not None:
        raise ConfigError(f"the hub is asked for a name without a revision: give {option} {name.repo}")
    return name.repo


async def _ask_hub(base: str) -> Sequence[HubAdapter]:
    from llmnode.models.sources.hub_list import adapters_on_hub

    return await _in_time(lambda: adapters_on_hub(base, MOST_SHOWN))


async def _ask_versions(adapter: str) -> Sequence[HubVersion]:
    from llmnode.models.sources.hub_list import versions_on_hub

    return await _in_time(lambda: versions_on_hub(adapter, MOST_SHOWN))


async def _in_time(ask: Callable[[], Sequence[T]]) -> Sequence[T]:
    import trio
    from huggingface_hub import constants

    with trio.move_on_after(_HUB_DEADLINE_S):
        return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
    raise ConfigError(
        f"{constants.ENDPOINT} has not listed adapters within {_HUB_DEADLINE_S:g} s: check the network, and run again"
    )


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
    console.print("The servers claim this. A client with the adapter's folder checks the digest itself.")


def _show_hub(base: str, found: Sequence[HubAdapter]) -> None:
    from huggingface_hub import constants
    from rich.markup import escape

    console = open_console(stderr=False, highlight=False)
    if not found:
        console.print(escape(f"the hub has no adapter whose card names {base} as its base"))
        return
    table = _columns("adapter", "commit", "updated", "downloads", "task", "base's commit", whole="adapter")
    for each in found:
        commits = (each.revision[:_SHORT], each.base_revision[:_SHORT])
        values = (each.name, commits[0], each.updated, str(each.downloads), each.task, commits[1])
        table.add_row(*(escape(printable(value)) for value in values))
    console.print(table)
    if len(found) == MOST_SHOWN:
        console.print(escape(f"there may be more: {constants.ENDPOINT}/models?other={ADAPTER_TAG}{base}"))
    console.print(
        "Their authors claim this. `--adapter ORG/NAME` reads and checks one: servers compute plain LoRA. "
        "ORG/NAME@COMMIT is one version of it; --json has whole commits."
    )


def _show_versions(adapter: str, versions: Sequence[HubVersion]) -> None:
    from rich.markup import escape

    table = _columns("commit", "made", "title", whole="commit")
    for each in versions:
        table.add_row(*(escape(printable(value)) for value in (each.revision, each.made, each.title)))
    console = open_console(stderr=False, highlight=False)
    console.print(table)
    console.print(escape(f"`--adapter {adapter}@COMMIT` uses one of them. Titles are the word of their authors."))


def _table(found: Sequence[ServedAdapter]) -> Table:
    from rich.markup import escape

    table = _columns("adapter", "rank", "base", "dtype", "blocks", "servers", "digest", whole="digest")
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


def _columns(*names: str, whole: str) -> Table:
    """A table with these columns. Values of the column `whole`, which users copy, are never cut."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold" if name == whole else "ellipsis")
    return table
