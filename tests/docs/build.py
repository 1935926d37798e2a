"""Makes the pages of the public API: each name with its docstring, its types and its source. No network is used.

`tests/docs/run` calls it. The tool is pdoc, which reads the modules as Python has loaded them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pdoc

PUBLIC = ("llmnode", "llmnode.errors", "llmnode.node", "llmnode.core.policy")
"""The modules that a program may import from. An update keeps their names, or the changelog says how they changed."""


def build(folder: Path) -> tuple[list[Path], list[str]]:
    """Writes the pages into `folder`. Returns their files, one for each public module, and pdoc's warnings."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            getattr(module, public)  # it is loaded when it is used
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*PUBLIC, output_directory=folder)
    pages = [folder / f"{name.replace('.', '/')}.html" for name in PUBLIC]
    return pages, [str(warning.message) for warning in caught]


if __name__ == "__main__":
    made, found = build(Path(sys.argv[1]))
    print(*made, sep="\n")
    sys.exit("\n".join(found) or 0)
