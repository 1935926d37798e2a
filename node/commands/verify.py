"""`llmnode verify`: whether the receipts of a session show which servers computed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.core.texts.visible import printable
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.node.commands.options import add_command
from llmnode.node.terminal import show, show_json
from llmnode.node.values import path

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands
    from llmnode.receipts.audit import Audit, Problem
    from llmnode.receipts.transcript import Transcript

EXIT_WRONG = 1
MOST_SHOWN = 20
"""Problems on the terminal; --json has all."""

SHOWS = (
    "this shows who signed for which bytes, and that they went from peer to peer unchanged; not that what was computed"
    " is right"
)

FIX = "name a file that `llmnode generate --receipts FILE` or a session has written"


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "verify",
        run,
        "check the receipts that the peers of a session have signed",
        f"  llmnode verify receipts.json\n  llmnode verify receipts.json --json\n\n{SHOWS}\n"
        "the exit status is 1 if anything is wrong: a signature, a gap, a chain that does not join, two receipts that\n"
        "contradict each other",
    )
    parser.add_argument(
        "file", type=path, metavar="FILE", help="what `llmnode generate --receipts FILE` or a session has written"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    from llmnode.net.identity import is_signed
    from llmnode.receipts.audit import audit
    from llmnode.receipts.transcript import MOST_BYTES, parse

    content = read_file(arguments.file, str(arguments.file), MOST_BYTES, fix=FIX)

    try:
        transcript = parse(content)
    except ConfigError as error:
        raise ConfigError(f"{arguments.file}: {error}: {FIX}") from error
    found = audit(transcript, is_signed)
    if arguments.json:
        show_json(_as_json(transcript, found))
    else:
        show(_lines(transcript, found))
    return EXIT_WRONG if found.problems else 0


def _lines(transcript: Transcript, found: Audit) -> str:
    start, end = found.positions
    shown = sorted(found.problems, key=lambda problem: not problem.convicts)[:MOST_SHOWN]
    lines = [
        f"{transcript.model} ({transcript.profile.precision.name}, {transcript.codec}), {transcript.blocks} blocks,"
        f" positions [{start}, {end}): {found.receipts} receipts",
        *(f"  {part}" for part in found.parts),
        *(f"{_verdict(problem)}: {problem}" for problem in shown),
    ]
    if len(found.problems) > MOST_SHOWN:
        lines.append(f"wrong: {len(found.problems) - MOST_SHOWN} more, see --json")
    if not found.problems:
        lines.append("fine: all receipts are signed, and join without a gap")
    return "\n".join(printable(line) for line in [*lines, SHOWS])


def _verdict(problem: Problem) -> str:
    return "convicted" if problem.convicts else "wrong"


def _as_json(transcript: Transcript, found: Audit) -> dict[str, Any]:  # Any: JSON
    return {
        "fine": not found.problems,
        "client": transcript.client,
        "model": transcript.model,
        "model_digest": transcript.profile.model_digest.hex(),
        "dtype": transcript.profile.precision.name,
        "codec": str(transcript.codec),
        "blocks": transcript.blocks,
        "positions": found.positions,
        "receipts": found.receipts,
        "parts": [
            {
                "peer": part.peer,
                "blocks": [part.span.start, part.span.end],
                "receipts": part.receipts,
                "positions": part.positions,
                "replayed": part.replayed,
            }
            for part in found.parts
        ],
        "problems": [
            {
                "peer": problem.peer,
                "blocks": problem.span and [problem.span.start, problem.span.end],
                "positions": problem.positions,
                "what": problem.what,
                "convicts": problem.convicts,
            }
            for problem in found.problems
        ],
        "shows": SHOWS,
    }
