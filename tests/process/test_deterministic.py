"""Training that is asked to be deterministic gives the same bits, whatever else servers do, and though they die."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode.node import Node
from reference.small import BLOCKS, VOCABULARY, save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

SIZE = {"hidden_size": 256, "intermediate_size": 320}
LENGTHS = (3, 4)
"""In smaller blocks, or with more positions, the bits of a row do not depend on the rows beside it."""
STEPS = 4
SERVER: dict[str, Any] = {"worker": "thread", "threads": 1, "kv_tokens": 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("small") / "llama"
    save_model(path, "llama", tied=False, **SIZE)
    return str(path)


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def _train(model: Any, before_step: Callable[[int], None] = lambda _step: None) -> list[torch.Tensor]:
    """The losses of some steps, and the adapter after them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"r": 4, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], **options)
    trained = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD([each for each in trained.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        before_step(step)
        optimizer.zero_grad()
        losses.append(trained(**_batch(step)).loss)
        losses[-1].backward()
        optimizer.step()
    return [*losses, *(each.detach() for each in trained.parameters() if each.requires_grad)]


@contextmanager
def _company(folder: str, peers: list[str]) -> Iterator[None]:
    """Other clients that train all the time, in batches so small that others fit beside them."""
    over = threading.Event()

    def train() -> None:
        torch.set_num_threads(1)
        generator = torch.Generator()  # torch's own is that of the thread whose training is looked at
        with llmnode.connect(folder, peers=peers) as model:
            while not over.is_set():
                hidden = torch.randn(1, 8, SIZE["hidden_size"], generator=generator, requires_grad=True)
                model.remote_blocks(hidden).sum().backward()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("by", ["option", "torch"])
def test_training_gives_the_same_bits_beside_others_and_though_a_server_dies(folder: str, by: str) -> None:
    with ExitStack() as stack:
        if by == "torch":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        option = {"deterministic": True} if by == "option" else {}
        first = stack.enter_context(Node(folder, blocks=f"0:{BLOCKS - 1}", **SERVER))
        peers = list(first.addresses)
        dying = stack.enter_context(ExitStack())
        dying.enter_context(Node(folder, blocks=f"2:{BLOCKS}", peers=peers, **SERVER))
        with llmnode.connect(folder, peers=peers, **option) as model:
            expected = _train(model)

        def die(step: int) -> None:
            if step == 2:
                stack.enter_context(Node(folder, blocks=f"1:{BLOCKS}", peers=peers, **SERVER))
                dying.close()

        with _company(folder, peers), llmnode.connect(folder, peers=peers, **option) as model:
            found = _train(model, die)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
