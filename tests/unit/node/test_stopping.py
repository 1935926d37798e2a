"""How Ctrl-C ends a program: in what act it comes, and that every command is run in that way."""

from __future__ import annotations

import ast
import re
import signal
from pathlib import Path

import pytest
import trio

import llmnode
from llmnode.node.stopping import run_async

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
