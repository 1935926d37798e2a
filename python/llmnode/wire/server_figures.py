"""The prediction for a server, beside what it does: an extension of `Description`, in whole numbers."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from llmnode.core.server_figures import ServerFigures
from llmnode.errors import RemoteProtocolError
from llmnode.wire.fields import Total, check_of
from llmnode.wire.messages import FIGURES

if TYPE_CHECKING:
    from llmnode.wire.messages import Description

_is_total = check_of(Total)
_NAMES = ("sessions_1000", "predicted_tokens_1000", "measured_tokens_1000", "predicted_bytes", "measured_bytes")
_LATER = ("predicted_prefill_tokens_1000", "measured_prefill_tokens_1000")
"""Both in the order of the fields of `ServerFigures`. Older servers leave out the later ones."""
_THOUSANDTHS = "_1000"


def figures_extension(figures: ServerFigures) -> dict[str, Any]:  # Any: each extension has its own values
    """The extensions of the description of a server with these `figures`."""
    names = _NAMES + _LATER
    told = zip(names, astuple(figures), strict=True)
    return {FIGURES: {name: round(1000 * value) if name.endswith(_THOUSANDTHS) else value for name, value in told}}


def figures_of(description: Description) -> ServerFigures | None:
    """None if the server says nothing of them. Raises RemoteProtocolError."""
    values = (description.extensions or {}).get(FIGURES)
    if values is None:
        return None
    values = dict.fromkeys(_LATER, 0) | values if isinstance(values, dict) else {}
    if not all(_is_total(values.get(name)) for name in _NAMES + _LATER):
        raise RemoteProtocolError(f"Description.extensions: {FIGURES} are no map of numbers")
    return ServerFigures(*(_read(name, values[name]) for name in _NAMES + _LATER))


def _read(name: str, value: int) -> Any:
    return value / 1000 if name.endswith(_THOUSANDTHS) else value
