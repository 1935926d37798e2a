"""Low-rank adapters over frozen blocks, several in one batch, against PEFT over the whole model in one process."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

from llmnode.client.absent_blocks import absent_blocks
from llmnode.client.block_adapters import BlockAdapters
from llmnode.compute.load_executor import load_executor
from llmnode.core.operations import Close, Open, Slice
from llmnode.core.span import Span
from llmnode.errors import ConfigError, NumericOverflow
from llmnode.models.families import family_of
from llmnode.models.load import load_ends
from llmnode.models.tensors import from_bytes, to_bytes
from reference.lora import FURTHEST, adopt, digest, error
from reference.peft_batch import TARGETS, Found, batch_for, learn_cut, learn_whole, parts_of, with_adapters
from reference.small import BLOCKS, HIDDEN_SIZE, KV_TOKENS, VOCABULARY, make_model, open_saved, save_model, session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llmnode.models.lora import Part
    from llmnode.wire.adapter import Adapter


pytestmark = pytest.mark.reference


@pytest.mark.parametrize("case", TARGETS)
def test_outputs_and_gradients_of_a_batch_are_those_of_peft_for_each_sequence(case: str, tmp_path: Path) -> None:
    whole = make_model(case, tied=False)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    model = with_adapters(case, whole)
    prefix = family_of(folder.config).block_prefix
    found = Found({name: parts_of(model, name, prefix) for name in ("one", "two")})
    batch = batch_for(whole)
    theirs, ours = learn_whole(model, found, batch), learn_cut(folder, found, batch)
    for one, other in zip(ours.scores, theirs.scores, strict=True):
        assert error(one, other) < FURTHEST
    for one, other in zip(ours.of_inputs, theirs.of_inputs, strict=True):
        assert error(one, other) < FURTHEST
    for one, other in zip(ours.of_matrices, theirs.of_matrices, strict=True):
        assert other.norm() > 0
        assert error(one, other) < FURTHEST


def _sizes(parts: Mapping[int, Part]) -> dict[int, dict[str, Any]]:
    return {
        block: {name: (lora.a.shape, lora.b.shape, lora.scale) for name, lora in part.items()}
        for block, part in parts.items()
    }


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("case", TARGETS)
def test_a_client_without_weights_has_the_layers_that_peft_finds_in_the_whole_model(
    case: str, number: int, tmp_path: Path
) -> None:
    whole = make_model(case, tied=True)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    config = peft.LoraConfig(r=3, target_modules=TARGETS[case][number])
    adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
    (none,) = adapters.chosen(1)
    assert none.adapter is None
    peft.inject_adapter_in_model(config, torch.nn.ModuleList(adapters.blocks))
    theirs = parts_of(peft.get_peft_model(whole, config), "default", family_of(folder.config).block_prefix)
    (chosen,) = adapters.chosen(1)
    assert _sizes(chosen.parts) == _sizes(theirs)


NORMS = {"llama": "input_layernorm", "gpt2": "ln_1", "mixtral": "post_attention_layernorm"}


@pytest.mark.parametrize("case", NORMS)
def test_training_of_a_norm_in_a_block_is_refused_and_not_left_out(case: str, tmp_path: Path) -> None:
    """`modules_to_save=["norm"]` names those of blocks, too. One process would train them."""
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    configs: list[tuple[peft.PeftConfig, str]] = [
        (peft.LoraConfig(target_modules=TARGETS[case][0], modules_to_save=[NORMS[case]]), "ModulesToSaveWrapper"),
        (peft.LNTuningConfig(target_modules=[NORMS[case]]), "LNTuningLayer"),
    ]
    for config, layer in configs:
        adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
        peft.PeftModel(torch.nn.ModuleList(adapters.blocks), config)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"{NORMS[case]}: servers compute LoRA alone, and this is {layer}"):
            adapters.chosen(1)


@pytest.mark.parametrize("name", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_an_adapter_is_not_merged_into_weights_that_are_with_servers(
    case: str, safe_merge: bool, name: str, tmp_path: Path
) -> None:
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
    config = peft.LoraConfig(r=2, target_modules=TARGETS[case][0])
    model: Any = peft.PeftModel(torch.nn.ModuleList(adapters.blocks), config)  # type: ignore[arg-type]
    (before,) = adapters.chosen(1)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(ConfigError, match=r"with the servers: save it, and merge it where"):
            getattr(each, name)(safe_merge=safe_merge)
    (after,) = adapters.chosen(1)
    assert after.adapter is before.adapter is not None


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_an_adapter_is_made_anew_only_when_a_matrix_has_changed(options: dict[str, bool], tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    folder = open_saved(tmp_path)
    adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
    blocks = torch.nn.ModuleList(adapters.blocks)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]), blocks)

    def now() -> Adapter:
        (chosen,) = adapters.chosen(1)
        adapter = chosen.adapter
        assert adapter is not None
        return adapter

    first = now()
    assert now() is first
    trained = [each for each in blocks[2].parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.ones_like(each)
    torch.optim.AdamW(trained, lr=0.1, **options).step()
    second = now()
    assert second.digest != first.digest
    assert second.largest == 4.0, "the scale: an alpha of 8 by a rank of 2"
    assert [block for block in second.parts if second.parts[block] != first.parts[block]] == [2]
    trained[0].data += 1.0  # as loops by hand do, and torch does not count
    assert now().digest not in {first.digest, second.digest}
    trained[0].data[0, 0] = -50.0
    assert now().largest == 50.0
    with torch.no_grad():
        trained[0].fill_(float("nan"))
    with pytest.raises(NumericOverflow, match=r"not finite.*smaller learning rate"):
        now()


def test_what_a_fused_optimizer_has_changed_is_seen_when_it_is_not_trained_any_more(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    folder = open_saved(tmp_path)
    adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
    blocks = torch.nn.ModuleList(adapters.blocks)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), blocks)
    trained = [each for each in blocks.parameters() if each.requires_grad]

    def frozen() -> Adapter | None:
        for each in trained:
            each.requires_grad_(False)
        (chosen,) = adapters.chosen(1)
        return chosen.adapter

    before = frozen()
    for each in trained:
        each.requires_grad_(True).grad = torch.ones_like(each)
    torch.optim.AdamW(trained, lr=0.1, fused=True).step()
    after = frozen()
    assert before is not None and after is not None
    assert after.digest != before.digest


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "mixtral"])
def test_sessions_with_different_adapters_share_prefills_and_decodes(case: str, tmp_path: Path) -> None:
    whole = make_model(case, tied=False)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    model = with_adapters(case, whole)
    parts = {name: parts_of(model, name, family_of(folder.config).block_prefix) for name in ("one", "two")}
    executor, ends = load_executor(folder, Span(0, BLOCKS), KV_TOKENS), load_ends(folder)
    for name, own in parts.items():
        adopt(executor, digest(name), own)
    names = ("one", None, "two", "one")
    texts = torch.randint(VOCABULARY, (len(names), 14), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = []
        for name, text in zip(names, texts, strict=True):
            if name is None:
                with model.disable_adapter():
                    expected.append(model(text[None]).logits[0])
            else:
                model.set_adapter(name)
                expected.append(model(text[None]).logits[0])
    for number, name in enumerate(names):
        adapter = None if name is None else digest(name)
        assert executor.apply(Open(session(number), executor.span, 20, adapter=adapter))
    scores: list[list[torch.Tensor]] = [[] for _ in names]
    for start, end in pairwise((0, 7, 8, 9, 12, 13, 14)):
        slices = [
            Slice(session(number), start, end - start, to_bytes(ends.embed(text[start:end].tolist(), start)))
            for number, text in enumerate(texts)
        ]
        for own_scores, output in zip(scores, executor.forward(slices), strict=True):
            own_scores.append(ends.logits(from_bytes(output, HIDDEN_SIZE)))
    for own_scores, theirs in zip(scores, expected, strict=True):
        assert error(torch.cat(own_scores), theirs) < FURTHEST
    for number in range(len(names)):
        executor.apply(Close(session(number)))
