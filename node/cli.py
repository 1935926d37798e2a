"""The command line: the commands there are, and how an error ends one. The options of each are in `commands/`."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from llmnode.errors import AdapterError, ConfigError, LlmnodeError, ModelError, single_error
from llmnode.machine.cache_folder import torch_folder
from llmnode.models.sources.online import keep_libraries_offline
from llmnode.node.commands import (
    adapters,
    bench,
    chat,
    config,
    demo,
    doctor,
    generate,
    invite,
    layout,
    plan,
    relay,
    serve,
    speed,
    status,
    verify,
)
from llmnode.node.commands.options import Parser, log_to_stderr
from llmnode.node.settings import parse
from llmnode.node.terminal import catch_uncaught, prepared, require_stdout, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llmnode.compute.child import MakeLoader

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

COMMANDS = (
    *(demo, serve, relay, generate, chat, status, adapters, speed, plan, layout),
    *(doctor, invite, verify, config, bench),
)


def main(argv: Sequence[str] | None = None, make_loader: MakeLoader | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 (it failed), 2 (the user can fix it) or 130 (Ctrl-C).

    `serve` loads its blocks by `make_loader`, if there is one and they are in a thread: see `NodeConfig`.
    """
    return status_of(lambda: _run(sys.argv[1:] if argv is None else argv, make_loader))


def status_of(act: Callable[[], int]) -> int:
    """The status that `act` returns, or that of the error that ended it. The error is printed in one line."""
    with prepared():
        try:
            with single_error():
                return act()
        except (ConfigError, ModelError, AdapterError) as error:  # the user has named the model and the adapter
            return _fail(error, EXIT_CONFIG)
        except LlmnodeError as error:
            return _fail(error, EXIT_FAILED)
        except KeyboardInterrupt:
            return _fail("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:  # `llmnode ... | head`
            return EXIT_FAILED
        except OSError as error:  # of a file or device that nobody here knows better
            return _fail(f"{error.filename or 'the system'}: {error.strerror or error}", EXIT_FAILED)


def run(act: Callable[[], int] = main) -> NoReturn:
    """The program's entry point: `act`, then the end of the process at once, with the status that `act` returns.

    Torch takes a second to end, and everything that must be closed is closed by then.
    """
    catch_uncaught()
    try:
        status = act()
    except SystemExit as ended:  # by --help or --version
        status = ended.code if isinstance(ended.code, int) else 0
    os._exit(status)


def _run(argv: Sequence[str], make_loader: MakeLoader | None = None) -> int:
    require_stdout()
    settle_libraries()
    parser, commands = _parser()
    try:
        arguments = parse(parser, commands, argv, os.environ)
        arguments.make_loader = make_loader
        status = int(arguments.run(arguments))
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return status


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the program, and that of each command by its name."""
    parser = Parser(
        prog="llmnode",
        description="Run language models together: serve a span of a model, or generate through others' spans.",
        epilog="Options may also come from the environment or a file: `llmnode config` shows each, and from where.",
    )
    parser.add_argument("--version", action="version", version=f"llmnode {importlib.metadata.version('llmnode')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser, commands.choices


def settle_libraries() -> None:
    """Defaults for libraries that read the environment when they are imported. The user's own settings stay."""
    compiled: Path | None = None
    with suppress(ConfigError):  # a command that uses the cache says so itself; help and a layout need none
        compiled = torch_folder()
    for name, value in {
        "HF_HUB_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must sleep, not spin: several nodes share a machine's cores
        "TORCHINDUCTOR_CACHE_DIR": compiled,  # else a folder in /tmp, left behind
        "TQDM_DISABLE": "1",  # libraries' own progress bars would tear ours
        "TRANSFORMERS_VERBOSITY": "error",  # it warns of flags that the model's own files hold
    }.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
    keep_libraries_offline()
    logging.getLogger().setLevel(logging.CRITICAL)  # libp2p logs to the root; this is the program's own process
    log_to_stderr(logging.WARNING, "%(message)s")


def _fail(error: LlmnodeError | str, status: int) -> int:
    say(str(error))
    return status
