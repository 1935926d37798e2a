"""A distributed model learns as transformers' own does: losses and gradients of families, through servers."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from safetensors import safe_open
from transformers import DynamicCache

import llmnode
from llmnode.client.versions import cache_of
from llmnode.errors import ConfigError
from process.company import at_once, in_company
from process.lora import ADAPTERS, learn_once
from process.pairs import after_blocks, open_pair, prompted, with_head
from reference.small import BLOCKS, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from process.pairs import Pair

pytestmark = [pytest.mark.process, pytest.mark.slow]

FAMILIES = ("llama", "gpt2", "bloom", "falcon", "gemma", "mixtral")
LENGTHS = (11, 3, 7)
"""Tokens of the rows of a batch: longer and shorter than a window."""
FURTHEST = 1e-5
"""The norm-relative error of a gradient in fp32."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path: Path = tmp_path_factory.mktemp(request.param)
    with open_pair(request.param, path, ("0:2", f"1:{BLOCKS}")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def frozen(pair: Pair) -> Iterator[None]:
    yield
    for model in (pair.alone, pair.served):
        model.requires_grad_(False)
        model.zero_grad()


def _batch(side: str) -> dict[str, torch.Tensor]:
    """Rows that are padded at one side, and their labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    order = torch.arange(max(LENGTHS)).expand(ids.shape)
    order = order.flip(1) if side == "left" else order
    mask = order < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask, -100)
    if side == "left":  # padding predicts nothing
        labels[torch.arange(len(LENGTHS)), max(LENGTHS) - torch.tensor(LENGTHS)] = -100
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def _ends_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that a client holds. Both models name them alike."""
    return {
        name: each for name, each in model.named_parameters() if not any(part.isdigit() for part in name.split("."))
    }


@pytest.mark.parametrize("side", ["left", "right"])
def test_losses_and_gradients_of_what_goes_in_are_those_of_one_process(pair: Pair, side: str) -> None:
    batch = _batch(side)
    real = batch["attention_mask"].bool()
    embedded = pair.alone.get_input_embeddings()(batch.pop("input_ids"))
    pair.served.train()
    outputs, gradients = [], []
    for model in (pair.alone, pair.served):
        given = embedded.clone().requires_grad_()
        outputs.append(model(inputs_embeds=given, **batch))
        outputs[-1].loss.backward()
        assert given.grad is not None
        gradients.append(given.grad)
    theirs, ours = outputs
    assert _error(ours.loss, theirs.loss) < FURTHEST
    assert _error(ours.logits[real], theirs.logits[real]) < FURTHEST
    assert _error(gradients[1][real], gradients[0][real]) < FURTHEST
    assert not gradients[1][~real].any()
    assert cache_of(ours) is None


def test_ends_learn_and_sessions_use_what_they_have_learned(pair: Pair) -> None:
    prompt = torch.arange(1, 6)[None]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = pair.served.generate(prompt, **options)
    batch = _batch("right")
    kept = [
        {name: each.detach().clone() for name, each in _ends_of(model).items()} for model in (pair.alone, pair.served)
    ]
    texts = []
    for model in (pair.alone, pair.served):
        for parameter in _ends_of(model).values():
            parameter.requires_grad_()
        optimizer = torch.optim.SGD(_ends_of(model).values(), lr=3.0)
        model(**batch).loss.backward()
        optimizer.step()
        texts.append(model.generate(prompt, **options))
    theirs, ours = (_ends_of(model) for model in (pair.alone, pair.served))
    assert theirs.keys() == ours.keys()
    assert len(ours) >= 3
    for name, parameter in theirs.items():
        assert _error(ours[name].grad, parameter.grad) < FURTHEST, name
    assert texts[0].tolist() == texts[1].tolist() != before.tolist()
    with torch.no_grad():
        for model, former in zip((pair.alone, pair.served), kept, strict=True):
            for name, parameter in _ends_of(model).items():
                parameter.copy_(former[name])
    assert pair.served.generate(prompt, **options).tolist() == before.tolist()


def test_a_module_between_spans_has_the_gradients_of_one_process(pair: Pair) -> None:
    ids = _batch("right")["input_ids"][:1]
    torch.manual_seed(6)
    theirs, ours = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    ours.load_state_dict(theirs.state_dict())
    expected = after_blocks(pair.alone, 3, theirs, ids)
    model = pair.served
    scores = model.score(model.remote_blocks[3:](ours(model.remote_blocks[:3](model.embed(ids)))))
    assert _error(scores, expected) < FURTHEST
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(7))
    for each in (expected, scores):
        (each * weights).sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert _error(one.grad, other.grad) < FURTHEST


@pytest.mark.parametrize("rows", [1, len(LENGTHS)], ids=["one for all", "each"])
def test_deep_prompts_have_the_outputs_and_gradients_of_one_process(
    pair: Pair, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through uneven spans, and as microbatches."""
    monkeypatch.setattr("llmnode.session.passes.MOST_POSITIONS", 12)
    batch = _batch("right")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    real = mask.bool()
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(BLOCKS, rows, min(LENGTHS), pair.served.info.hidden_size, generator=generator)
    weights = torch.randn(*ids.shape, VOCABULARY, generator=generator)
    prompts = [drawn.clone().requires_grad_() for _ in range(2)]
    with prompted(pair.alone, prompts[0]):
        theirs = pair.alone(ids, attention_mask=mask).logits
    ours = pair.served.score(pair.served.remote_blocks(pair.served.embed(ids), mask, prompts[1]))
    assert _error(ours[real], theirs[real]) < FURTHEST
    for scores in (theirs, ours):
        (scores * weights)[real].sum().backward()
    assert prompts[0].grad is not None
    assert prompts[1].grad is not None
    assert _error(prompts[1].grad, prompts[0].grad) < FURTHEST


def test_the_states_before_and_after_all_blocks_are_there(pair: Pair) -> None:
    embedded = pair.alone.get_input_embeddings()(_batch("right")["input_ids"]).requires_grad_()
    theirs, ours = (
        model(inputs_embeds=embedded, output_hidden_states=True).hidden_states for model in (pair.alone, pair.served)
    )
    assert len(ours) == len(theirs)
    for place in (0, -1):
        assert _error(ours[place], theirs[place]) < FURTHEST
    with pytest.raises(ConfigError, match="between blocks"):
        ours[2].sum()


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_forward_with_gradients_takes_no_cache_and_only_what_servers_can_do(pair: Pair) -> None:
    model, batch = pair.served, _batch("right")
    embedded = model.get_input_embeddings()(batch["input_ids"]).requires_grad_()
    with torch.no_grad():
        cache = cache_of(model(batch["input_ids"], use_cache=True))
    with cache, pytest.raises(ConfigError, match="do not go through a cache"):
        model(inputs_embeds=embedded, cache=cache)
    with pytest.raises(ConfigError, match="keeps no cache"):
        model(inputs_embeds=embedded, use_cache=True)
    with pytest.raises(ConfigError, match="leave gaps"):
        model(inputs_embeds=embedded, position_ids=2 * torch.arange(11)[None])
    with pytest.raises(ConfigError, match="follows padding"):
        model(inputs_embeds=embedded, attention_mask=batch["attention_mask"], labels=batch["input_ids"])
    with pytest.raises(ConfigError, match="output_attentions"):
        model(inputs_embeds=embedded, output_attentions=True)
    model.get_output_embeddings().requires_grad_(True)
    with pytest.raises(ConfigError, match=f"token {VOCABULARY} is not one"):
        model(torch.tensor([[1, VOCABULARY]]))


def test_what_trainers_ask_of_a_model_is_answered_as_its_family_does(pair: Pair) -> None:
    theirs, ours = pair.alone, pair.served
    assert ours.base_model is ours.get_submodule(theirs.base_model_prefix)
    assert [name for name, each in ours.named_modules() if each is ours.get_output_embeddings()] == ["lm_head"]
    for name in ("_tied_weights_keys", "all_tied_weights_keys", "_no_split_modules", "config_class", "vocab_size"):
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    for name in ("get_decoder", "get_encoder"):
        paths = [
            next(path for path, each in model.named_modules() if each is getattr(model, name)())
            for model in (theirs, ours)
        ]
        assert paths[0] == paths[1], name
    batch = _batch("right")
    real = batch.pop("attention_mask").bool()
    given = {"input_ids": batch["input_ids"], "attention_mask": real.long(), "use_cache": False}
    with torch.no_grad():
        expected, found = theirs.base_model(**given), ours.base_model(**given)
        as_tuple = ours.base_model(**given, return_dict=False)
    assert type(found) is type(expected)
    assert _error(found.last_hidden_state[real], expected.last_hidden_state[real]) < FURTHEST
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], found.last_hidden_state)


def test_a_loss_over_the_decoders_states_learns_as_in_one_process(pair: Pair) -> None:
    """TRL trains so: it scores the states of `base_model` itself, a part at a time."""
    batch = _batch("right")
    found = []
    for model in (pair.alone, pair.served):
        head = model.get_output_embeddings().requires_grad_(True)
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        states = model.base_model(**given, use_cache=False).last_hidden_state
        scores = head(states[:, :-1].flatten(0, 1))
        loss = torch.nn.functional.cross_entropy(scores, batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        found.append((loss.detach(), head.weight.grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert _error(ours, theirs) < FURTHEST


@pytest.mark.parametrize("pair", ["llama", "gpt2"], indirect=True)
def test_a_copy_of_a_model_learns_by_itself_over_the_same_servers(pair: Pair) -> None:
    batch = _batch("right")
    copied = copy.deepcopy(pair.served)
    before = pair.served(**batch).logits
    assert _error(copied(**batch).logits, before) < FURTHEST
    copied.get_output_embeddings().requires_grad_(True)
    copied(**batch).loss.backward()
    with torch.no_grad():
        for each in copied.get_output_embeddings().parameters():
            each.sub_(each.grad)
    prompt = torch.arange(1, 4)[None]
    assert _error(copied(prompt).logits, pair.served(prompt).logits) > 0.01
    assert _error(pair.served(**batch).logits, before) < FURTHEST
    here = [each for each in copied.parameters() if each.untyped_storage().nbytes() >= each.nbytes]
    assert sum(each.nbytes for each in here) == sum(each.nbytes for each in _ends_of(copied).values())


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_module_around_some_blocks_can_be_copied(pair: Pair) -> None:
    module = torch.nn.Sequential(pair.served.remote_blocks[:1], pair.served.remote_blocks[1:2])
    copied = copy.deepcopy(module)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), copied)
    given = torch.randn(1, 3, pair.served.remote_blocks.hidden_size)
    assert copied(given).requires_grad
    assert not module(given).requires_grad


def test_no_state_dict_has_the_weights_of_blocks_and_none_may_be_trained_or_loaded(pair: Pair) -> None:
    state = pair.served.state_dict()
    assert set(state) == set(_ends_of(pair.served))
    pair.served.load_state_dict(state)
    (blocks,) = {name.removesuffix(".0") for name, _ in pair.served.named_modules() if name.endswith(".0")}
    path, layer = next(
        (path, each)
        for path, each in pair.served.named_modules()
        if path.startswith(f"{blocks}.1.") and hasattr(each, "weight")
    )
    with pytest.raises(RuntimeError, match="are with the servers"):
        pair.served.load_state_dict({**state, f"{path}.weight": torch.ones(layer.weight.shape)})
    layer.requires_grad_(True)
    with pytest.raises(ConfigError, match="keep it frozen"):
        pair.served(**_batch("right"))
    with torch.no_grad():
        pair.served(**_batch("right"))


def test_lora_in_remote_blocks_has_the_gradients_of_one_process_beside_another_clients_adapter(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through uneven spans that overlap, as microbatches, in batches that have both adapters."""
    monkeypatch.setattr("llmnode.session.passes.MOST_POSITIONS", 12)
    batch = _batch("right")
    expected = [learn_once(pair.alone, name, batch) for name in ADAPTERS]
    with (
        llmnode.connect(pair.folder, peers=pair.peers) as other,
        in_company(len(ADAPTERS), monkeypatch) as adapters_in_a_batch,
    ):
        models = zip((pair.served, other), ADAPTERS, strict=True)
        found = at_once([partial(learn_once, model, name, batch) for model, name in models])
    assert set(adapters_in_a_batch.values()) == {len(ADAPTERS)}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, each in theirs.items():
            assert each.norm() > 0, name
            assert _error(ours[name], each) < FURTHEST, name


def test_an_adapter_that_is_drawn_after_a_seed_is_that_of_the_whole_model(pair: Pair) -> None:
    drawn = []
    for model in (pair.alone, pair.served):
        torch.manual_seed(7)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
        made = peft.get_peft_model(copy.deepcopy(model), config)
        drawn.append([(name, each) for name, each in made.named_parameters() if each.requires_grad])
    theirs, ours = drawn
    assert theirs
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(ours, theirs, strict=True))
    if pair.alone.config.model_type == "mixtral":
        with pytest.raises(ConfigError, match=r"mlp\.(gate|experts): servers compute no LoRA of the parameter"):
            made(**_batch("right"))


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_head_ignores_what_a_tokenizer_adds_and_an_embedding_checks_its_tokens(pair: Pair) -> None:
    _, ours = with_head(pair, "sequence-classification", num_labels=3)
    ids = torch.tensor([[5, 6, 7], [8, 9, 1]])
    with torch.no_grad():
        logits = ours(input_ids=ids, token_type_ids=torch.zeros_like(ids), attention_mask=torch.ones_like(ids)).logits
        assert torch.equal(logits, ours(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)
    with pytest.raises(ConfigError, match=f"token {VOCABULARY} is not one"):
        pair.served.embed(torch.tensor([[1, VOCABULARY]]))


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_weights_that_are_with_the_servers_are_never_written(pair: Pair, tmp_path: Path) -> None:
    pair.served.requires_grad_(True)
    try:
        pair.served.save_pretrained(tmp_path)
    finally:
        pair.served.requires_grad_(False)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert not [name for name in saved.keys() if ".layers." in name or ".h." in name]  # noqa: SIM118


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("sequence-classification", {"num_labels": 3}),
        ("sequence-classification", {"num_labels": 1}),
        ("token-classification", {"num_labels": 4}),
    ],
    ids=["classes", "number", "tokens"],
)
def test_heads_learn_as_those_of_transformers(pair: Pair, head: str, options: dict[str, int]) -> None:
    theirs, ours = with_head(pair, head, **options)
    batch = _batch("left")
    per_token = head.startswith("token")
    generator = torch.Generator().manual_seed(2)
    count = options["num_labels"]
    if per_token:
        labels = torch.randint(count, batch["input_ids"].shape, generator=generator)
        labels = labels.masked_fill(batch["labels"] == -100, -100)
    elif count == 1:
        labels = torch.randn(len(LENGTHS), generator=generator)
    else:
        labels = torch.randint(count, (len(LENGTHS),), generator=generator)
    outputs, gradients = [], []
    for model in (theirs, ours):
        embedded = pair.alone.get_input_embeddings()(batch["input_ids"]).requires_grad_()
        outputs.append(model(inputs_embeds=embedded, attention_mask=batch["attention_mask"], labels=labels))
        outputs[-1].loss.backward()
        named = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        gradients.append({**named, "embedded": embedded.grad})
    assert _error(outputs[1].loss, outputs[0].loss) < FURTHEST
    kept = batch["attention_mask"].bool() if per_token else slice(None)
    assert _error(outputs[1].logits[kept], outputs[0].logits[kept]) < FURTHEST
    real = batch["attention_mask"].bool()
    for name, gradient in gradients[0].items():
        mine = gradients[1][name]
        assert (
            _error(mine[real], gradient[real]) < FURTHEST if name == "embedded" else _error(mine, gradient) < FURTHEST
        )
    batch = _batch("right")
    with torch.no_grad():
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        theirs_logits, ours_logits = (model(**given).logits for model in (theirs, ours))
    kept = batch["attention_mask"].bool() if per_token else slice(None)
    assert _error(ours_logits[kept], theirs_logits[kept]) < FURTHEST


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_head_that_would_read_padding_or_that_there_is_not_is_refused(pair: Pair) -> None:
    for wrong in ({"head": "causal"}, {"head": "sequence-classification", "labels": 3}):
        with pytest.raises(ConfigError, match=r"choose one of|has no labels"):
            pair.served.with_head(**wrong)
    model = pair.served.with_head("sequence-classification", num_labels=2, pad_token_id=0)
    batch = _batch("right")
    embedded = model.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(ConfigError, match="row 1 ends in padding"):
        model(inputs_embeds=embedded, attention_mask=batch["attention_mask"])
    with pytest.raises(ConfigError, match="prefix tuning"):
        model(batch["input_ids"], cache=DynamicCache())
