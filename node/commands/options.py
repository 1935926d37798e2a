"""The shared parts of commands: their declaration, groups of options, and checks that a parser cannot make."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from llmnode.core.model import AUTO, DTYPES, EXACT, KV_DTYPES, QUANTS, PrecisionWish
from llmnode.core.texts.log_lines import log_to
from llmnode.errors import ConfigError
from llmnode.machine.threads import usable_cores
from llmnode.node import values
from llmnode.node.commands.joining import FIND, add_mdns, add_peers, model_and_way_in, way_in
from llmnode.node.generate import DEFAULT_NEW_TOKENS
from llmnode.node.terminal import note, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.client.sampling import Sampling
    from llmnode.core.model import Precision
    from llmnode.core.policy import RoutePolicy
    from llmnode.node.app import NodeConfig
    from llmnode.node.connect_options import Access

    Commands = argparse._SubParsersAction["Parser"]

MODEL_HELP = (
    "a folder with safetensors, a GGUF file, or a model on the Hugging Face hub (org/name or org/name@revision; "
    "default: the embedded SmolLM2-135M-Instruct)"
)
MODEL_OR_INVITE_HELP = (
    f"{MODEL_HELP}; or an invite, the line of `llmnode invite` or `llmnode serve`, or a file with it: enough to join"
)
DEFAULT_PROMPT = "The three laws of thermodynamics are"
MOST = 1 << 40
"""A limit for counts: more than any machine has."""
MOST_THREADS = 1024


class Parser(argparse.ArgumentParser):
    """An error of the command line is a ConfigError, printed in one line like any other."""

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
    """Returns the group of --prompt, for options that replace it."""
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help=f"(default {DEFAULT_PROMPT!r})")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"(default {DEFAULT_NEW_TOKENS}, or fewer if the model's context ends before)",
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a prompt on stdout; the text goes to stderr"
    )
    return prompts


def add_kv_tokens(
    parser: Parser, default: int | None, otherwise: str = "default 32768"
) -> argparse._MutuallyExclusiveGroup:
    """Returns its group, for options that replace it."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--kv-tokens",
        type=int,
        default=default,
        metavar="N",
        help=f"positions that all sessions of a server may hold ({otherwise})",
    )
    return group


def add_blocks(parser: Parser) -> None:
    """MODEL and --blocks of a server."""
    parser.add_argument("model", nargs="?", type=values.model, metavar="MODEL|INVITE", help=MODEL_OR_INVITE_HELP)
    parser.add_argument(
        "--blocks",
        default="auto",
        metavar="BLOCKS",
        help="START:END, END excluded; or a number of blocks, chosen where the swarm needs them; "
        "or auto: as many as memory allows (default auto)",
    )


def add_worker(parser: Parser) -> None:
    """How a server computes its blocks, and how much KV it has."""
    add_kv_tokens(parser, None, "default 32768, or fewer if memory is short").add_argument(
        "--kv-memory",
        metavar="AMOUNT",
        help="the same as memory: 2GiB, or 20%% of the free memory; refused if there is less",
    )
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if any)"
    )
    parser.add_argument(
        "--kv-device",
        metavar="DEVICE",
        help="where keys and values are: cpu holds longer sessions than a GPU beside the blocks, but is slower, "
        "as they go there at every step (default: where the blocks are)",
    )
    add_precision(
        parser,
        "what the blocks are computed in: float32 is exact (default); auto takes a precision of the swarm: "
        "one that these blocks complete, else the one that gains most tokens/s; without a swarm, bfloat16 on a GPU "
        "of Ampere or later, and float32 elsewhere",
        "what their weights are rounded to, for a quarter (int8) or a seventh (nf4) of float32's memory: clients use "
        "such servers where none are exact; auto chooses as --dtype auto does; without a swarm, nf4 on a GPU, int8 "
        "on a CPU that is fast at it, and none on others and for a mixture of experts (default none)",
        "what keys and values are kept in: int8 takes about a quarter of float32's memory, and is lossy; auto "
        "chooses as --dtype auto does; without a swarm, same (default same: as --dtype)",
        EXACT,
    )
    parser.add_argument(
        "--worker",
        default="auto",
        choices=["auto", "thread", "process"],
        help="where the blocks are computed: in a process of its own, which may crash or run out of memory without the "
        "node (its sessions move on, and it is started again), or in a thread of the node (default: a process where it "
        "can be)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads (default: the cores that it may use)")


def worker_config(arguments: argparse.Namespace) -> NodeConfig:
    """Makes the settings of a node from the options of `add_blocks`, `add_worker` and `add_peers`, if it has these.

    Raises ConfigError.
    """
    from llmnode.node.app import NodeConfig

    model, found = model_and_way_in(arguments)
    return NodeConfig(
        model=model,
        swarm_key=found,
        blocks=arguments.blocks,
        kv_tokens=None if arguments.kv_tokens is None else at_least_one(arguments.kv_tokens, "--kv-tokens"),
        kv_memory=arguments.kv_memory,
        kv_dtype=arguments.kv_dtype,
        kv_device=arguments.kv_device,
        device=arguments.device,
        dtype=arguments.dtype,
        quant=arguments.quant,
        threads=threads(arguments),
        worker=arguments.worker,
    )


def add_swarm(parser: Parser) -> None:
    parser.add_argument("--model", type=values.model, metavar="NAME", help=MODEL_HELP)
    add_peers(parser, "servers or relays: one that knows the others is enough")
    add_mdns(parser, FIND)
    _add_chosen_peers(parser)
    add_precision(
        parser,
        "use only servers that compute in this: float32 is exact (default auto: exact if the swarm has it, else what "
        "most of its throughput is in)",
        "use only servers whose weights are rounded to this: none is exact (default auto, likewise)",
        "use only servers that keep keys and values in this: same, as --dtype, is exact (default auto, likewise)",
    )
    parser.add_argument(
        "--adapter",
        metavar="FOLDER|NAME",
        help="a LoRA adapter for the blocks: a folder that PEFT has saved, or one on the hub (org/name), which goes to "
        "the servers; or the name or the digest of one that they announce (see `llmnode adapters`)",
    )
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
        help="have this share of the results (such as 0.01) computed again by other servers, to find those that cheat "
        "(default 0; the checking servers see the hidden states too)",
    )
    parser.add_argument(
        "--relayed-prefill",
        default="wait",
        choices=["wait", "allow", "refuse"],
        help="a long prompt for a server that is reached through a relay: wait some seconds for a direct way, and then "
        "use the relay all the same (default), allow that at once, or refuse it",
    )


def _add_chosen_peers(parser: Parser) -> None:
    """--only-peers and --not-peers, for `_chosen_peers`."""
    for flag, what in (
        ("--only-peers", "use no servers but these: ids, as `llmnode status --json` shows them, or addresses with one"),
        ("--not-peers", "never use these servers, named likewise; they may still tell which others there are"),
    ):
        parser.add_argument(flag, nargs="+", default=[], type=values.peer, metavar="ID", help=what)


def _chosen_peers(arguments: argparse.Namespace) -> RoutePolicy:
    """From --only-peers and --not-peers. Raises ConfigError."""
    from llmnode.core.policy import RoutePolicy

    only, without = frozenset(arguments.only_peers), frozenset(arguments.not_peers)
    if named_twice := sorted(only & without):
        raise ConfigError(f"{named_twice[0]} is after --only-peers and after --not-peers: leave it out of one of them")
    return RoutePolicy(allowed=only or None, blocked=without)


def add_precision(parser: Parser, dtype: str, quant: str, kv_dtype: str, default: Precision | None = None) -> None:
    """--dtype, --quant and --kv-dtype, for `wish`. They are "auto" without a `default`. The texts are their help."""
    kinds = (("dtype", DTYPES, dtype), ("quant", QUANTS, quant), ("kv_dtype", KV_DTYPES, kv_dtype))
    for name, choices, text in kinds:
        of_default = AUTO if default is None else getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", default=of_default, choices=[AUTO, *choices], help=text)


def wish(arguments: argparse.Namespace) -> PrecisionWish:
    """From the options of `add_precision`."""
    return PrecisionWish.of(arguments.dtype, arguments.quant, arguments.kv_dtype)


def add_identity(parser: Parser) -> None:
    parser.add_argument(
        "--identity",
        type=values.path,
        metavar="FILE",
        help="keep the node's key there, made if missing: its peer id then lasts (default: a fresh one each time)",
    )


def add_listen(parser: Parser, default: str = "/ip4/127.0.0.1/tcp/0: this machine alone, any free port") -> None:
    parser.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help=f"where to listen, as /ip4/0.0.0.0/tcp/4001 or /ip6/::/tcp/4001; may be repeated (default {default})",
    )


def add_announce(parser: Parser) -> None:
    parser.add_argument(
        "--announce",
        action="append",
        metavar="MULTIADDR",
        help="where others reach this node, if not where it listens, as through a port forward or a proxy: "
        "/ip4/203.0.113.7/tcp/4001 or /dns/NAME/tcp/4001; may be repeated (default: where it listens)",
    )


def add_relay(parser: Parser, then: str = "they are announced, its own addresses only with --announce") -> None:
    parser.add_argument(
        "--relay",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="relays for a node behind a NAT, through which others reach it (`llmnode relay`, or any circuit relay v2 "
        f"that permits it); {then}",
    )


def add_sampling(parser: Parser, otherwise: str) -> None:
    """`otherwise`: how tokens are chosen if neither flags nor the model's generation config say it."""
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the likeliest tokens, more draws among them (default: the temperature, top_k, top_p and so on of "
        f"the model's generation_config.json if that has do_sample; else {otherwise})",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw one of the likeliest tokens that together have this probability (default: as the model's "
        "generation_config.json has it, else 0.9)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes a run repeatable")


def sampling(arguments: argparse.Namespace) -> Sampling:
    """Reads the options of `add_sampling`. Raises ConfigError."""
    from llmnode.client.sampling import Sampling

    return Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)


def new_tokens(arguments: argparse.Namespace) -> int | None:
    """--max-new-tokens, None without the option. Raises ConfigError."""
    return None if arguments.max_new_tokens is None else at_least_one(arguments.max_new_tokens, "--max-new-tokens")


def log_to_stderr(level: int = logging.INFO, form: str = "%(asctime)s %(message)s") -> None:
    """Logs of our own modules: by default those that operators need (--verbose)."""
    log_to(_Told(), level, form)


class _Told(logging.Handler):
    """Each record is a line of ours on stderr, whatever that is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line, _, trace = self.format(record).partition("\n")
            tell(line)
            if trace:  # of a bug, for its report
                note(trace)
        except Exception:  # noqa: BLE001 - as every handler: logging must not end what logs
            self.handleError(record)


def threads(arguments: argparse.Namespace) -> int | None:
    """--threads, None for torch's own choice. Warns of more than there are cores. Raises ConfigError."""
    if arguments.threads is None:
        return None
    asked, cores = at_least_one(arguments.threads, "--threads", MOST_THREADS), usable_cores()
    if asked > cores:
        tell(
            f"warning: --threads {asked} is more than the cores that this process may use ({cores}), "
            f"so that each forward takes longer: give at most {cores}, or leave it out"
        )
    return asked


def access(arguments: argparse.Namespace) -> Access:
    """Reads the options of `add_swarm`. Raises ConfigError."""
    from llmnode.node.connect_options import Access

    found = way_in(arguments)
    if not 0 <= arguments.spot_check <= 1:
        raise ConfigError(f"--spot-check {arguments.spot_check:g}: give a share from 0 to 1")
    return Access(
        model=arguments.model or found.hub_model,
        way_in=found,
        codec=arguments.codec,
        precision=wish(arguments),
        route=_chosen_peers(arguments),
        spot_check=arguments.spot_check,
        relayed_prefill=arguments.relayed_prefill,
        adapter=arguments.adapter,
    )


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The options that `generate` and `chat` share. Without `max_new_tokens` each has a default of its own."""

    access: Access
    sampling: Sampling
    max_new_tokens: int | None


def generation(arguments: argparse.Namespace) -> GenerationOptions:
    """Reads the options of `add_swarm`, `add_sampling` and --max-new-tokens. Raises ConfigError."""
    return GenerationOptions(access(arguments), sampling(arguments), new_tokens(arguments))


def at_least_one(value: int, flag: str, most: int = MOST) -> int:
    """Raises ConfigError."""
    if value < 1:
        raise ConfigError(f"{flag} {value}: give at least 1")
    if value > most:
        raise ConfigError(f"{flag} {value}: give at most {most}")
    return value
