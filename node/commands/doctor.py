"""`llmnode doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable
from llmnode.node.commands.joining import add_peers, model_and_way_in
from llmnode.node.commands.options import (
    MODEL_OR_INVITE_HELP,
    add_command,
    add_kv_tokens,
    add_listen,
    add_precision,
    at_least_one,
    wish,
)
from llmnode.node.terminal import open_console, show, show_json
from llmnode.node.values import model

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands
    from llmnode.node.findings import Finding

EXIT_BLOCKED = 1
STYLES = {"ok": "green", "warning": "yellow", "blocker": "red"}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        run,
        "look for what keeps a node from working on this machine, and say how to mend it",
        "  llmnode doctor\n  llmnode doctor MODEL --listen /ip4/0.0.0.0/tcp/4001\n"
        "  llmnode doctor --peers ADDRESS1 ADDRESS2 --json\n\n"
        "the last line is `ready`, or the blocker to mend first; the exit status is then 1",
    )
    parser.add_argument("model", nargs="?", type=model, metavar="MODEL|INVITE", help=MODEL_OR_INVITE_HELP)
    add_peers(parser, "servers or relays to reach", invite=False)
    add_listen(parser)
    add_kv_tokens(parser, 32_768)
    add_precision(
        parser,
        "what blocks are to be computed in (default auto: what the peers serve, else float32)",
        "what their weights are to be rounded to (default auto, likewise, else none)",
        "what keys and values are to be kept in (default auto, likewise, else same: as --dtype)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; the findings go to stderr")


def run(arguments: argparse.Namespace) -> int:
    from rich.text import Text

    from llmnode.node.doctor import Doctor, DoctorConfig, diagnose
    from llmnode.node.findings import blocker_of
    from llmnode.node.stopping import run_async

    named, to = model_and_way_in(arguments)
    config = DoctorConfig(
        model=named,
        to=to,
        listen=arguments.listen or ["/ip4/127.0.0.1/tcp/0"],
        kv_tokens=at_least_one(arguments.kv_tokens, "--kv-tokens"),
        wish=wish(arguments),
    )
    console = open_console(stderr=arguments.json, soft_wrap=True)

    def report(finding: Finding) -> None:
        line = Text.assemble(
            (f"{finding.verdict:8}", STYLES[finding.verdict]), f"{finding.check:8}{printable(finding.text)}"
        )
        console.print(line)
        if finding.fix:
            console.print(Text(f"{'':16}fix: {printable(finding.fix)}"))

    with console.status("starting") as status:
        doctor = Doctor(config, report, lambda text: status.update(Text(printable(text))))
        run_async(diagnose, doctor)
    blocker = blocker_of(doctor.findings)
    if arguments.json:
        findings = [asdict(finding) for finding in doctor.findings]
        show_json({"ready": blocker is None, "blocker": blocker and asdict(blocker), "findings": findings})
    elif blocker is None:
        show("ready")
    else:
        show(printable(f"blocker: {blocker.text}; fix: {blocker.fix}"))
    return EXIT_BLOCKED if blocker else 0
