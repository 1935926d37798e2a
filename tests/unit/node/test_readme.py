"""The page of the program is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmnode import node

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
