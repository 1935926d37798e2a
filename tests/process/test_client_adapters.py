"""LoRA inside remote blocks: PEFT over a distributed model gives what it gives over the whole one in one process."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode.core.operations import NO_DROPOUT, Dropout
from llmnode.errors import ConfigError
from llmnode.wire.dropout import SEEDS
from unit.dropped import drop_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

TEXTS = ["Hello, my name is", "Once upon a time there"]
FURTHEST = 1e-5
"""The norm-relative error of a loss. Gradients may have three times that: through 30 blocks, those of one process
are up to 1.8e-5 from their values in fp64."""
CONFIGS = {
    "one": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "two": {"r": 3, "target_modules": ["down_proj", "k_proj"], "layers_to_transform": [2, 11, 12, 29]},
}


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def adapted(model: Any, name: str, **options: str) -> Any:  # Any: as PEFT types it
    """The model with an adapter of PEFT, whose numbers are the same for every model, and matter."""
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name]), **options)
    draw(made, len(name) + ord(name[0]))
    return made


def draw(model: Any, seed: int, size: float = 0.02) -> None:
    """Give all matrices of its adapters other numbers, of about this size."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in sorted(model.named_parameters()):
        if "lora_" in path:
            parameter.data = size * torch.randn(parameter.shape, generator=generator)


@contextmanager
def whole(model: Any, name: str) -> Iterator[Any]:
    """The model in one process, with an adapter while the context lasts."""
    made = adapted(model, name)
    try:
        yield made
    finally:
        made.unload()


def learn(model: Any, inputs: Any, steps: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses of some steps of SGD, and the gradients of the last one."""
    labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
    trained = {path: each for path, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
        gradients = {path: each.grad.clone() for path, each in trained.items()}
        optimizer.step()
    return losses, gradients


def test_two_clients_train_and_generate_with_adapters_of_their_own_on_the_same_servers(
    peers: list[str], transformers_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    prompt = tokenizer(TEXTS[:1], return_tensors="pt")
    plain = transformers_model.generate(**prompt, max_new_tokens=4, do_sample=False)
    expected: dict[str, Any] = {}
    for name in CONFIGS:
        with whole(transformers_model, name) as model:
            learned = learn(model, inputs, 2)
            expected[name] = *learned, model.generate(**prompt, max_new_tokens=4, do_sample=False)
    with ExitStack() as stack:
        bases = {name: stack.enter_context(llmnode.connect(peers=peers)) for name in CONFIGS}
        models = {name: adapted(base, name) for name, base in bases.items()}
        for name, model in models.items():
            losses, gradients = learn(model, inputs, 2)
            theirs = expected[name]
            for one, other in zip(losses, theirs[0], strict=True):
                assert error(one, other) < FURTHEST
            assert gradients.keys() == theirs[1].keys()
            for path, gradient in gradients.items():
                assert error(gradient, theirs[1][path]) < 3 * FURTHEST, path
        assert losses[1] < losses[0]
        for name, model in [*models.items(), *models.items()]:
            assert model.generate(**prompt, max_new_tokens=4, do_sample=False).equal(expected[name][2])
        with models["one"].disable_adapter():
            assert models["one"].generate(**prompt, max_new_tokens=4, do_sample=False).equal(plain)
        models["two"].save_pretrained(tmp_path)
        with torch.no_grad():
            ours = models["two"](**prompt).logits
    restored = peft.PeftModel.from_pretrained(transformers_model, tmp_path)
    try:
        with torch.no_grad():
            assert error(ours, restored(**prompt).logits) < 3 * FURTHEST
    finally:
        restored.unload()


def test_trained_tokens_are_those_of_a_tied_head_too(peers: list[str], transformers_model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    prompt, tokens = tokenizer(TEXTS[:1], return_tensors="pt"), inputs.input_ids[0, :3].tolist()
    config = {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [5], "trainable_token_indices": tokens}
    found = []
    with llmnode.connect(peers=peers) as connected:
        for base in (transformers_model, connected):
            torch.manual_seed(1)
            model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
            for path, each in model.named_parameters():
                if "trainable_tokens_delta" in path:
                    each.data = each.data + 0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(2))
            losses, gradients = learn(model, inputs, 1)
            text = model.generate(**prompt, max_new_tokens=4, do_sample=False)
            found.append((losses[0], {path: each for path, each in gradients.items() if "delta" in path}, text))
            model.unload()
    (theirs, their_gradients, their_text), (ours, our_gradients, our_text) = found
    assert error(ours, theirs) < FURTHEST
    assert our_gradients.keys() == their_gradients.keys()
    for path, gradient in our_gradients.items():
        assert error(gradient, their_gradients[path]) < 3 * FURTHEST, path
    assert our_text.equal(their_text)


def test_rows_with_adapters_of_their_own_are_as_in_one_process(
    peers: list[str], transformers_model: Any, tokenizer: Any
) -> None:
    tokenizer.padding_side = "left"
    inputs = tokenizer([TEXTS[0], TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[0]], return_tensors="pt", padding=True)
    names = ["__base__", "one", "two", "two", "ends"]
    labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
    labels[2, :2] = -100
    ends = peft.LoraConfig(
        r=2, target_modules=["o_proj", "embed_tokens"], layers_to_transform=[4], init_lora_weights=False
    )
    found = []
    with llmnode.connect(peers=peers) as connected:
        for base in (transformers_model, connected):
            model = adapted(base, "one", adapter_name="one").eval()
            model.add_adapter("two", peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS["two"]))
            draw(model, 1, 0.1)
            torch.manual_seed(3)
            model.add_adapter("ends", ends)
            model.set_adapter("one")
            loss = model(**inputs, labels=labels, adapter_names=names).loss
            loss.backward()
            gradients = {path: each.grad for path, each in model.named_parameters() if each.grad is not None}
            with torch.inference_mode():
                logits = model(**inputs, adapter_names=names).logits[:, -1]
                texts = model.generate(**inputs, adapter_names=names, max_new_tokens=6, do_sample=False)
                beams = model.generate(**inputs, adapter_names=names, max_new_tokens=6, do_sample=False, num_beams=2)
            found.append((loss, logits, gradients, texts, beams))
            if base is connected:
                with pytest.raises(ConfigError, match="2 names for 5 rows"):
                    model.generate(**inputs, adapter_names=names[:2], max_new_tokens=1)
            model.unload()
    (their_loss, their_logits, their_gradients, *their_texts), (loss, logits, gradients, *texts) = found
    assert error(loss, their_loss) < FURTHEST
    assert error(logits, their_logits) < 3 * FURTHEST
    assert gradients.keys() == their_gradients.keys()
    assert {name for name in ("one", "two", "ends") for path in gradients if f".{name}." in path} == {"one"}
    for path, gradient in gradients.items():
        assert error(gradient, their_gradients[path]) < 3 * FURTHEST, path
    assert all(one.equal(other) for one, other in zip(texts, their_texts, strict=True))
    of_one_text = [0, 1, 3, 4]
    assert all(error(logits[one], logits[other]) > 0.01 for one, other in combinations(of_one_text, 2))
    assert len({tuple(text) for text in texts[0][of_one_text].tolist()}) > 2


def test_dropout_in_training_is_that_of_one_process_with_the_same_masks_and_a_text_has_none(
    peers: list[str], transformers_model: Any, tokenizer: Any
) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    prompt = tokenizer(TEXTS[:1], return_tensors="pt")
    options = {"r": 4, "lora_dropout": 0.1, "layers_to_transform": [3, 14, 22]}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], **options)
    found: dict[str, Any] = {}
    with llmnode.connect(peers=peers) as connected:
        for side, base in (("theirs", transformers_model), ("ours", connected)):
            model = peft.get_peft_model(base, config)
            draw(model, 4, 0.1)
            if side == "theirs":
                _drop_as_remote_blocks(model)
            torch.manual_seed(5)
            model.train()
            learned = learn(model, inputs, 2)
            if side == "theirs":
                model.eval()  # a session has no dropout in any case
            text = model.generate(**prompt, max_new_tokens=4, do_sample=False)
            found[side] = *learned, text
            model.unload()
    (losses, gradients, text), (their_losses, their_gradients, their_text) = found["ours"], found["theirs"]
    assert all(error(one, other) < FURTHEST for one, other in zip(losses, their_losses, strict=True))
    assert gradients.keys() == their_gradients.keys()
    for path, gradient in gradients.items():
        assert error(gradient, their_gradients[path]) < 3 * FURTHEST, path
    assert text.equal(their_text)


def _drop_as_remote_blocks(model: Any) -> None:
    """Have a whole model drop what one through servers does: it draws a seed for each row before a forward."""
    drawn: list[Dropout] = []

    def draw_seeds(*_: object) -> None:
        drawn[:] = [Dropout(0.1, tuple(torch.randint(SEEDS - 1, (len(TEXTS),)).tolist()))]

    model.register_forward_pre_hook(draw_seeds)
    drop_by_hand(model, "model.layers.", lambda: drawn[0] if model.training else NO_DROPOUT)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "plain LoRA"),
        ({"lora_bias": True}, "plain LoRA"),
        ({"r": 300}, "a rank of 300"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_adapters_that_servers_cannot_compute_are_refused(config: dict[str, Any], why: str, peers: list[str]) -> None:
    options = {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [3], **config}
    with llmnode.connect(peers=peers) as model:
        made = peft.get_peft_model(model, peft.LoraConfig(**options)).train()
        with pytest.raises(ConfigError, match=why):
            made(torch.tensor([[1, 2, 3]]))


def test_gradients_of_all_parameters_are_refused_for_blocks_and_given_for_ends(peers: list[str]) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with llmnode.connect(peers=peers) as model:
        for each in model.parameters():
            each.requires_grad_(True)
        with pytest.raises(ConfigError, match="keep it frozen"):
            model(ids, labels=ids)
        model.remote_blocks.requires_grad_(False)
        model(ids, labels=ids).loss.backward()
        trained = {name for name, each in model.named_parameters() if each.grad is not None}
        assert trained == {"model.embed_tokens.weight", "model.norm.weight"}
