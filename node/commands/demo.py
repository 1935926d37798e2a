"""`llmnode demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.node.commands.options import add_command, add_generation, at_least_one, new_tokens, threads

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "demo",
        run,
        "start a private swarm on this machine and generate text through it",
        '  llmnode demo\n  llmnode demo --servers 5 --prompt "Once upon a time" --max-new-tokens 40\n'
        '  llmnode demo --chat --prompt "Why is the sky blue?" --json',
    )
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="server processes to start (default 3)")
    add_generation(parser)
    parser.add_argument(
        "--threads", type=int, metavar="N", help="torch threads of each process (default: the cores that it may use)"
    )


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.demo import DemoConfig, demo
    from llmnode.node.stopping import run_async

    config = DemoConfig(
        servers=at_least_one(arguments.servers, "--servers"),
        prompt=arguments.prompt,
        max_new_tokens=new_tokens(arguments),
        chat=arguments.chat,
        json=arguments.json,
        threads=threads(arguments),
    )
    run_async(demo, config)
    return 0
