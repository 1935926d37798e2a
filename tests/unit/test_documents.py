"""The pages of the project name files that exist, and the first of them stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [".github", "examples", "node", "python", "tests", "transport_rs/src"]
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
PAGES = ["README.md", "transport_rs/README.md", *(name for name in FILES if name.endswith("README.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", re.sub(r"`[^`\n]+`", "", text))
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    named = re.findall(r"`(?:[a-z_]+/)*[a-z_0-9]+\.(?:py|rs)(?=[`:])", text)
    ends = ["/" + name.strip("`") for name in named]
    assert not [end for end in ends if not any(f"/{file}".endswith(end) for file in FILES)]


def test_the_page_of_the_architecture_is_short() -> None:
    assert len((ROOT / "python/README.md").read_text(encoding="utf-8").splitlines()) <= 100
