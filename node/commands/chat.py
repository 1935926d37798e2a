"""`llmnode chat`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.node.chat import DEFAULT_LENGTH, DEFAULT_NEW_TOKENS, DEFAULT_TEMPERATURE
from llmnode.node.commands.options import add_command, add_sampling, add_swarm, at_least_one, generation

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "chat",
        run,
        "talk with the model through the servers of a swarm",
        "  llmnode chat INVITE\n  llmnode chat --peers ADDRESS1 ADDRESS2\n"
        "  llmnode chat --peers ADDRESS1 ADDRESS2 --temperature 0\n"
        "  llmnode chat INVITE --only-peers 12D3KooW... 12D3KooW...  (ids, as `llmnode status --json` shows them)",
    )
    add_swarm(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"of one answer (default {DEFAULT_NEW_TOKENS}, or what is left of the dialogue)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of the dialogue (default {DEFAULT_LENGTH}, or the model's context if that is shorter)",
    )
    add_sampling(parser, f"tokens are drawn at {DEFAULT_TEMPERATURE:g}")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.chat import ChatConfig, chat

    wanted, length = generation(arguments), arguments.max_length
    config = ChatConfig(
        access=wanted.access,
        sampling=replace(wanted.sampling, otherwise=DEFAULT_TEMPERATURE),
        max_new_tokens=wanted.max_new_tokens or DEFAULT_NEW_TOKENS,
        max_length=None if length is None else at_least_one(length, "--max-length"),
    )
    chat(config)
    return 0
