"""`llmnode speed`: how fast this machine would serve."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable
from llmnode.node.commands.options import add_blocks, add_command, add_worker, at_least_one, worker_config
from llmnode.node.status_lines import Telling, terminal
from llmnode.node.terminal import show, show_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.node.app import NodeConfig
    from llmnode.node.commands.options import Commands
    from llmnode.node.serve.speed import Speed

MOST_ROUNDS = 1000


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "speed",
        run,
        "measure how fast this machine would serve blocks, with the same options as `llmnode serve`",
        "  llmnode speed\n  llmnode speed FOLDER --blocks 8 --quant int8\n  llmnode speed --threads 1 --json\n\n"
        "it joins no swarm; `llmnode status` shows the speed of the servers of one, and the round trip to each",
    )
    add_blocks(parser)
    add_worker(parser)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each kind (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    import trio

    from llmnode.node.app import check

    config, rounds = worker_config(arguments), at_least_one(arguments.rounds, "--rounds", MOST_ROUNDS)
    check(config)
    with Telling(terminal()) as telling:
        model, span, speed = trio.run(_measure, config, rounds, telling.tell)
    if arguments.json:
        show_json(_as_json(model, span, speed))
    else:
        show(_lines(model, span, speed))
    return 0


async def _measure(config: NodeConfig, rounds: int, report: Callable[[str], None]) -> tuple[ModelInfo, Span, Speed]:
    from llmnode.node.app import open_source
    from llmnode.node.serve.placing import choose_blocks
    from llmnode.node.serve.speed import measure_speed

    report("loading torch")
    async with open_source(config, report, lambda line, _serves: report(line)) as source:
        model = await source.open_model()
        span = await choose_blocks(config.blocks, model, source, swarm=None)
        report(f"reading blocks {span} of {model.name}")
        worker = await source.load(span)
        speed = await measure_speed(
            worker, model, rounds, lambda number: report(f"measured {number} of {rounds + 1} rounds")
        )
        await source.drop()
    return model, span, speed


def _lines(model: ModelInfo, span: Span, speed: Speed) -> str:
    block_ms = 1000 / statistics.median(speed.decode) / len(span)
    return "\n".join(
        [
            printable(f"blocks {span} of {model.name}, {model.precision.name}"),
            _line("decode, one session", speed.decode) + f", {block_ms:.2f} ms a block",
            _line(f"decode, {speed.sessions} sessions at once", speed.decode_shared),
            _line(f"prefill of {speed.prompt} tokens", speed.prefill),
        ]
    )


def _line(what: str, rates: Sequence[float]) -> str:
    median, least, most = statistics.median(rates), min(rates), max(rates)
    return f"{what:29}{median:8.1f} tokens/s ({least:.1f} to {most:.1f})"


def _as_json(model: ModelInfo, span: Span, speed: Speed) -> dict[str, Any]:  # Any: JSON
    return {
        "model": model.name,
        "dtype": model.precision.name,
        "blocks": [span.start, span.end],
        "decode_tokens_per_s": list(speed.decode),
        "sessions": speed.sessions,
        "decode_shared_tokens_per_s": list(speed.decode_shared),
        "prompt_tokens": speed.prompt,
        "prefill_tokens_per_s": list(speed.prefill),
    }
