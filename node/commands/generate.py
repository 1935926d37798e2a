"""`llmnode generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.node.commands.options import add_command, add_generation, add_sampling, add_swarm, check_peers, sampling

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        run,
        "generate text through the servers at given addresses",
        '  llmnode generate --peers ADDRESS1 ADDRESS2 --prompt "Once upon a time"\n'
        "  llmnode generate --peers ADDRESS1 ADDRESS2 --prompts FILE --temperature 0.8 --seed 1 --json\n"
        "  (ADDRESS: as `llmnode serve` prints it, /ip4/.../tcp/.../p2p/...)",
    )
    add_swarm(parser)
    prompts = add_generation(parser)
    prompts.add_argument("--prompts", metavar="FILE", help="a file of prompts, one a line, instead of --prompt")
    add_sampling(parser, temperature=0.0)


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.generate import GenerateConfig, generate, read_prompts

    check_peers(arguments.peers)
    config = GenerateConfig(
        model=arguments.model,
        peers=arguments.peers,
        codec=arguments.codec,
        dtype=arguments.dtype,
        prompts=read_prompts(arguments.prompts) if arguments.prompts else [arguments.prompt],
        sampling=sampling(arguments),
        chat=arguments.chat,
        json=arguments.json,
    )
    generate(config)
    return 0
