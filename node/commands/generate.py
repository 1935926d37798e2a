"""`llmnode generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.node.commands.options import (
    access,
    add_command,
    add_generation,
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
        "generate",
        run,
        "generate text through the servers at given addresses",
        '  llmnode generate --peers ADDRESS1 ADDRESS2 --prompt "Once upon a time"\n'
        "  llmnode generate --peers ADDRESS1 ADDRESS2 --prompts FILE --samples 4 --temperature 0.8 --seed 1 --json\n"
        "  (ADDRESS: as `llmnode serve` prints it, /ip4/.../tcp/.../p2p/...)",
    )
    add_swarm(parser)
    prompts = add_generation(parser)
    prompts.add_argument("--prompts", metavar="FILE", help="a file of prompts, one a line, instead of --prompt")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts for each prompt (default 1)")
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help="texts that are under way together: while one server computes for one, another does for the next "
        "(default: 4 for each server that a text goes through)",
    )
    parser.add_argument(
        "--receipts", type=Path, metavar="FILE", help="write what the servers signed for, for `llmnode verify FILE`"
    )
    add_sampling(parser, temperature=0.0)


def _writable(path: Path) -> Path:
    """Raises ConfigError now rather than when all is generated."""
    from llmnode.errors import ConfigError

    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"--receipts {path}: cannot be written ({error.strerror})") from error
    return path


def run(arguments: argparse.Namespace) -> int:
    from llmnode.errors import ConfigError
    from llmnode.node.generate import GenerateConfig, Prompt, generate, read_prompts

    samples = at_least_one(arguments.samples, "--samples")
    if arguments.receipts and (arguments.prompts or samples > 1):
        raise ConfigError("--receipts is of one session: give --prompt, not --prompts, and no --samples")
    if samples > 1 and not arguments.temperature:
        raise ConfigError(f"--samples {samples} would all be the same: give a --temperature, as 0.8, too")
    config = GenerateConfig(
        access=access(arguments),
        prompts=read_prompts(arguments.prompts) if arguments.prompts else [Prompt(arguments.prompt, "--prompt")],
        sampling=sampling(arguments),
        chat=arguments.chat,
        json=arguments.json,
        samples=samples,
        at_once=None if arguments.at_once is None else at_least_one(arguments.at_once, "--at-once"),
        receipts=_writable(arguments.receipts) if arguments.receipts else None,
    )
    generate(config)
    return 0
