"""Checks that comments, docstrings, READMEs and help texts are in plain English.

`python tests/lint/prose.py` prints every sentence that breaks a rule. It ends with status 1 if there is one.
It reads the whole repository, or the folders and files that are named. `--count` prints a number for each file.
The reasons are in `.github/STYLE.md`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "examples", "node", "python", "tests", "transport_rs")
QUOTES = {".github/STYLE.md", "tests/lint/prose.py", "tests/unit/test_prose.py"}
"""They quote what they forbid."""
LONGEST = 45
"""The words of the longest sentence. Twenty are plenty; this many are read twice."""


@dataclass(frozen=True)
class Rule:
    """`pattern` is searched in each sentence. `advice` tells the writer what to do."""

    name: str
    pattern: re.Pattern[str]
    advice: str


def _rule(name: str, pattern: str, advice: str) -> Rule:
    return Rule(name, re.compile(pattern), advice)


RULES = (
    _rule("fragment", r"^(Of|Who|Whose|Whom|Whoever)\b(?!.*\?)", "begin with the subject"),
    _rule("fragment", r"^(What|Whatever|Which)\b(?!.*\?)", "begin with the subject: name the thing"),
    _rule(
        "fragment", r"^As (?!if\b|soon as\b|long as\b|a (result|rule)\b)", "say what it does, then what it resembles"
    ),
    _rule("no number", r"(?i)\b(so|as) (many|much|long|far|often)\b(?! as\b)", "say the number, or name it"),
    _rule(
        "machine",
        r"(?i)\b(peer|server|client|node|relay|hop|process|child|worker|session)s? who\b",
        "a machine is 'which'",
    ),
    _rule("metaphor", r"(?i)\brooms?\b", "say memory, KV, disk space or limit"),
    _rule("who", r"(?i)(?<![\w-])(who|whom|whoever)\b(?!.*\?)", "name the peer, client or node"),
)

_PEOPLE = (
    "person|people|users?|(some|any|every)(body|one)|readers?|strangers?|operators?|developers?|authors?|attackers?"
    "|engineers?|owners?|newcomers?|reviewers?|one"
)
_PERSON = re.compile(rf"\b({_PEOPLE}) who\b")
_SENTENCE_END = re.compile(r"(?<=[.!?:])[\"')\]`*]*\s+(?=[\"'(*\[]*(?:`|[A-Z]))|\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)")
_SHORT = re.compile(r"\b(e\.g|i\.e|al|vs|cf|etc|approx|No|Fig|Sec)\.$")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a paragraph or docstring, each on one line."""
    begun = ""
    for part in _SENTENCE_END.split(text):
        begun = f"{begun} {part}".strip() if begun else part
        if _SHORT.search(begun):
            continue
        if sentence := " ".join(begun.split()).strip("\"'*# -"):
            yield sentence
        begun = ""
    if begun.strip():
        yield " ".join(begun.split())


def broken_rules(sentence: str) -> Iterator[tuple[str, str]]:
    """Names and advice of the rules that this sentence breaks. What is between backticks is code and is not read."""
    plain = _PERSON.sub("a person", re.sub(r"`[^`]*`", "`code`", sentence))
    for rule in RULES:
        if rule.pattern.search(plain):
            yield rule.name, rule.advice
    if len(plain.split()) > LONGEST:
        yield "long", f"more than {LONGEST} words: make two sentences"


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file: pieces of text, each with its first line's number."""
    source = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield from _python(source)
        case ".md":
            yield from _markdown(source)
        case ".rs":
            yield from _comments(source)


def _python(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case ast.keyword(arg="help" | "description" | "epilog", value=value):
                for each in ast.walk(value):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield each.lineno, each.value
    block: list[str] = []
    begun = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#:! ")
        if re.match(r"noqa|type:|ruff:|fmt:|pragma", text):
            continue
        row = token.start[0]
        own_line = not token.line[: token.start[1]].strip()
        if block and (row != last + 1 or not own_line):
            yield begun, "\n".join(block)
            block = []
        begun = begun if block else row
        block.append(text)
        last = row
        if not own_line:
            yield begun, "\n".join(block)
            block = []
    if block:
        yield begun, "\n".join(block)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], 1):
        if found := re.match(r"^\s*//[/!]?\s?(.*)$", line):
            block.append(found.group(1))
        elif block:
            yield number - len(block), "\n".join(block)
            block = []


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    number, in_code, block = 0, False, list[str]()
    for number, line in enumerate([*source.split("\n"), ""], 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        row = line.lstrip().startswith("|")
        if block and (in_code or row or not line.strip()):
            yield number - len(block), "\n".join(block)
            block = []
        if row and not in_code:
            for cell in line.strip().strip("|").split(" | "):
                yield number, cell.strip()
        elif not in_code and line.strip() and not line.lstrip().startswith(("```", "#")):
            block.append(line)


def _files(named: Iterable[str]) -> list[Path]:
    """Looks at the disk and not at git: an unpacked archive is checked too."""
    begins = [ROOT / name for name in named] or [*(ROOT / name for name in FOLDERS), *ROOT.glob("*.md")]
    found = {path for begin in begins for path in (begin.rglob("*") if begin.is_dir() else [begin])}
    return [
        path
        for path in sorted(found)
        if path.suffix in {".py", ".md", ".rs"} and path.is_file()
        if not {"target", "__pycache__"} & set(path.parts) and path.relative_to(ROOT).as_posix() not in QUOTES
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="read these alone, instead of the whole repository")
    parser.add_argument("--count", action="store_true", help="print a number for each file")
    parser.add_argument("--at-most", type=int, default=0, metavar="N", help="status 0 up to this number of sentences")
    arguments = parser.parse_args()
    found = 0
    for path in _files(arguments.paths):
        lines = [
            f"{path.relative_to(ROOT)}:{number}: {name} ({advice}): {sentence[:150]}"
            for number, text in texts_of(path)
            for sentence in sentences(text)
            for name, advice in broken_rules(sentence)
        ]
        found += len(lines)
        if lines and not arguments.at_most:
            print(f"{len(lines):5} {path.relative_to(ROOT)}" if arguments.count else "\n".join(lines))
    print(f"{found} sentences to mend" if found else "plain English", file=sys.stderr)
    if arguments.at_most and found > arguments.at_most:
        print(f"at most {arguments.at_most} are allowed: run this on the files that you have changed", file=sys.stderr)
    return found > arguments.at_most


if __name__ == "__main__":
    sys.exit(main())
