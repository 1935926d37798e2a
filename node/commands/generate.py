"""`llmnode generate`."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node.commands import options
from llmnode.node.commands.options import add_command, add_generation, add_sampling, add_swarm, at_least_one
from llmnode.node.values import path

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        run,
        "generate text through the servers of a swarm",
        '  llmnode generate INVITE --prompt "Once upon a time"\n'
        '  llmnode generate --peers ADDRESS1 ADDRESS2 --prompt "Once upon a time"\n'
        "  llmnode generate --peers ADDRESS1 ADDRESS2 --prompts FILE --samples 4 --temperature 0.8 --seed 1 --json\n"
        "  llmnode generate INVITE --not-peers 12D3KooW...  (an id, as `llmnode status --json` shows it)\n"
        "  (ADDRESS: as `llmnode serve` prints it, /ip4/.../tcp/.../p2p/...)",
    )
    add_swarm(parser)
    prompts = add_generation(parser)
    prompts.add_argument(
        "--prompts",
        type=path,
        metavar="FILE",
        help="a file of prompts, one a line, instead of --prompt; - is stdin. In UTF-8, or UTF-16 with a byte order "
        "mark; a line ends at LF, CRLF or CR alone",
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts for each prompt (default 1)")
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help="texts that are under way together: while one server computes for one, another does for the next "
        "(default: 4 for each server that a text goes through)",
    )
    parser.add_argument(
        "--receipts", type=path, metavar="FILE", help="write what the servers signed for, for `llmnode verify FILE`"
    )
    add_sampling(parser, "the likeliest tokens")


def _writable(file: Path) -> Path:
    """Raises ConfigError now rather than when all is generated. Nothing is left where nothing was."""
    was_there = os.path.lexists(file)
    try:
        if file.is_file() or not was_there:
            with file.open("ab"):
                pass
        elif file.is_dir():
            raise IsADirectoryError(None, "Is a directory")
    except OSError as error:
        fix = "name another file" if file.parent.is_dir() else f"make the folder {file.parent}, or name another file"
        raise ConfigError(f"--receipts {file}: cannot be written ({error.strerror}): {fix}") from error
    if not was_there:
        with suppress(OSError):
            file.unlink()
    return file


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.generate import MOST_TEXTS, GenerateConfig, Prompt, generate, read_prompts

    samples = at_least_one(arguments.samples, "--samples", MOST_TEXTS)
    if arguments.receipts and (arguments.prompts or samples > 1):
        raise ConfigError("--receipts is of one session: give --prompt, not --prompts, and no --samples")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else [Prompt(arguments.prompt, "--prompt")]
    if (texts := len(prompts) * samples) > MOST_TEXTS:
        raise ConfigError(f"{texts} texts are asked for, of at most {MOST_TEXTS}: give fewer prompts or --samples")
    wanted, at_once = options.generation(arguments), arguments.at_once
    config = GenerateConfig(
        access=wanted.access,
        prompts=prompts,
        sampling=wanted.sampling,
        max_new_tokens=wanted.max_new_tokens,
        chat=arguments.chat,
        json=arguments.json,
        samples=samples,
        at_once=None if at_once is None else at_least_one(at_once, "--at-once", options.MOST_THREADS),
        receipts=_writable(arguments.receipts) if arguments.receipts else None,
    )
    generate(config)
    return 0
