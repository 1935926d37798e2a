"""Soft prompts of PEFT on a distributed model: learned, saved and used as on transformers' own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import peft
import pytest
import safetensors.torch
import torch

from llmnode.client.generate import run_blocks
from llmnode.client.prompt_tuning import MODULES
from llmnode.client.versions import CACHE
from llmnode.errors import ConfigError
from llmnode.wire import deep_prompts
from process.pairs import open_pair, prompted, with_head
from process.test_training import FAMILIES, FURTHEST, _batch, _error
from process.tuned import greedy, logits_of, weights_of

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


@pytest.fixture(scope="module", params=FAMILIES)
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
    theirs, ours = with_head(pair, "sequence-classification", num_labels=3)
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
    with pytest.raises(ConfigError, match="prefix tuning makes keys and values"):
        model.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=2)


@pytest.fixture(params=["ptune", "deep_ptune"])
def tuned(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Any]:
    """The served model with trainable prompts of Petals, which are large enough to matter."""
    torch.manual_seed(2)
    pair.served.tune_prompts(request.param, TOKENS)
    for name, each in pair.served.named_parameters():
        if each.requires_grad:
            torch.nn.init.normal_(each, std=0.3)
            assert "prompt_embeddings" in name
    yield pair.served
    pair.served.tune_prompts(None)
    assert not any(each.requires_grad for each in pair.served.parameters())


@pytest.mark.parametrize("side", ["left", "right"])
def test_trained_prompts_have_the_loss_and_gradients_of_one_process(pair: Pair, tuned: Any, side: str) -> None:
    batch = _batch(side)
    prompts, deep = weights_of(tuned)
    trained = [each.requires_grad_() for each in (prompts, deep) if each is not None]
    rows = [row[seen] for row, seen in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)]
    logits = [logits_of(pair.alone, row, prompts, deep) for row in rows]
    predicted = torch.cat([each[:-1] for each in logits])
    loss = torch.nn.functional.cross_entropy(predicted, torch.cat([row[1:] for row in rows]))
    theirs = torch.autograd.grad(loss, trained)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    output = tuned(**batch)
    output.loss.backward()
    ours = [each for each in tuned.parameters() if each.requires_grad]
    real = batch["attention_mask"].bool()
    assert _error(output.loss, loss) < FURTHEST
    assert _error(output.logits[real], torch.cat(logits)) < FURTHEST
    assert output.logits.shape[:2] == batch["input_ids"].shape
    assert _error(ours[0].grad, theirs[0]) < FURTHEST
    if deep is not None:
        by_block = ours[1].grad.unflatten(1, (-1, tuned.info.hidden_size)).transpose(0, 1)[:, None]
        assert _error(by_block, theirs[1]) < FURTHEST
    with torch.no_grad():
        assert _error(tuned(**batch).logits[real], torch.cat(logits)) < FURTHEST  # in sessions
        hidden = tuned.embed(batch["input_ids"])
        with tuned.inference_session(16, rows=len(hidden)) as session:  # hidden states alone have no prompts
            assert _error(session.step(hidden), tuned.remote_blocks(hidden)) < FURTHEST


def test_texts_after_trained_prompts_are_those_of_one_process_and_prompts_are_saved(
    pair: Pair, tuned: Any, tmp_path: Path
) -> None:
    prompts, deep = weights_of(tuned)
    texts = [[5, 17, 99], [3, 42, 7, 11, 60]]
    ids = torch.tensor([[0, 0, *texts[0]], texts[1]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
    expected = [greedy(pair.alone, text, 6, prompts, deep) for text in texts]
    assert tuned.generate(ids, attention_mask=mask, **options)[:, 5:].tolist() == expected
    tuned.save_pretrained(tmp_path)
    one = torch.tensor([texts[1]])
    with torch.no_grad():
        scores = tuned(one).logits
    with tuned.open_cache(12) as cache:
        first = tuned.generate(one, cache=cache, **{**options, "max_new_tokens": 3})
        with torch.no_grad():
            for each in tuned.parameters():
                if each.requires_grad:
                    each.mul_(-2)  # the cache keeps what it was opened with
        again = tuned.generate(first, cache=cache, **{**options, "max_new_tokens": 3})
        assert again[0, 5:].tolist() == expected[1]
        with pytest.raises(ConfigError, match="cannot be exported"):
            cache.export(tmp_path / "session", [])
    with torch.no_grad():
        assert _error(tuned(one).logits, scores) > 0.01
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[-2] for name in saved} == {
        name for name, each in zip(MODULES, (prompts, deep), strict=True) if each is not None
    }
    tuned.load_state_dict(saved, strict=False)
    assert tuned.generate(one, **options)[0, 5:].tolist() == expected[1]
    beams = tuned.generate(one, num_beams=2, num_return_sequences=2, **options)
    assert len({*map(tuple, beams.tolist())}) == 2


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_head_reads_a_text_after_its_prompts(pair: Pair) -> None:
    theirs, ours = with_head(pair, "sequence-classification", num_labels=3)
    ours.tune_prompts("deep_ptune", TOKENS)
    batch = _batch("left")
    with torch.no_grad():
        logits = ours(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    prompts, deep = weights_of(ours)
    assert deep is not None
    for row, (ids, seen) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        embedded = torch.cat([prompts, theirs.get_input_embeddings()(ids[seen])])[None]
        with prompted(theirs, deep):
            assert _error(logits[row], theirs(inputs_embeds=embedded).logits[0]) < FURTHEST


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_prompts_that_are_removed_are_gone(pair: Pair, tmp_path: Path) -> None:
    served, ids = pair.served, torch.tensor([[5, 17, 99]])
    names = {name for name, _ in served.named_modules()}
    served.tune_prompts("deep_ptune", TOKENS)
    added = {name for name, _ in served.named_modules()} - names
    assert {name.rpartition(".")[2] for name in added} == {*MODULES}
    served.tune_prompts("ptune", TOKENS)
    assert {name for name, _ in served.named_modules()} - names == {name for name in added if MODULES[1] not in name}
    served.tune_prompts(None)
    assert {name for name, _ in served.named_modules()} == names
    assert (served.config.tuning_mode, served.decoder.prefix, served.decoder.prompt_positions) == (None, None, 0)
    for are_learned in (True, False):
        with torch.set_grad_enabled(are_learned):
            assert _error(served(ids).logits, pair.alone(ids).logits) < FURTHEST
    with pytest.raises(ConfigError, match="nothing here is trained"):
        served.save_pretrained(tmp_path)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_prompts_that_do_not_fit_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, length in (("lora", 3), ("ptune", 0), ("ptune", 128), ("deep_ptune", 2.5), ("deep_ptune", -1)):
        with pytest.raises(ConfigError, match=r"tuning_mode|pre_seq_len"):
            pair.served.tune_prompts(mode, length)
    monkeypatch.setattr(deep_prompts, "MOST_PASS_BYTES", 10 * 4 * pair.served.info.hidden_size)
    with pytest.raises(ConfigError, match="servers take 10 prompts"):
        pair.served.tune_prompts("deep_ptune", 11)
    pair.served.tune_prompts("deep_ptune", 10)
    pair.served.tune_prompts("ptune", 120)
    embeds = torch.zeros(1, 9, 64)
    for given in (embeds, embeds.clone().requires_grad_()):
        with pytest.raises(ConfigError, match="context"), torch.set_grad_enabled(given.requires_grad):
            pair.served(inputs_embeds=given)
    pair.served.tune_prompts(None)


def test_lengths_count_the_prompts_and_those_of_hidden_states_alone_do_not(pair: Pair) -> None:
    served, most = pair.served, pair.served.info.context_tokens
    served.tune_prompts("ptune", most - 28)
    with served.inference_session(most) as session, torch.no_grad():
        assert session.step(served.embed(torch.ones(1, most, dtype=torch.long))).shape[1] == most
    with served.open_cache(8) as cache, torch.no_grad():
        for _ in range(2):  # before the prompts are run, and after
            assert cache.get_max_length() == 8
            with pytest.raises(ConfigError, match="holds 8: open it with max_length=9"):
                cache.grow_to(9)
            served(torch.ones(1, 2, dtype=torch.long), cache=cache)
    longest = served.generation_config.max_length
    served.generation_config.max_length = 10 * most
    with pytest.warns(UserWarning, match="texts end at 28 tokens"):
        text = served.generate(torch.ones(1, 24, dtype=torch.long), do_sample=False, pad_token_id=0, eos_token_id=None)
    assert text.shape[1] == 28
    served.generation_config.max_length = longest
    if pair.alone.config.model_type == "gpt2":
        for are_learned in (True, False):
            with torch.set_grad_enabled(are_learned):
                assert served(torch.ones(1, 2, dtype=torch.long), position_ids=torch.tensor([[26, 27]])).logits.numel()
                with pytest.raises(ConfigError, match="embeddings for 0 to 27 after"):
                    served(torch.ones(1, 2, dtype=torch.long), position_ids=torch.tensor([[27, 28]]))
    served.tune_prompts(None)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_the_prompts_of_beams_are_run_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    pair.served.tune_prompts("deep_ptune", 40)
    prompts, deep = weights_of(pair.served)
    run: list[int] = []

    async def counted(session: Any, states: torch.Tensor) -> torch.Tensor:
        run.append(len(states))
        return await run_blocks(session, states)

    monkeypatch.setattr("llmnode.client.rows.run_blocks", counted)
    text, options = [5, 17, 99], {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 3}
    several = pair.served.generate(torch.tensor([text]), num_beams=3, num_return_sequences=3, **options)
    assert sum(run) < 2 * 40, "and not for each beam"
    assert len({*map(tuple, several.tolist())}) == 3
    best = max(several[:, 3:].tolist(), key=lambda new: _likelihood(pair.alone, text, new, prompts, deep))
    assert several[0, 3:].tolist() == best
    pair.served.tune_prompts(None)


def _likelihood(alone: Any, text: list[int], new: list[int], prompts: torch.Tensor, deep: torch.Tensor | None) -> float:
    with torch.no_grad():
        scores = logits_of(alone, torch.tensor(text + new), prompts, deep).log_softmax(-1)
    return sum(float(scores[len(text) - 1 + at, token]) for at, token in enumerate(new))
