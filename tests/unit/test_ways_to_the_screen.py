"""Nothing is written to the user's terminal but by `node/terminal.py`: the code is searched for any other way."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bootstrap.messages import say

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
WRITER = "node/terminal.py"
ALLOWED = {
    # It runs before anything is installed, has a `say` of its own, and writes the names of its own steps.
    "python/bootstrap/messages.py": {"print", "sys.stderr"},
    "python/bootstrap/tools.py": {"sys.stderr"},
    # It prints answers into a pipe to the client's process.
    "python/llmnode/models/text/template_process.py": {"print"},
    # A function that the caller gives is called so: simulations print their trace where pytest catches it.
    "python/llmnode/testing/world.py": {"print"},
    # The line editor shows a prompt of ours.
    "node/typed.py": {"input"},
    # The worker process puts its stderr behind `VisibleStream`, and logs there.
    "python/llmnode/compute/child.py": {"sys.stderr", "logging.StreamHandler"},
    # The handler that calls `tell`.
    "node/commands/options.py": {"logging.Handler"},
    "python/llmnode/core/texts/log_lines.py": {"logging.Handler"},
}
HARMLESS = {"flush", "isatty", "fileno"}
"""Methods of a stream that write no text."""
NAMES = {"print", "breakpoint"}
ATTRIBUTES = {
    *("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "sys.displayhook"),
    *("logging.basicConfig", "logging.StreamHandler", "logging.Handler", "logging.lastResort"),
    *("traceback.print_exc", "traceback.print_exception", "traceback.print_stack", "traceback.print_last"),
    *("warnings.showwarning", "sys.excepthook", "faulthandler.enable", "os.system", "os.popen"),
}
MODULES = {"rich.console", "rich.logging", "rich.traceback", "click", "curses", "getpass", "pprint", "tqdm", "pdb"}
PLACES = {"/dev/tty", "/dev/stdout", "/dev/stderr"}
STARTERS = {"subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "trio.run_process"}
LAST_WORDS = {name.rpartition(".")[2] for name in ATTRIBUTES | STARTERS}
"""Only the names that end with one of these are written out to be compared, which takes long."""


def sources() -> list[Path]:
    """All of set-up, the program and the library. The package has the program by a symlink, which is not followed."""
    places = ROOT / "python" / "bootstrap", ROOT / "node", ROOT / "python" / "llmnode"
    return sorted(path for place in places for path in place.rglob("*.py"))


def ways(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything by which text could come to a terminal."""
    nodes = list(ast.walk(tree))
    harmless = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in HARMLESS}
    for_types = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes:
        match node:
            case ast.Name(id=name) if name in NAMES:
                yield node.lineno, name
            case ast.Call(func=ast.Name(id="input")):
                yield node.lineno, "input"
            case ast.Attribute(attr=last) if last in LAST_WORDS and id(node) not in harmless:
                if (name := ast.unparse(node)) in ATTRIBUTES:
                    yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names) if id(node) not in for_types:
                whole = {f"{module}.{each.name}" for each in names}
                for name in sorted(whole & ATTRIBUTES | {module, *whole} & MODULES):
                    yield node.lineno, name
                if module == "rich" and "print" in {each.name for each in names}:
                    yield node.lineno, "rich.print"
            case ast.Import(names=names):
                for each in names:
                    if each.name in MODULES or (each.asname and each.name in ("sys", "logging", "traceback")):
                        yield node.lineno, each.name
            case ast.Constant(value=str(value)) if value in PLACES:
                yield node.lineno, value
            case ast.Call(func=ast.Attribute(attr="write"), args=[ast.Constant(value=int()), *_]):
                yield node.lineno, "os.write to a descriptor"
            case ast.Call(func=ast.Attribute(attr=last) as function, keywords=keywords) if last in LAST_WORDS:
                given = {each.arg for each in keywords}
                if (name := ast.unparse(function)) in STARTERS and not given & {"capture_output", "stderr"}:
                    yield node.lineno, f"{name} on our streams"


def test_nothing_but_the_writer_writes_to_the_screen() -> None:
    found = {
        f"{name}:{line}: {way}"
        for path in sources()
        if (name := path.relative_to(ROOT).as_posix()) != WRITER
        for line, way in ways(ast.parse(path.read_text(encoding="utf-8")))
        if way not in ALLOWED.get(name, set())
    }
    assert len(sources()) > 200
    assert not found, "write by the functions of node/terminal.py"


def test_what_is_allowed_is_there() -> None:
    for name, allowed in ALLOWED.items():
        found = {way for _, way in ways(ast.parse((ROOT / name).read_text(encoding="utf-8")))}
        assert allowed <= found, name


def test_set_up_shows_what_tools_and_paths_say_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs before the writer is installed, and has an escape of its own."""
    say("a tool: \x1b]0;OWNED\x07\x9b2J\u202e\nllmnode: ready")
    assert capsys.readouterr().err == "llmnode: a tool: \\x1b]0;OWNED\\x07\\x9b2J\\u202e\\nllmnode: ready\n"


@pytest.mark.parametrize(
    "code",
    [
        "print('x')",
        "sys.stdout.write('x')",
        "write = sys.stderr.write",
        "from sys import stdout",
        "import sys as system",
        "print_it = print",
        "logging.basicConfig()",
        "log.addHandler(logging.StreamHandler())",
        "from logging import StreamHandler",
        "traceback.print_exc()",
        "from rich import print",
        "from rich.console import Console",
        "import click",
        "os.write(1, b'x')",
        "open('/dev/tty', 'w')",
        "subprocess.run(['ls'])",
        "input('> ')",
    ],
)
def test_the_search_finds_it(code: str) -> None:
    assert list(ways(ast.parse(code)))


@pytest.mark.parametrize("code", ["sys.stdout.isatty()", "sys.stderr.flush()", "self.print()"])
def test_the_search_leaves_alone_what_writes_nothing(code: str) -> None:
    assert not list(ways(ast.parse(code)))
