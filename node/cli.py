"""The command line: what each command takes, and how an error ends it. What a command does is in its own module."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from llmnode.errors import ConfigError, LlmnodeError
from llmnode.models.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.node.sampling import Sampling

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

MODEL_HELP = "a folder with a model in safetensors (default: the embedded SmolLM2-135M-Instruct)"
DEFAULT_PROMPT = "The three laws of thermodynamics are"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 (it failed), 2 (the user can fix it) or 130 (Ctrl-C)."""
    _settle_libraries()
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        return _fail(error, EXIT_CONFIG)
    except LlmnodeError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # `llmnode ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter closes it on its way out
        return EXIT_FAILED


def run() -> NoReturn:
    """The program's entry point: `main`, then the end of the process at once.

    What torch does on its way out takes a second, and everything that must be closed has been.
    """
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _settle_libraries() -> None:
    """Defaults for libraries that read the environment as they are imported; what the user has set stays."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must sleep, not spin: several nodes share a machine's cores
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "torchinductor"),  # else a folder in /tmp, left behind
        "TQDM_DISABLE": "1",  # libraries' own progress bars would tear ours
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger().setLevel(logging.CRITICAL)  # libp2p logs to the root; this is the program's own process


def _fail(error: LlmnodeError | str, status: int) -> int:
    # A peer's words may be in it: nothing of theirs may steer the terminal.
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(error))
    print(f"llmnode: {shown}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmnode",
        description="Run language models together: serve a span of a model, or generate through others' spans.",
    )
    parser.add_argument("--version", action="version", version=f"llmnode {importlib.metadata.version('llmnode')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_demo, _add_serve, _add_generate, _add_chat, _add_bench):
        add(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "demo",
        "start a private swarm on this machine and generate text through it",
        '  llmnode demo\n  llmnode demo --servers 5 --prompt "Once upon a time" --max-new-tokens 40\n'
        '  llmnode demo --chat --prompt "Why is the sky blue?" --json',
    )
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="server processes to start (default 3)")
    _add_generation(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads of each process (default: torch's)")
    parser.set_defaults(run=_run_demo)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "serve",
        "serve a span of the model's blocks until stopped",
        "  llmnode serve --blocks 0:15 --listen /ip4/127.0.0.1/tcp/4001\n  llmnode serve --blocks 15:30 --json",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--blocks", required=True, metavar="START:END", help="the blocks to serve, END excluded")
    parser.add_argument(
        "--listen",
        action="append",
        metavar="MULTIADDR",
        help="where to listen; may be repeated (default /ip4/127.0.0.1/tcp/0: this machine alone, any free port)",
    )
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=32_768,
        metavar="N",
        help="positions that all sessions may hold (default 32768)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads (default: torch's)")
    parser.add_argument("--verbose", action="store_true", help="say on stderr which links open and end, and why")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="stop when stdin ends, as a child of a program"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, for programs; the ready one has the address"
    )
    parser.set_defaults(run=_run_serve)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "generate",
        "generate text through the servers at given addresses",
        '  llmnode generate --peers ADDRESS1 ADDRESS2 --prompt "Once upon a time"\n'
        "  llmnode generate --peers ADDRESS1 ADDRESS2 --prompts FILE --temperature 0.8 --seed 1 --json\n"
        "  (ADDRESS: as `llmnode serve` prints it, /ip4/.../tcp/.../p2p/...)",
    )
    _add_swarm(parser)
    _add_generation(parser)
    parser.add_argument("--prompts", metavar="FILE", help="a file of prompts, one a line, instead of --prompt")
    _add_sampling(parser, temperature=0.0)
    parser.set_defaults(run=_run_generate)


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "chat",
        "talk with the model through the servers at given addresses",
        "  llmnode chat --peers ADDRESS1 ADDRESS2\n  llmnode chat --peers ADDRESS1 ADDRESS2 --temperature 0",
    )
    _add_swarm(parser)
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of one answer (default 512)")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="of the dialogue (default 4096)")
    _add_sampling(parser, temperature=0.7)
    parser.set_defaults(run=_run_chat)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help=f"(default {DEFAULT_PROMPT!r})")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a prompt on stdout; the text goes to stderr"
    )


def _add_swarm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help=MODEL_HELP)
    parser.add_argument(
        "--peers", nargs="+", required=True, metavar="ADDRESS", help="servers that hold all blocks together"
    )
    parser.add_argument(
        "--codec",
        default="raw",
        choices=["raw", "fp16", "bf16", "int8"],
        help="how hidden states cross the wire: raw is exact (default), the others are smaller and lossy",
    )


def _add_sampling(parser: argparse.ArgumentParser, temperature: float) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 takes the likeliest (default {temperature})",
    )
    parser.add_argument("--top-p", type=float, default=0.9, metavar="P", help="of the likeliest tokens (default 0.9)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes a run repeatable")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "bench",
        "measure this machine's swarm against what runs beside it",
        "  llmnode bench swarm\n  llmnode bench swarm --repeats 9 --json",
    )
    parser.add_argument(
        "name",
        choices=["codec", "swarm"],
        help="codec: 8-bit activations against bitsandbytes and others, on one core;"
        " swarm: 1, 2 and 3 servers against transformers in one process",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="rounds of all variants in turn (default 5)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="new tokens in a round (default 64)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of each process (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout's last line")
    parser.set_defaults(run=_run_bench)


def _run_demo(arguments: argparse.Namespace) -> int:
    import trio

    from llmnode.node.demo import DemoConfig, demo

    config = DemoConfig(
        servers=_at_least_one(arguments.servers, "--servers"),
        prompt=arguments.prompt,
        max_new_tokens=_at_least_one(arguments.max_new_tokens, "--max-new-tokens"),
        chat=arguments.chat,
        json=arguments.json,
        threads=_threads(arguments),
    )
    trio.run(demo, config)
    return 0


def _run_serve(arguments: argparse.Namespace) -> int:
    import trio

    from llmnode.net.host import LISTEN_ANY_LOOPBACK
    from llmnode.node.app import Ready, ServeConfig, serve

    if arguments.verbose:
        _log_to_stderr()

    def report(text: str) -> None:
        if arguments.json:
            print(json.dumps({"event": "status", "text": text}), flush=True)
        else:
            print(f"llmnode: {text}", file=sys.stderr)

    def on_ready(ready: Ready) -> None:
        if arguments.json:
            event = {
                "event": "ready",
                "peer": ready.peer,
                "addresses": list(ready.addresses),
                "model": ready.model,
                "blocks": [ready.span.start, ready.span.end],
                "tensor_bytes": ready.tensor_bytes,
            }
            print(json.dumps(event), flush=True)
        else:
            print(f"ready: blocks {ready.span} of {ready.model} at {' '.join(ready.addresses)}", flush=True)

    config = ServeConfig(
        model=arguments.model,
        blocks=arguments.blocks,
        listen=arguments.listen or [LISTEN_ANY_LOOPBACK],
        kv_tokens=_at_least_one(arguments.kv_tokens, "--kv-tokens"),
        threads=_threads(arguments),
        until_stdin_closes=arguments.until_stdin_closes,
    )
    trio.run(serve, config, report, on_ready)
    return 0


def _run_generate(arguments: argparse.Namespace) -> int:
    from llmnode.node.generate import GenerateConfig, generate, read_prompts

    _check_peers(arguments.peers)
    config = GenerateConfig(
        model=arguments.model,
        peers=arguments.peers,
        codec=arguments.codec,
        prompts=read_prompts(arguments.prompts) if arguments.prompts else [arguments.prompt],
        sampling=_sampling(arguments),
        chat=arguments.chat,
        json=arguments.json,
    )
    generate(config)
    return 0


def _run_chat(arguments: argparse.Namespace) -> int:
    from llmnode.node.chat import ChatConfig, chat

    _check_peers(arguments.peers)
    config = ChatConfig(
        model=arguments.model,
        peers=arguments.peers,
        codec=arguments.codec,
        sampling=_sampling(arguments),
        max_length=_at_least_one(arguments.max_length, "--max-length"),
    )
    chat(config)
    return 0


def _run_bench(arguments: argparse.Namespace) -> int:
    repeats = _at_least_one(arguments.repeats, "--repeats")
    if arguments.name == "codec":
        from llmnode.node.bench.codec import CodecBench, bench_codec

        bench_codec(CodecBench(repeats, arguments.json))
        return 0

    import trio

    from llmnode.node.bench.swarm import SwarmBench, bench_swarm

    config = SwarmBench(
        repeats=repeats,
        tokens=max(2, arguments.tokens),
        threads=_at_least_one(arguments.threads, "--threads"),
        json=arguments.json,
    )
    trio.run(bench_swarm, config)
    return 0


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    ours = logging.getLogger("llmnode")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def _threads(arguments: argparse.Namespace) -> int | None:
    return None if arguments.threads is None else _at_least_one(arguments.threads, "--threads")


def _check_peers(peers: Sequence[str]) -> None:
    """A typing error is told before the seconds that loading takes."""
    from llmnode.net.host import parse_peer

    for peer in peers:
        parse_peer(peer)


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from llmnode.node.sampling import Sampling

    if arguments.temperature < 0:
        raise ConfigError(f"--temperature {arguments.temperature:g}: give 0 or more")
    if not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p {arguments.top_p:g}: give more than 0 and at most 1")
    return Sampling(
        max_new_tokens=_at_least_one(arguments.max_new_tokens, "--max-new-tokens"),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


def _at_least_one(value: int, flag: str) -> int:
    if value < 1:
        raise ConfigError(f"{flag} {value}: give at least 1")
    return value
