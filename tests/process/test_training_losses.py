"""Training through servers strays from one process as that strays from itself when its sums change their order."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode.compute.batching import BatchingWorker
from llmnode.compute.executor import SpanExecutor
from llmnode.core.peers.pass_loads import PassLoads
from llmnode.core.route import HopCost
from llmnode.core.span import Span
from llmnode.node import Node
from process.lora import config_of, draw
from reference.small import VOCABULARY, make_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from llmnode.core.operations import Pass
    from llmnode.core.peers.pass_loads import Holder

pytestmark = [pytest.mark.process, pytest.mark.slow]

TIMES = 3.0
"""The losses of one process have a distance from their mean. Three times that is the limit."""
BLOCKS = 3
LENGTHS = (7, 3, 5, 8, 4, 6)
TOGETHER = 2
"""The texts of a microbatch of one process."""
LEARNING_RATE = 3e-3


def _texts(step: int) -> list[torch.Tensor]:
    """Those of four batches, which come again and again: they are learned by heart."""
    generator = torch.Generator().manual_seed(step % 4)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def _losses(base: Any, steps: int, order: random.Random | None) -> torch.Tensor:
    """The losses of a training with AdamW, in fp64. Each batch goes as it is, or as microbatches in another order."""
    model = peft.get_peft_model(base, config_of(base, "one"))
    draw(model, "default", 1)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        texts = _texts(step)
        if order is not None:
            order.shuffle(texts)
        together = len(texts) if order is None else TOGETHER
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for first in range(0, len(texts), together):
            part = _loss(model, texts[first : first + together])
            part.backward()
            loss += part.detach()
        optimizer.step()
        losses.append(loss)
    return torch.stack(losses)


def _loss(model: Any, texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The part of these texts in the mean over all tokens of a batch."""
    ids = torch.nn.utils.rnn.pad_sequence([*texts], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([*texts], batch_first=True, padding_value=-100)
    logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits[:, :-1].double()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / sum(length - 1 for length in LENGTHS)


def _any_costs(_loads: PassLoads, holders: Iterable[Holder], *_args: Any, **_options: Any) -> Any:
    """So each part of a batch takes any way through the servers."""
    return {each.peer: HopCost(block_s=random.random()) for each in holders}


def _largest(differences: torch.Tensor) -> float:
    return differences.abs().max().item()


def _root_mean_square(differences: torch.Tensor) -> float:
    return differences.square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("steps", "runs"), [(10, 4), pytest.param(50, 5, marks=pytest.mark.daily)], ids=["short", "long"]
)
def test_losses_are_as_near_to_one_process_as_its_own_with_permuted_microbatches(
    steps: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("llmnode.session.passes.MOST_POSITIONS", 12)
    monkeypatch.setattr(PassLoads, "costs", _any_costs)
    monkeypatch.setattr(BatchingWorker, "pass_blocks", lambda _worker, _kind, _positions, blocks: blocks)
    spans: set[Span] = set()
    run = SpanExecutor.run

    def noted(executor: SpanExecutor, passes: Sequence[Pass]) -> Any:
        spans.add(passes[0].span)
        return run(executor, passes)

    monkeypatch.setattr(SpanExecutor, "run", noted)
    make_model("llama", tied=False, num_hidden_layers=BLOCKS).save_pretrained(tmp_path)
    theirs = torch.stack(
        [
            _losses(make_model("llama", tied=False, num_hidden_layers=BLOCKS), steps, random.Random(seed))
            for seed in range(runs)
        ]
    )
    config: dict[str, Any] = {"worker": "thread", "threads": 1, "kv_tokens": 1000}
    with ExitStack() as stack:
        first = stack.enter_context(Node(str(tmp_path), blocks="0:2", **config))
        stack.enter_context(Node(str(tmp_path), blocks=f"1:{BLOCKS}", peers=first.addresses, **config))
        model = stack.enter_context(llmnode.connect(str(tmp_path), peers=first.addresses))
        ours = _losses(model, steps, None)
    assert spans >= {Span(0, 2), Span(2, 3), Span(0, 1), Span(1, 3)}, "both ways"
    mean = theirs.mean(0)
    assert theirs[:, -4:].mean() < 0.95 * theirs[:, :4].mean(), "it learns"
    for distance in (_largest, _root_mean_square):
        of_one_process = distance(theirs - mean)
        assert 0 < of_one_process < 1e-5, "it is rounding"
        assert distance(ours - mean) <= TIMES * of_one_process
