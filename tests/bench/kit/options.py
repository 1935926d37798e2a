"""The options of benchmarks. Each benchmark declares those that it takes. Their meaning is the same everywhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node import values
from llmnode.node.commands.options import MOST_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST = 1 << 40


class Options(argparse.Namespace):
    """The parsed options. An attribute is there if the benchmark has declared its option."""

    json: bool
    threads: int = 1
    """The threads of torch, in this process and in each server."""
    repeats: int
    tokens: int
    thin: bool = False
    model: str | None
    models: Sequence[str]
    plot: Path | None
    chunks: int
    minutes: float
    only: str
    seconds: int
    clients: int
    saturate: bool
    nodes: int
    at_once: Sequence[int]
    round_trip_ms: float
    precision: Sequence[str] | None
    checkout: Path
    keyword: str
    sdist: Path | None
    form: str | None
    servers: int | None
    device: str
    hosts: Path | None
    trace: Path | None
    blocks: int | None
    churn: Sequence[int] | None


def count(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """The type of an option: a whole number within limits."""

    def convert(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value}: give {least} to {most}")
        return value

    convert.__name__ = "int"  # argparse names the type in its errors
    return convert


def add_repeats(parser: argparse.ArgumentParser, default: int = 5) -> None:
    _add_count(parser, "--repeats", default, "rounds of all variants in turn")


def add_tokens(parser: argparse.ArgumentParser, default: int, what: str = "new tokens of each text") -> None:
    _add_count(parser, "--tokens", default, what, least=2)


def add_threads(parser: argparse.ArgumentParser, what: str = "torch threads of each process") -> None:
    _add_count(parser, "--threads", 1, what, most=MOST_THREADS)


def add_thin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--thin", action="store_true", help="a part of it, sooner")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=values.model,
        metavar="NAME",
        help="as for `llmnode serve`, or llama-34m, -222m, -1b or -8b of random weights, or one of these with "
        "-bf16 after it (default: the embedded model)",
    )


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--plot", type=_picture, metavar="FILE", help=f"draw {what} (.svg, .png, .pdf)")


def _add_count(
    parser: argparse.ArgumentParser, flag: str, default: int, what: str, least: int = 1, most: int = MOST
) -> None:
    parser.add_argument(flag, type=count(least, most), default=default, metavar="N", help=f"{what} (default {default})")


def _picture(text: str) -> Path:
    """A file for a picture. It is checked now, not after the measurement. Raises ConfigError."""
    file = values.path(text)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: run node/llmnode setup --dev") from error
    forms = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix[1:] not in forms:
        raise ConfigError(f"--plot {file}: end its name in one of {', '.join('.' + form for form in forms)}")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}")
    return file
