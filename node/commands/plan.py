"""`llmnode plan`: what this machine would serve in a swarm, and what that would give."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.speed import SHARED_SESSIONS
from llmnode.core.texts.visible import printable
from llmnode.machine.cache_folder import show_bytes
from llmnode.node.commands.joining import FIND, add_mdns, add_peers, swarm_to_join
from llmnode.node.commands.options import add_blocks, add_command, add_relay, add_worker, at_least_one, worker_config
from llmnode.node.status_lines import Telling, terminal
from llmnode.node.terminal import show, show_json
from llmnode.node.text import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from llmnode.core.forecast import SessionForecast, SwarmForecast
    from llmnode.node.commands.options import Commands
    from llmnode.node.plan import Plan

PROMPT_TOKENS = 128


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "plan",
        run,
        "say what this machine would serve in a swarm, and what that would give, before it joins",
        "  llmnode plan                                     (the swarm of this network)\n"
        "  llmnode plan INVITE                              (as `llmnode invite` or `llmnode serve` printed it)\n"
        "  llmnode plan FOLDER --peers ADDRESS --blocks 8 --quant int8\n"
        "  llmnode plan --peers RELAY --relay RELAY         (behind a NAT: the address that `llmnode relay` printed)\n"
        "  llmnode plan --peers ADDRESS --prompt-tokens 1000 --json\n\n"
        "it loads the blocks and measures them as `llmnode serve` would, sends probes to servers of the swarm (some\n"
        "600 kB each, to three of them), and serves nothing; one session is that of a client on this machine",
    )
    add_blocks(parser)
    add_worker(parser)
    add_peers(parser, "servers or relays of the swarm", invite=False)
    add_mdns(parser, FIND)
    add_relay(parser, "the forecast then has the way through the nearest one, until a direct way is found")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"the length of the prompt before the first token (default {PROMPT_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.node.app import check
    from llmnode.node.forecasts import keep_forecast
    from llmnode.node.plan import as_json, make_plan
    from llmnode.node.stopping import run_async

    prompt_tokens = at_least_one(arguments.prompt_tokens, "--prompt-tokens")
    config = replace(worker_config(arguments), relays=arguments.relay)
    check(config)
    named = config.way_in()
    way_in = swarm_to_join(arguments, replace(named, peers=(*named.peers, *arguments.relay)))
    with Telling(terminal()) as telling:
        plan = run_async(make_plan, config, way_in, prompt_tokens, telling.tell)
    run_async(keep_forecast, plan)
    if arguments.json:
        show_json(as_json(plan))
    else:
        show("\n".join(_lines(plan)))
    return 0


def _lines(plan: Plan) -> Iterator[str]:
    node, model, without, with_it = plan.node, plan.model, plan.without, plan.with_it
    yield printable(f"this node would serve blocks {node.span} of {model.name}, {model.precision.name}")
    kv = f"{show_bytes(node.kv_bytes)} of KV for {node.kv_tokens} positions"
    program = f"{show_bytes(node.base_bytes)} for the program itself"
    yield f"  memory    {show_bytes(node.weights_bytes)} of weights, {kv} once they are used, {program}"
    compute, upload = node.compute, node.network.upload_bytes_per_s
    rates = f"{compute.decode_tokens_per_s:.1f} for one session, {compute.shared_tokens_per_s:.1f} for several"
    yield f"  computes  {rates}, {compute.prefill_tokens_per_s:.1f} of a prompt (tokens/s)"
    if upload:
        yield f"  sends     {upload / model.row_bytes:.1f} tokens/s ({upload / 1e6:.2f} MB/s)"
    else:
        yield "  sends     not measured: no server of the swarm took a probe, and so it counts as slow"
    if node.relay_s:
        yield f"  relay     {1e3 * node.relay_s:.1f} ms there and back: steps go through it until a direct way is found"
    yield ""
    yield f"{'':26}{'without it':>14}{'with it':>14}"
    of_swarm = f"swarm, {SHARED_SESSIONS} sessions a server"
    yield _row(of_swarm, without, with_it, lambda each: f"{each.tokens_per_s:.1f} tok/s")
    yield _row("one session", without, with_it, lambda each: _of_session(each, _speed))
    first = f"first token of {plan.prompt_tokens}"
    yield _row(first, without, with_it, lambda each: _of_session(each, lambda own: f"{own.first_token_s:.2f} s"))
    if plan.missing:
        yield f"nobody serves blocks {', '.join(map(str, plan.missing))} now"
    if with_it.session is not None:
        yield from _parts(with_it.session)
        yield from _further(plan, with_it.session)


def _row(what: str, without: SwarmForecast, with_it: SwarmForecast, show_value: Callable[[SwarmForecast], str]) -> str:
    return f"{what:26}{show_value(without):>14}{show_value(with_it):>14}"


def _of_session(swarm: SwarmForecast, show_value: Callable[[SessionForecast], str]) -> str:
    return "-" if swarm.session is None else show_value(swarm.session)


def _speed(session: SessionForecast) -> str:
    return f"{session.tokens_per_s:.1f} tok/s"


def _parts(session: SessionForecast) -> Iterator[str]:
    """The parts of a token's time."""
    parts = {
        "servers compute": session.compute_s,
        "on the way": session.ways_s,
        "sending": session.send_s,
        "the client": session.client_s,
    }
    shares = ", ".join(f"{what} {1e3 * each:.1f} ms ({each / session.step_s:.0%})" for what, each in parts.items())
    yield ""
    yield f"a token takes {1e3 * session.step_s:.1f} ms over {counted(len(session.hops), 'server')}: {shares}"


def _further(plan: Plan, now: SessionForecast) -> Iterator[str]:
    """Three things that would help further."""
    yield ""
    yield f"{'and with':26}{'the swarm':>14}{'one session':>14}"
    further = {
        "a client half as far": plan.with_nearer_client,
        "twice the uplink": plan.with_faster_uplink,
        "one more such node": plan.with_another,
    }
    for what, swarm in further.items():
        gain = "-" if swarm.session is None else f"{swarm.session.tokens_per_s / now.tokens_per_s - 1:+.0%}"
        yield f"{what:26}{f'{swarm.tokens_per_s:.1f} tok/s':>14}{_of_session(swarm, _speed):>14} ({gain})"
