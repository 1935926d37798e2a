"""`llmnode chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.node.commands.options import (
    access,
    add_command,
    add_sampling,
    add_swarm,
    at_least_one,
    sampling,
)

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "chat",
        run,
        "talk with the model through the servers at given addresses",
        "  llmnode chat --peers ADDRESS1 ADDRESS2\n  llmnode chat --peers ADDRESS1 ADDRESS2 --temperature 0",
    )
    add_swarm(parser)
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of one answer (default 512)")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="of the dialogue (default 4096)")
    add_sampling(parser, temperature=0.7)


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.chat import ChatConfig, chat

    config = ChatConfig(
        access=access(arguments),
        sampling=sampling(arguments),
        max_length=at_least_one(arguments.max_length, "--max-length"),
    )
    chat(config)
    return 0
