"""Pictures for `--plot`, in the format of the file's suffix. matplotlib is imported when a picture is drawn."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.axes import Axes


@contextmanager
def axes_in(path: Path, title: str, x: str, y: str) -> Iterator[Axes]:
    """The axes of a figure. The file is written when the context ends. Text in an SVG stays text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        yield figure.add_subplot(xlabel=x, ylabel=y, title=title)
        figure.savefig(path)
