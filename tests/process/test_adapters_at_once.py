"""Clients whose adapters are added, changed and dropped all the time train at once: each as it does alone."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode.node import Node
from process.company import at_once, in_company
from process.lora import ADAPTERS, config_of, draw, gradients
from reference.small import BLOCKS, VOCABULARY, make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 4
LENGTHS = (9, 4, 6)
LEARNING_RATE = 0.05
FURTHEST = 1e-5
"""The norm-relative error of a loss, or of a gradient."""


def _batch(rng: random.Random) -> dict[str, torch.Tensor]:
    ids = torch.tensor([rng.choices(range(1, VOCABULARY), k=max(LENGTHS)) for _ in LENGTHS])
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def _live(base: Any, seed: int) -> list[dict[str, torch.Tensor]]:
    """Steps of one client: their losses and gradients, and what it generates. `base` is the whole model, or a
    distributed one.

    A step trains one of the adapters that the client has then.
    """
    rng = random.Random(seed)
    found: list[dict[str, torch.Tensor]] = []
    held: list[str] = []
    model: Any = None
    for step in range(STEPS):
        if not held or rng.random() < 0.6:
            held.append(f"of step {step}")
            config = config_of(base, rng.choice(list(ADAPTERS)), r=rng.randint(1, 8))
            if model is None:
                model = peft.get_peft_model(base, config, adapter_name=held[-1])
            else:
                model.add_adapter(held[-1], config)
            draw(model, held[-1], 100 * seed + step)
        if len(held) > 1 and rng.random() < 0.7:
            model.delete_adapter(held.pop(rng.randrange(len(held))))
        model.set_adapter(rng.choice(held))
        batch = _batch(rng)
        loss = model(**batch).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each -= LEARNING_RATE * each.grad
                    each.grad = None
        with torch.no_grad(), model.disable_adapter():
            found.append({"without": model(**batch).loss})
    return [*found, {"text": _text(model)}]


def _text(model: Any) -> torch.Tensor:
    """Four tokens, by a session with the adapter."""
    prompt = torch.arange(1, 6)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    text: torch.Tensor = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    return text


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(("clients", "together"), [(3, 3), pytest.param(8, 7, marks=pytest.mark.daily)])
def test_clients_whose_adapters_come_and_go_are_each_as_alone(
    clients: int, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through servers whose spans overlap, as microbatches, in batches that have adapters of this many together.

    One of eight clients comes first, and its pass is computed alone.
    """
    torch.set_num_threads(1)
    monkeypatch.setattr("llmnode.session.passes.MOST_POSITIONS", 12)
    make_model("llama", tied=False).save_pretrained(tmp_path)
    expected = [_live(make_model("llama", tied=False), seed) for seed in range(clients)]
    config: dict[str, Any] = {"worker": "thread", "threads": 1, "kv_tokens": 2000}
    with ExitStack() as stack:
        first = stack.enter_context(Node(str(tmp_path), blocks="0:3", **config))
        stack.enter_context(Node(str(tmp_path), blocks=f"2:{BLOCKS}", peers=first.addresses, **config))
        models = [stack.enter_context(llmnode.connect(str(tmp_path), peers=first.addresses)) for _ in range(clients)]
        with in_company(clients, monkeypatch) as adapters_in_a_batch:
            found = at_once([partial(_live, model, seed) for seed, model in enumerate(models)])
    assert min(adapters_in_a_batch.values()) >= together
    for ours_of_client, theirs_of_client in zip(found, expected, strict=True):
        for ours, theirs in zip(ours_of_client, theirs_of_client, strict=True):
            assert ours.keys() == theirs.keys()
            for name, each in theirs.items():
                assert ours[name].equal(each) if name == "text" else _error(ours[name], each) < FURTHEST, name
