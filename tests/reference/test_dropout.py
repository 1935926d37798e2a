"""Dropout of LoRA in blocks, of several probabilities in one batch, against PEFT with the same masks by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

from llmnode.client.absent_blocks import absent_blocks
from llmnode.client.block_adapters import BlockAdapters
from llmnode.core.operations import NO_DROPOUT, Dropout
from llmnode.errors import ConfigError
from llmnode.models.families import family_of
from reference.lora import FURTHEST, error
from reference.peft_batch import TARGETS, Found, batch_for, learn_cut, learn_whole, parts_of, with_adapters
from reference.small import make_model, open_saved, save_model
from unit.dropped import drop_by_hand

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.reference

DROPOUTS = [Dropout(0.1, (1,)), NO_DROPOUT, Dropout(0.5, (2,)), NO_DROPOUT, Dropout(0.05, (2**63 - 1,)), NO_DROPOUT]
"""Those of `ROWS`: two of three sequences of the adapter "one", and both of "two"."""


@pytest.mark.parametrize("case", TARGETS)
def test_a_batch_with_dropout_of_several_probabilities_is_as_each_sequence_in_peft(case: str, tmp_path: Path) -> None:
    whole = make_model(case, tied=False)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    model = with_adapters(case, whole)
    prefix = family_of(folder.config).block_prefix
    found = Found({name: parts_of(model, name, prefix) for name in ("one", "two")}, DROPOUTS)
    batch = batch_for(whole)
    without = learn_whole(model, found, batch)
    drop_by_hand(model, prefix, lambda: found.dropouts[found.row])
    theirs, ours = learn_whole(model, found, batch), learn_cut(folder, found, batch)
    for one, other, plain, dropout in zip(ours.scores, theirs.scores, without.scores, DROPOUTS, strict=True):
        assert error(one, other) < FURTHEST
        assert (error(one, plain) > 100 * FURTHEST) == bool(dropout)
    for one, other in zip(ours.of_inputs, theirs.of_inputs, strict=True):
        assert error(one, other) < FURTHEST
    for one, other in zip(ours.of_matrices, theirs.of_matrices, strict=True):
        assert error(one, other) < FURTHEST


@pytest.fixture
def adapters(tmp_path: Path) -> BlockAdapters:
    """Those of a model that PEFT has given LoRA with dropout, as is usual."""
    save_model(tmp_path, "llama", tied=True)
    folder = open_saved(tmp_path)
    made = BlockAdapters(folder.info.digest, absent_blocks(folder))
    config = peft.LoraConfig(r=2, lora_dropout=0.05, target_modules=["q_proj", "up_proj"])
    peft.inject_adapter_in_model(config, torch.nn.ModuleList(made.blocks))
    return made


def _layer(adapters: BlockAdapters) -> Any:  # Any: as PEFT types it
    return adapters.blocks[2].get_submodule("mlp.up_proj")


def test_a_model_drops_in_training_and_not_after_eval(adapters: BlockAdapters) -> None:
    blocks = torch.nn.ModuleList(adapters.blocks)
    for is_training, expected in ((True, 0.05), (False, 0.0)):
        blocks.train(is_training)
        (chosen,) = adapters.chosen(3)
        assert chosen.dropout == expected
    _layer(adapters).train()
    (chosen,) = adapters.chosen(3)
    with pytest.raises(ConfigError, match=r"0\.0 and 0\.05"):
        assert chosen.dropout


@pytest.mark.parametrize("module", [torch.nn.Dropout(1.0), torch.nn.AlphaDropout(0.1)], ids=str)
def test_dropout_that_servers_do_not_compute_is_refused_in_training_alone(
    module: torch.nn.Module, adapters: BlockAdapters
) -> None:
    _layer(adapters).lora_dropout["default"] = module
    with pytest.raises(ConfigError, match=r"block 2: mlp\.up_proj: servers compute dropout"):
        adapters.chosen(1)
    torch.nn.ModuleList(adapters.blocks).eval()
    assert adapters.chosen(1)
