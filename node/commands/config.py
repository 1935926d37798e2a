"""`llmnode config`: the value of every option without a command line, and its origin."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.machine.cache_folder import cache_folder
from llmnode.node.commands.options import add_command
from llmnode.node.settings import FILE_VARIABLE, NO_OPTIONS, settings_path, variable_of
from llmnode.node.terminal import show, show_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from llmnode.node.commands.options import Commands
    from llmnode.node.settings import Setting


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "config",
        run,
        "show what every option is without the command line, and where that comes from",
        "  llmnode config\n  llmnode config serve --json\n\n"
        "where an option comes from, the first that there is:\n"
        "  the command line  --kv-tokens 4096, --peers A B, --json; --no-json undoes what is set below\n"
        "  the environment   LLMNODE_KV_TOKENS=4096, LLMNODE_PEERS='A B', LLMNODE_JSON=true\n"
        "  the file          kv-tokens = 4096, peers = ['A', 'B'], json = true: for every command that has it,\n"
        "                    and below [serve] for that command\n"
        f"the file is the one that {FILE_VARIABLE} names, else ~/.config/llmnode/config.toml",
    )
    # Not "?": that could be set in the file.
    parser.add_argument("of", nargs="*", metavar="COMMAND", help="(default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    settings: dict[str, dict[str, Setting]] = arguments.settings
    for command in arguments.of:
        if command not in settings:
            raise ConfigError(f"there is no command {command!r}: choose from {', '.join(settings)}")
    shown = {command: settings[command] for command in arguments.of or settings}
    path = settings_path(os.environ)
    known = NO_OPTIONS | {variable_of(name) for of in settings.values() for name in of}
    unknown = sorted(name for name in os.environ if name.startswith("LLMNODE_") and name not in known)
    if arguments.json:
        answer = {
            "file": {"path": str(path), "exists": path.exists()},
            "cache": str(cache_folder()),
            "commands": {command: _as_json(of) for command, of in shown.items()},
            "unknown_variables": unknown,
        }
        show_json(answer, default=str)
        return 0
    show(printable(f"file   {path}{'' if path.exists() else ' (not there)'}"))
    show(printable(f"cache  {cache_folder()}"))
    for command, of in shown.items():
        show(f"\n{command}")
        show("\n".join(map(printable, _lines(of) or ["  (nothing that can be set)"])))
    for variable in unknown:
        show(f"\n{printable(f'warning: no option is set by {variable}')}")
    return 0


def _as_json(of: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:  # Any: values of all types
    return {
        name: {"value": _concealed(setting.value), "source": setting.source, "place": setting.place or None}
        for name, setting in of.items()
    }


def _lines(of: Mapping[str, Setting]) -> list[str]:
    rows = [
        (name, _text(_concealed(setting.value)), f"{setting.source} {setting.place}".strip())
        for name, setting in of.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [f"  {name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows]


def _concealed(value: Any) -> Any:
    """An invite is a secret."""
    from llmnode.net.invite import INVITE

    return f"{INVITE}..." if isinstance(value, str) and value.startswith(INVITE) else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
