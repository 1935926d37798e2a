"""The page of the program is complete."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llmnode import node

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(node.__file__).resolve().parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("folder", "heading"), [(".", "## Files"), ("serve", "### `serve/`"), ("commands", "### `comm")]
)
def test_it_has_a_line_about_every_file(folder: str, heading: str) -> None:
    _, _, section = PAGE.partition(heading)
    section = section.partition("\n#")[0]
    files = {each.name for each in (FOLDER / folder).glob("*.py")} - ({"__init__.py"} if folder != "." else set())
    assert not [each for each in sorted(files) if f"`{each}`" not in section]


def test_it_names_every_field_of_the_events_of_a_server() -> None:
    rows = {row.split("`")[1]: row for row in PAGE.splitlines() if row.startswith("| `")}
    sources = (path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py"))
    printed = [each for source in sources if '"event"' in source for each in _events(source)]
    assert {event for event, _ in printed} >= {"ready", "unreached"}, "searches what it means to"
    assert not [(event, field) for event, field in printed if f"`{field}`" not in rows[event]]


def _events(source: str) -> Iterator[tuple[str, str]]:
    """The event and the name of each field that a dict in the source gives it."""
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.Dict):
            names = [key.value for key in each.keys if isinstance(key, ast.Constant)]
            of = dict(zip(names, each.values, strict=False))
            if isinstance(event := of.get("event"), ast.Constant):
                yield from ((str(event.value), str(name)) for name in names if name != "event")
