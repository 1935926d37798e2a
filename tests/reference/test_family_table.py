"""The table of families in `python/llmnode/models/README.md` is what the tests here show.

    LLMNODE_WRITE_TABLE=1 tests/run tests/reference/test_family_table.py

writes it anew.
"""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.models.families import FAMILIES
from reference.small import CONFIGS, DENSE, EXPERTS, FUSED, embedding_scale, family_of_case, make_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

pytestmark = pytest.mark.reference

README = Path(__file__).parents[2] / "python/llmnode/models/README.md"
TABLE = re.compile(r"(?<=\n)\| family \|.*?\n(?!\|)", re.DOTALL)
WRITE = "LLMNODE_WRITE_TABLE"
HEAD = ("family", "blocks", "positions", "besides", "quantized", "shapes")


def test_the_table_of_families_is_that_of_the_tests() -> None:
    text, table = README.read_text(encoding="utf-8"), made_table()
    (found,) = TABLE.findall(text)
    if found != table and WRITE in os.environ:
        README.write_text(text.replace(found, table), encoding="utf-8")
        found = table
    again = f"{WRITE}=1 tests/run tests/reference/{Path(__file__).name}"
    assert found == table, f"python/llmnode/models/README.md has another table of families; write it anew: {again}"


def made_table() -> str:
    lines = [HEAD, ("---",) * len(HEAD), *(row(name) for name in sorted(FAMILIES))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(name: str) -> tuple[str, ...]:
    cases = [case for case in CONFIGS if family_of_case(case) == name]
    configs = [make_config(case) for case in cases]
    blocks = "transformers' but for attention" if FAMILIES[name].own_attention else "transformers'"
    if name in FUSED:
        blocks = "ours, in Rust too"
    quantized = "int8, nf4" if all(case in DENSE for case in cases) else ""
    known_by, besides = each_once(map(positions, configs)), each_once(map(features, cases, configs))
    return name, blocks, known_by, besides, quantized, str(len(cases))


def each_once(words: Iterable[Iterable[str]]) -> str:
    return ", ".join(dict.fromkeys(chain.from_iterable(words)))


def positions(config: Any) -> Iterator[str]:  # Any: each family's config has attributes of its own
    """How blocks know them."""
    ropes: Any = getattr(config, "rope_parameters", None)
    if FAMILIES[config.model_type].positions:
        yield "learned"
    elif getattr(config, "alibi", ropes is None):
        yield "ALiBi"
    else:
        kinds = {rope["rope_type"] for rope in ([ropes] if "rope_type" in ropes else ropes.values())}
        yield from ("rotary" if kind == "default" else f"{kind} rotary" for kind in sorted(kinds))


def features(case: str, config: Any) -> Iterator[str]:  # Any: likewise
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None):
        yield "windows in some blocks" if len(kinds) > 1 else "windows"
    if not all(getattr(config, "no_rope_layers", None) or [True]):
        yield "blocks without rotary embeddings"
    if case in EXPERTS:
        yield "experts"
    if getattr(config, "attn_logit_softcapping", None):
        yield "softcapped attention"
    if getattr(config, "final_logit_softcapping", None):
        yield "softcapped scores"
    if embedding_scale(config) != 1:
        yield "scaled embeddings"
    if any(getattr(config, name, 1) != 1 for name in ("logit_scale", "logits_scaling")):
        yield "scaled scores"
