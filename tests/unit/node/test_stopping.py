"""How Ctrl-C ends a program: in what act it comes, and that every command is run in that way."""

from __future__ import annotations

import ast
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import trio

import llmnode
from llmnode.node.stopping import run_async, stopped_by_signals

RUNNERS = {"stopping.py", "simulate.py", "portal.py"}
"""The modules that may name `trio.run`: that of `run_async`, the simulator, and a thread, to which no Ctrl-C comes."""

NAMED = re.compile(r"\btrio\b[\s)\\]*\.\s*run\b")
"""A file without it need not be parsed."""


def test_ctrl_c_comes_at_a_checkpoint_alone() -> None:
    done: list[str] = []

    async def act(word: str) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(f"{word} before a checkpoint")
        await trio.lowlevel.checkpoint()
        done.append("after it")

    with pytest.raises(KeyboardInterrupt):
        run_async(act, "goes on")
    assert done == ["goes on before a checkpoint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_ctrl_c_before_a_program_is_ready_interrupts_it(number: signal.Signals) -> None:
    """It has not done what it was started for. SIGTERM is an order to end, which it obeys."""
    closed = trio.Event()

    async def start() -> None:
        async with stopped_by_signals():
            signal.raise_signal(number)
            try:
                await trio.sleep_forever()
            finally:
                closed.set()

    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext():
        run_async(start)
    assert closed.is_set()


@pytest.mark.parametrize("is_watching", [False, True], ids=["a server", "a command that shows something until Ctrl-C"])
def test_ctrl_c_ends_a_program_that_runs_until_then(is_watching: bool) -> None:
    async def run() -> None:
        async with stopped_by_signals(ends_by_ctrl_c=is_watching) as stop:
            if not is_watching:
                stop.in_order()
            signal.raise_signal(signal.SIGINT)
            await stop.requested.wait()
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()

    run_async(run)


def test_every_command_runs_so() -> None:
    package = Path(llmnode.__file__).parent
    places = [package, package / "node"]  # the second is a link, which rglob does not follow
    paths = {path for place in places for path in place.rglob("*.py") if path.name not in RUNNERS}
    texts = {path: text for path in paths if NAMED.search(text := path.read_text())}
    bare = [str(path) for path, text in texts.items() for node in ast.walk(ast.parse(text)) if _is_trio_run(node)]
    assert not bare, "run it by node/stopping.py's run_async"
    assert any(path.name == "serve.py" for path in paths), "searches what it means to"


def _is_trio_run(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "run"
        and isinstance(node.value, ast.Name)
        and node.value.id == "trio"
    )
