"""The prediction for a server, beside what it does: an extension of `Description`, in whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.core.server_figures import ServerFigures
from llmnode.errors import RemoteProtocolError
from llmnode.wire.fields import Total, check_of
from llmnode.wire.messages import FIGURES

if TYPE_CHECKING:
    from llmnode.wire.messages import Description

_is_total = check_of(Total)
_NAMES = ("sessions_1000", "predicted_tokens_1000", "measured_tokens_1000", "predicted_bytes", "measured_bytes")
"""In the order of the fields of `ServerFigures`. The first three are thousandths."""
_THOUSANDTHS = 3


def figures_extension(figures: ServerFigures) -> dict[str, Any]:  # Any: each extension has its own values
    """The extensions of the description of a server with these `figures`."""
    rates = figures.sessions, figures.predicted_tokens_per_s, figures.measured_tokens_per_s
    values = *(round(1000 * each) for each in rates), figures.predicted_bytes, figures.measured_bytes
    return {FIGURES: dict(zip(_NAMES, values, strict=True))}


def figures_of(description: Description) -> ServerFigures | None:
    """None if the server says nothing of them. Raises RemoteProtocolError."""
    values = (description.extensions or {}).get(FIGURES)
    if values is None:
        return None
    if not isinstance(values, dict) or not all(_is_total(values.get(name)) for name in _NAMES):
        raise RemoteProtocolError(f"Description.extensions: {FIGURES} are no map of numbers")
    rates, sizes = _NAMES[:_THOUSANDTHS], _NAMES[_THOUSANDTHS:]
    return ServerFigures(*(values[name] / 1000 for name in rates), *(values[name] for name in sizes))
