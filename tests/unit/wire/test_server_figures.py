"""The figures of a server cross the wire as an extension of its description."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmnode.core.server_figures import ServerFigures
from llmnode.errors import RemoteProtocolError
from llmnode.wire.messages import Description, pack, unpack
from llmnode.wire.server_figures import figures_extension, figures_of

FIGURES = ServerFigures(2.5, 40.125, 0.0, 1 << 33, (1 << 33) + 1, 250.5, 300.0)
NUMBERS = dict.fromkeys(Description.__dataclass_fields__, 1)
DESCRIPTION = Description(
    **NUMBERS
    | {"software": "llmnode/1", "model": "m", "model_digest": bytes(32), "dtype": "float32"}
    | {"adapter": None, "extensions": None, "required": None}
)


def described(extensions: dict[str, Any] | None) -> Description:
    return unpack(Description, pack(replace(DESCRIPTION, extensions=extensions)))


def test_figures_arrive_as_they_were() -> None:
    assert figures_of(described(figures_extension(FIGURES))) == FIGURES
    assert figures_of(described(None)) is None
    assert figures_of(described({"load": 1})) is None


def test_an_older_server_says_nothing_of_prompts() -> None:
    values = figures_extension(FIGURES)["figures"]
    older = {name: value for name, value in values.items() if "prefill" not in name}
    assert len(older) == 5
    assert figures_of(described({"figures": older})) == replace(
        FIGURES, predicted_prefill_tokens_per_s=0.0, measured_prefill_tokens_per_s=0.0
    )


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.5, "1", None, True, [1]])
@pytest.mark.parametrize("name", figures_extension(FIGURES)["figures"])
def test_what_is_no_number_is_refused(name: str, wrong: Any) -> None:
    values = figures_extension(FIGURES)["figures"] | {name: wrong}
    with pytest.raises(RemoteProtocolError, match="figures are no map of numbers"):
        figures_of(replace(DESCRIPTION, extensions={"figures": values}))
    with pytest.raises(RemoteProtocolError, match="figures are no map of numbers"):
        figures_of(replace(DESCRIPTION, extensions={"figures": [values]}))
