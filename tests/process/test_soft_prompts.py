"""Soft prompts of PEFT on a distributed model: learned, saved and used as on transformers' own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

from llmnode.client.versions import CACHE
from llmnode.errors import ConfigError
from process.pairs import open_pair
from process.test_training import FURTHEST, _batch, _error, _with_head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from process.pairs import Pair

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOKENS = 5
PROMPTS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS),
    "encoder": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, encoder_hidden_size=16),
}


@pytest.fixture(scope="module", params=["llama", "bloom"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


def _prompted(pair: Pair, config: Any) -> tuple[Any, Any]:
    """Both models with the same prompts."""
    made = []
    for model in (copy.deepcopy(pair.alone), pair.served):
        torch.manual_seed(5)
        made.append(peft.get_peft_model(model, copy.deepcopy(config)))
    return made[0], made[1]


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_learn_and_generate_as_with_transformers_and_peft_alone_loads_them(
    pair: Pair, kind: str, tmp_path: Path
) -> None:
    theirs, ours = _prompted(pair, PROMPTS[kind])
    gradients = []
    for model in (theirs, ours):
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.5)
        for _ in range(2):  # two batches are gathered for one step
            (model(**_batch("right")).loss / 2).backward()
        gradients.append({name: each.grad for name, each in trained.items()})
        optimizer.step()
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert _error(gradients[1][name], gradient) < FURTHEST, name
    prompt = torch.arange(1, 6)[None]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    text = ours.generate(input_ids=prompt, **options)
    assert text.tolist() == theirs.generate(input_ids=prompt, **options).tolist()
    ours.save_pretrained(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(pair.alone), str(tmp_path))
    assert loaded.generate(input_ids=prompt, **options).tolist() == text.tolist()
    again = peft.PeftModel.from_pretrained(pair.served, str(tmp_path))
    assert again.generate(input_ids=prompt, **options).tolist() == text.tolist()


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_head_and_its_prompt_are_saved_together(pair: Pair, tmp_path: Path) -> None:
    theirs, ours = _with_head(pair, "sequence-classification", num_labels=3)
    fresh = copy.deepcopy(theirs)
    fresh.score.reset_parameters()
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=TOKENS)
    model = peft.get_peft_model(ours, config)
    batch = {"input_ids": _batch("right")["input_ids"][:1], "labels": torch.tensor([2])}
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.05)
    losses = []
    for _ in range(3):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path))
    with torch.no_grad():
        assert _error(model(**batch).logits, loaded(**batch).logits) < FURTHEST


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_prefix_tuning_is_refused_with_the_reason(pair: Pair) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)
    model = peft.get_peft_model(pair.served, config)
    is_renamed = CACHE == "cache"  # PEFT uses the old name of the argument
    with (
        pytest.warns(FutureWarning, match="Use `cache`") if is_renamed else nullcontext(),
        pytest.raises(ConfigError, match="prefix tuning makes keys and values"),
    ):
        model(**_batch("right"))
