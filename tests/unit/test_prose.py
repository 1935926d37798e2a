"""The checker of plain English finds what it is for, in every kind of text, and nothing in good sentences."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHECKER = runpy.run_path(str(Path(__file__).parents[1] / "lint" / "prose.py"))
GOOD = [
    "A client counts as in step if it is usually away for less than one forward.",
    "What should a peer do then?",
    "As long as the link lives, the session does.",
    "The people who read this are engineers.",
    "The stage answers `what it knows`, and says so. `Of` is code.",
]
BAD = [
    ("Of one line.", "fragment"),
    ("What a hop has signed.", "fragment"),
    ("Who is away waits.", "fragment"),
    ("As `run`, but for many.", "fragment"),
    ("After so many tries it ends.", "no number"),
    ("The server who answers first wins.", "machine"),
    ("It is given to who asks.", "who"),
    ("The server has room for it.", "metaphor"),
    (" ".join(["word"] * 46) + ".", "long"),
]


def found(path: Path) -> list[str]:
    texts = CHECKER["texts_of"](path)
    return [
        name for _, text in texts for each in CHECKER["sentences"](text) for name, _ in CHECKER["broken_rules"](each)
    ]


@pytest.mark.parametrize("sentence", GOOD)
def test_a_plain_sentence_breaks_no_rule(sentence: str) -> None:
    assert not list(CHECKER["broken_rules"](sentence))


@pytest.mark.parametrize(("sentence", "rule"), BAD)
def test_a_sentence_that_is_read_twice_breaks_its_rule(sentence: str, rule: str) -> None:
    assert rule in [name for name, _ in CHECKER["broken_rules"](sentence)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("module.py", '"""It works. Of one line."""\n'),
        ("comment.py", "a = 1  # what is left of it. Of one line.\n"),
        ("help.py", 'add("--x", help="Of one line.")\n'),
        ("page.md", "# Title\n\nIt works.\nOf one line.\n\n```\nOf code.\n```\n"),
        ("table.md", "| a | b |\n| --- | --- |\n| x | Of one line. |\n"),
        ("lib.rs", "/// It works.\n/// Of one line.\nfn f() {}\n"),
    ],
)
def test_each_kind_of_text_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert found(tmp_path / name) == ["fragment"]
