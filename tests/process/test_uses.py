"""Whatever a program does with a transformers model, it may do with a distributed one, or is told why not."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

import llmnode
from llmnode.node import Node
from process.uses import Pair, uses
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

FAMILIES = ("llama", "gpt2", "mistral", "bloom", "opt")
"""Blocks of ours; learned positions; windows; ALiBi; learned positions that follow the mask."""
DRAWS = int(os.environ.get("LLMNODE_USES", "100"))
"""Of all families together."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    model = make_model(request.param, tied=False)
    folder = tmp_path_factory.mktemp("served")
    model.save_pretrained(folder)
    with ExitStack() as stack:
        config = {"worker": "thread", "threads": 1, "kv_tokens": 20_000}
        first = stack.enter_context(Node(str(folder), blocks="0:2", **config))
        stack.enter_context(Node(str(folder), blocks=f"2:{BLOCKS}", peers=first.addresses, **config))
        served = stack.enter_context(llmnode.connect(str(folder), peers=first.addresses))
        yield Pair(model, served, make_model(request.param, tied=False, seed=1, num_hidden_layers=1))


@pytest.mark.filterwarnings("ignore")
def test_any_use_gives_what_transformers_gives_or_is_refused(pair: Pair) -> None:
    @settings(
        max_examples=max(1, DRAWS // len(FAMILIES)),
        deadline=None,
        derandomize=DRAWS == 100,
        suppress_health_check=list(HealthCheck),
    )
    @given(uses)
    def check(drawn: list[Any]) -> None:
        pair.forget()
        pair.said.clear()
        for use in drawn:
            use.run(pair)
        for refusal in pair.said:
            note(refusal)

    check()
