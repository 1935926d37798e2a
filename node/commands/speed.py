"""`llmnode speed`: how fast this machine would serve."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.speed import ComputeSpeed, NetworkSpeed, throughput
from llmnode.core.texts.visible import printable
from llmnode.node.commands.joining import add_peers, check_peers
from llmnode.node.commands.options import add_blocks, add_command, add_worker, at_least_one, worker_config
from llmnode.node.status_lines import Telling, terminal
from llmnode.node.terminal import show, show_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.net.invite import Invite
    from llmnode.node.app import NodeConfig
    from llmnode.node.commands.options import Commands
    from llmnode.node.serve.speed import Speed

MOST_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured. `network` is None if no peers were named to measure it against."""

    model: ModelInfo
    span: Span
    speed: Speed
    network: NetworkSpeed | None

    @property
    def throughput(self) -> float:
        """The figure that a server would announce, in tokens/s; 0 if the network is not measured."""
        rates = (self.speed.decode, self.speed.decode_shared, self.speed.prefill)
        decode, shared, prefill = map(statistics.median, rates)
        compute = ComputeSpeed(decode, shared, prefill, self.speed.sessions)
        return throughput(compute, self.network or NetworkSpeed(), self.model.row_bytes)


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "speed",
        run,
        "measure how fast this machine would serve blocks, with the same options as `llmnode serve`",
        "  llmnode speed\n  llmnode speed FOLDER --blocks 8 --quant int8\n  llmnode speed --threads 1 --json\n"
        "  llmnode speed --peers ADDRESS                    (the network too, against peers of that swarm)\n\n"
        "it serves nothing; `llmnode status` shows the speed of the servers of a swarm, and the round trip to each",
    )
    add_blocks(parser)
    add_worker(parser)
    add_peers(parser, "measure the network too: peers of a swarm, which get some 600 kB each", invite=False)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of each kind (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.app import check
    from llmnode.node.stopping import run_async

    config, rounds = worker_config(arguments), at_least_one(arguments.rounds, "--rounds", MOST_ROUNDS)
    check(config)
    way_in = config.way_in()
    check_peers(way_in.peers)
    with Telling(terminal()) as telling:
        measured = run_async(_measure, config, way_in, rounds, telling.tell)
    if arguments.json:
        show_json(_as_json(measured))
    else:
        show(_lines(measured))
    return 0


async def _measure(config: NodeConfig, way_in: Invite, rounds: int, report: Callable[[str], None]) -> Measured:
    from llmnode.node.app import open_source
    from llmnode.node.serve.placing import choose_blocks
    from llmnode.node.serve.speed import measure_speed

    report("loading torch")
    async with open_source(config, report, lambda line, _serves: report(line)) as source:
        model = await source.open_model()
        span = await choose_blocks(config.blocks, model, source, swarm=None)
        # Before minutes of measuring: perhaps none of the peers answers.
        network = await _measure_network(way_in, model, span) if way_in.peers else None
        report(f"reading blocks {span} of {model.name}")
        worker = await source.load(span)
        speed = await measure_speed(worker, model, rounds, lambda number: report(progress(number, rounds)))
        await source.drop()
    return Measured(model, span, speed, network)


def progress(number: int, rounds: int) -> str:
    """The line before round `number` of `rounds` is measured. Round 0 is the one that warms up."""
    return f"measuring round {number} of {rounds}" if number else "measuring a round first that does not count"


async def _measure_network(way_in: Invite, model: ModelInfo, span: Span) -> NetworkSpeed:
    """Raises PeerError if none of the named peers answers."""
    from llmnode.core.policy import LinkPolicy
    from llmnode.node.serve.network_speed import measure_network, next_hops
    from llmnode.swarm.join import join_swarm

    joining = join_swarm(way_in.peers, LinkPolicy(), swarm_key=way_in.key, is_near=way_in.is_near)
    async with joining as (_pool, swarm):
        return await measure_network(swarm, next_hops(model, span, swarm))


def _lines(measured: Measured) -> str:
    model, span, speed = measured.model, measured.span, measured.speed
    block_ms = 1000 / statistics.median(speed.decode) / len(span)
    return "\n".join(
        [
            printable(f"blocks {span} of {model.name}, {model.precision.name}"),
            _line("decode, one session", speed.decode) + f", {block_ms:.2f} ms a block",
            _line(f"decode, {speed.sessions} sessions at once", speed.decode_shared),
            _line(f"prefill of {speed.prompt} tokens", speed.prefill),
            *_network_lines(measured),
        ]
    )


def _network_lines(measured: Measured) -> list[str]:
    if measured.network is None:
        return ["network: not measured, name peers of a swarm with --peers"]
    upload, round_trips = measured.network.upload_bytes_per_s, measured.network.round_trips_s or {}
    if not upload:
        return ["network: no peer took a probe; a server that cannot measure its network counts as slow"]
    lines = [f"{'upload':29}{upload / measured.model.row_bytes:8.1f} tokens/s ({upload / 1e6:.2f} MB/s)"]
    if round_trips:
        nearest, farthest = min(round_trips.values()), max(round_trips.values())
        lines.append(f"round trips to next hops     {1e3 * nearest:8.1f} to {1e3 * farthest:.1f} ms")
    return [*lines, f"{'announced: the least of these':29}{measured.throughput:8.1f} tokens/s"]


def _line(what: str, rates: Sequence[float]) -> str:
    median, least, most = statistics.median(rates), min(rates), max(rates)
    return f"{what:29}{median:8.1f} tokens/s ({least:.1f} to {most:.1f})"


def _as_json(measured: Measured) -> dict[str, Any]:  # Any: JSON
    model, span, speed, network = measured.model, measured.span, measured.speed, measured.network
    return {
        "model": model.name,
        "dtype": model.precision.name,
        "blocks": [span.start, span.end],
        "decode_tokens_per_s": list(speed.decode),
        "sessions": speed.sessions,
        "decode_shared_tokens_per_s": list(speed.decode_shared),
        "prompt_tokens": speed.prompt,
        "prefill_tokens_per_s": list(speed.prefill),
        "upload_bytes_per_s": network and network.upload_bytes_per_s,
        "round_trips_us": network and {peer: round(1e6 * each) for peer, each in (network.round_trips_s or {}).items()},
        "announced_tokens_per_s": measured.throughput or None,
    }
