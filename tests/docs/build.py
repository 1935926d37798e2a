"""Makes the pages of the public API: each name with its docstring, its types and its source. No network is used.

`tests/docs/run` calls it. The tool is pdoc, which reads the modules as Python has loaded them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pdoc

if TYPE_CHECKING:
    from types import ModuleType

PUBLIC = ("llmnode", "llmnode.errors", "llmnode.node", "llmnode.core.policy")
"""The modules that a program may import from. An update keeps their names, or the changelog says how they changed."""


def public_modules() -> list[ModuleType]:
    """The modules of `PUBLIC`, with all names that they otherwise load when these are used."""
    modules = [importlib.import_module(name) for name in PUBLIC]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
    return modules


def build(folder: Path) -> tuple[list[Path], list[str]]:
    """Writes the pages into `folder`. Returns their files, one for each public module, and pdoc's warnings."""
    public_modules()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*PUBLIC, output_directory=folder)
    pages = [folder / f"{name.replace('.', '/')}.html" for name in PUBLIC]
    return pages, [str(warning.message) for warning in caught]


if __name__ == "__main__":
    made, found = build(Path(sys.argv[1]))
    print(*made, sep="\n")
    sys.exit("\n".join(found) or 0)
