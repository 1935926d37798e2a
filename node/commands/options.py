"""What several commands share: how one is declared, groups of options, and the checks that a parser cannot make."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.node.access import Access
    from llmnode.node.sampling import Sampling

    Commands = argparse._SubParsersAction["Parser"]

MODEL_HELP = (
    "a folder with safetensors, a GGUF file, or a model on the Hugging Face hub (org/name or org/name@revision; "
    "default: the embedded SmolLM2-135M-Instruct)"
)
DEFAULT_PROMPT = "The three laws of thermodynamics are"


class Parser(argparse.ArgumentParser):
    """Whatever is wrong on the command line is a ConfigError, told in one line like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str
) -> Parser:
    """The parser of a command, without its options. `run` returns the exit status."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_generation(parser: Parser) -> argparse._MutuallyExclusiveGroup:
    """Returns the group of --prompt, for what may be given instead."""
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help=f"(default {DEFAULT_PROMPT!r})")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a prompt on stdout; the text goes to stderr"
    )
    return prompts


def add_kv_tokens(parser: Parser) -> None:
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=32_768,
        metavar="N",
        help="positions that all sessions of a server may hold (default 32768)",
    )


def add_swarm(parser: Parser) -> None:
    parser.add_argument("--model", metavar="NAME", help=MODEL_HELP)
    parser.add_argument(
        "--peers",
        nargs="+",
        required=True,
        metavar="ADDRESS",
        help="servers or relays: one that knows the others is enough",
    )
    add_dtype(parser, "what servers must compute in: float32 is exact (default)")
    parser.add_argument(
        "--codec",
        default="raw",
        choices=["raw", "fp16", "bf16", "int8"],
        help="how hidden states cross the wire: raw is exact (default), the others are smaller and lossy",
    )
    parser.add_argument(
        "--spot-check",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="have such a share of what servers compute, as 0.01, computed again by others, to find those that cheat "
        "(default 0; who checks sees the hidden states too)",
    )


def add_dtype(parser: Parser, what: str) -> None:
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help=what)


def add_identity(parser: Parser) -> None:
    parser.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="keep the node's key there, made if missing: its peer id then lasts (default: a fresh one each time)",
    )


def add_listen(parser: Parser) -> None:
    parser.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="where to listen; may be repeated (default /ip4/127.0.0.1/tcp/0: this machine alone, any free port)",
    )


def add_announce(parser: Parser) -> None:
    parser.add_argument(
        "--announce",
        action="append",
        metavar="MULTIADDR",
        help="where others reach this node, if not where it listens, as through a port forward or a proxy: "
        "/ip4/203.0.113.7/tcp/4001 or /dns/NAME/tcp/4001; may be repeated (default: where it listens)",
    )


def add_sampling(parser: Parser, temperature: float) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 takes the likeliest (default {temperature})",
    )
    parser.add_argument("--top-p", type=float, default=0.9, metavar="P", help="of the likeliest tokens (default 0.9)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a run repeatable")


def sampling(arguments: argparse.Namespace) -> Sampling:
    """From the options of `add_sampling` and --max-new-tokens. Raises ConfigError."""
    from llmnode.node.sampling import Sampling

    if arguments.temperature < 0:
        raise ConfigError(f"--temperature {arguments.temperature:g}: give 0 or more")
    if not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p {arguments.top_p:g}: give more than 0 and at most 1")
    return Sampling(
        max_new_tokens=at_least_one(arguments.max_new_tokens, "--max-new-tokens"),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


def check_peers(peers: Sequence[str]) -> None:
    """A typing error is told before the seconds that loading takes. Raises ConfigError."""
    from llmnode.net.host import parse_peer

    for peer in peers:
        parse_peer(peer)


def log_to_stderr(level: int = logging.INFO, form: str = "%(asctime)s %(message)s") -> None:
    """Of our own modules: by default what operators need (--verbose)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form))
    ours = logging.getLogger("llmnode")
    ours.handlers = [handler]
    ours.setLevel(level)
    # py-libp2p calls `logging.debug`, which gives the root logger a handler if it has none: it would print ours again.
    logging.getLogger().addHandler(logging.NullHandler())


def threads(arguments: argparse.Namespace) -> int | None:
    """--threads, None for torch's own choice. Raises ConfigError."""
    return None if arguments.threads is None else at_least_one(arguments.threads, "--threads")


def access(arguments: argparse.Namespace) -> Access:
    """From the options of `add_swarm`. Raises ConfigError."""
    from llmnode.node.access import Access

    check_peers(arguments.peers)
    if not 0 <= arguments.spot_check <= 1:
        raise ConfigError(f"--spot-check {arguments.spot_check:g}: give a share from 0 to 1")
    return Access(
        model=arguments.model,
        peers=arguments.peers,
        codec=arguments.codec,
        dtype=arguments.dtype,
        spot_check=arguments.spot_check,
    )


def at_least_one(value: int, flag: str) -> int:
    """Raises ConfigError."""
    if value < 1:
        raise ConfigError(f"{flag} {value}: give at least 1")
    return value


def printable(text: str) -> str:
    """A peer's words may be in it: nothing of theirs may steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
