"""A server that is told no model says which it serves, and what else the swarm has; or else how to begin."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llmnode.errors import ConfigError, EmbeddedModelMissing
from llmnode.node.app import NodeConfig, open_node
from llmnode.testing.exact_blocks import EXACT_MODEL
from unit.exact_nodes import ExactLoader, exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo

NO_DEVICE = "--device cuda: write cpu"
MISSING = "the embedded model is not installed: run `pip install it`"
THEIRS = f"the swarm has 1 server of {EXACT_MODEL.name} (blocks [0, {EXACT_MODEL.blocks}))"


class OtherLoader(ExactLoader):
    def open_model(self) -> ModelInfo:
        return replace(super().open_model(), name="another", digest=b"\1" * len(EXACT_MODEL.digest))


class NoLoader(ExactLoader):
    def open_model(self) -> ModelInfo:
        raise EmbeddedModelMissing(MISSING)


@in_trio
async def test_it_says_what_it_serves_and_what_others_have() -> None:
    lines: list[str] = []
    said = f"{EXACT_MODEL.name}, the embedded model, since none is named"
    async with exact_node(report=lines.append) as first:
        assert f"serving {said}" in lines
        lines.clear()
        async with exact_node(peers=first.addresses, report=lines.append):
            assert f"serving {said}" in lines, "it is the model of the others"
        lines.clear()
        async with exact_node(peers=first.addresses, report=lines.append, model="named"):
            assert not [line for line in lines if "none is named" in line]
        other = NodeConfig(worker="thread", make_loader=OtherLoader, peers=first.addresses)
        lines.clear()
        async with open_node(other, lines.append):
            (line,) = [line for line in lines if line.startswith("serving another, the embedded model")]
            assert THEIRS in line and line.endswith("name a model of these to join its servers")


class NoDeviceLoader(ExactLoader):
    def open_model(self) -> ModelInfo:
        raise ConfigError(NO_DEVICE)


@in_trio
async def test_what_is_wrong_with_another_option_is_no_want_of_a_model() -> None:
    with pytest.raises(ConfigError, match=f"^{NO_DEVICE}$"):
        async with open_node(NodeConfig(worker="thread", make_loader=NoDeviceLoader)):
            pass


@in_trio
async def test_without_a_model_to_serve_it_says_how_to_begin() -> None:
    async with exact_node(model="named") as first:
        with pytest.raises(ConfigError) as alone:
            async with open_node(NodeConfig(worker="thread", make_loader=NoLoader)):
                pass
        assert str(alone.value) == f"no model is named: name one, as in `llmnode serve org/name`; or {MISSING}"
        with pytest.raises(ConfigError) as joining:
            async with open_node(NodeConfig(worker="thread", make_loader=NoLoader, peers=first.addresses)):
                pass
        assert THEIRS in str(joining.value)
