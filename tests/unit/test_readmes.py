"""The README of a folder names each of its files. No README, docstring or comment names a file that is gone."""

from __future__ import annotations

import re
import runpy
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKER = runpy.run_path(str(ROOT / "tests" / "lint" / "prose.py"))
PACKAGE = ROOT / "python" / "llmnode"
PAGES = sorted(
    page
    for folder in ("", ".github", "examples", "node", "python", "tests", "transport_rs")
    for page in ((ROOT / folder).rglob("*.md") if folder else ROOT.glob("*.md"))
    if page.name not in {"CHANGELOG.md", "STYLE.md"} and not {"target", ".venv"} & set(page.parts)
)
FOLDERS = [page.parent for page in PAGES if page.name == "README.md" and PACKAGE in page.parents]
FOLDERS.append(ROOT / "python" / "bootstrap")
BASES = (PACKAGE, PACKAGE.parent, ROOT, ROOT / "tests", ROOT / "transport_rs", ROOT / "transport_rs" / "src")
NODE = [ROOT / "node", ROOT / "node" / "serve", ROOT / "node" / "commands"]
NAME = re.compile(r"(?<![\w/*.-])[\w/-]+\.(?:py|rs|md)\b(?![\w*])")
QUOTED = re.compile(rf"`[^`]*{NAME.pattern}[^`]*`")


def words_of(page: Path) -> set[str]:
    """The words between backticks, without code blocks. `a.py: f` gives `a.py`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {word for quoted in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[\s:]+", quoted) if word}


@pytest.mark.parametrize("folder", [*FOLDERS, *NODE], ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_has_a_page_that_names_each_of_its_files(folder: Path) -> None:
    page = folder / "README.md"
    names = words_of(page if page.exists() else folder.parent / "README.md")
    if folder in NODE[1:]:
        names |= words_of(ROOT / "node" / "README.md")
    inner = [] if folder in NODE else [each for each in folder.iterdir() if not (each / "README.md").exists()]
    files = [each for at in (folder, *inner) for each in at.glob("*.py") if each.name != "__init__.py"]
    assert files
    unnamed = [each.name for each in files if not any(fnmatch(each.name, Path(name).name) for name in names)]
    assert not unnamed, f"{page} should say what these do"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    """Paths are relative to one of `BASES`. A bare name may also be that of a test, or of any file below the page."""
    named = (word for word in words_of(page) if re.fullmatch(r"[\w./*-]+\.(py|rs|md)", word) and "NAME" not in word)
    gone = [
        word
        for word in named
        if not any(list(at.glob(word.removeprefix("./"))) for at in (page.parent, *BASES))
        if "/" in word or not list((ROOT / "tests" if word.startswith("test_") else page.parent).rglob(word))
    ]
    assert not gone, f"{page} names files that are not there"


def test_the_files_that_docstrings_and_comments_name_exist() -> None:
    """A bare name is that of a test, or of a file that is shipped if the naming file is.

    A path is relative to the file, to the folder around it, or to a base.
    """
    files: list[Path] = CHECKER["_files"]([])
    paths = [path for path in files if path.suffix in {".py", ".rs"} and path != Path(__file__)]
    names = {path.name for path in files}
    shipped = {path.name for path in files if ROOT / "tests" not in path.parents}
    gone = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in paths
        if QUOTED.search(path.read_text(encoding="utf-8"))  # or it need not be parsed
        for line, text in CHECKER["texts_of"](path)
        for quoted in re.findall(r"`([^`\n]+)`", text)
        for word in NAME.findall(quoted)
        if not (
            word in (names if word.startswith("test_") or ROOT / "tests" in path.parents else shipped)
            if "/" not in word
            else any((at / word).exists() for at in (path.parent, path.parent.parent, *BASES))
        )
    ]
    assert not gone
