"""Clients that train LoRA and a classifier's head, over remote blocks or over the whole model in one process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import peft
import torch
from transformers import AutoModelForSequenceClassification

from llmnode.client.model import connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.models.sources.folder import ModelFolder
    from llmnode.models.text.tokenizer import Tokenizer

DEFAULT_LAYERS = ("q_proj", "v_proj")
"""The layers that PEFT adapts in a Llama, if it is told none."""
ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LABELS = {"num_labels": 2}


@dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA that a client trains."""

    rank: int
    layers: Sequence[str] = DEFAULT_LAYERS

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {'all layers' if self.layers == ALL_LAYERS else 'q, v'}"


class Trainer:
    """A classifier with an adapter of its own, and their optimizer. The numbers are the same for the same adapter."""

    def __init__(self, classifier: Any, adapter: Adapter) -> None:  # Any: a class of transformers, by the family
        rank, layers = adapter.rank, list(adapter.layers)
        config = peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=layers)
        self.model: Any = peft.get_peft_model(classifier, config)  # Any: likewise
        generator = torch.Generator().manual_seed(adapter.rank)
        for _, parameter in sorted((name, each) for name, each in self.model.named_parameters() if each.requires_grad):
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
        self._optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=1e-4)

    def gradients(self, texts: torch.Tensor) -> float:
        """The loss of `texts`, (rows, tokens). Gradients are there afterwards."""
        self._optimizer.zero_grad()
        texts = texts.to(self.model.device)
        loss = self.model(input_ids=texts, labels=torch.arange(len(texts), device=texts.device) % 2).loss
        loss.backward()
        return float(loss.detach())

    def step(self, texts: torch.Tensor) -> float:
        """One step of training. Returns its loss. The adapter is another version afterwards."""
        loss = self.gradients(texts)
        self._optimizer.step()
        return loss


def local_trainer(folder: ModelFolder, adapter: Adapter, **options: Any) -> Trainer:
    """Over the whole model, in this process. `options` are those of transformers' `from_pretrained`."""
    kind: Any = AutoModelForSequenceClassification  # Any: transformers' classes have no common base
    options = {"dtype": torch.float32} | options
    return Trainer(kind.from_pretrained(folder.path, local_files_only=True, **options, **LABELS), adapter)


@contextmanager
def remote_trainer(peers: Sequence[str], adapter: Adapter, name: str | None = None) -> Iterator[Trainer]:
    """A client of its own, of the embedded model or another one."""
    with connect(name, peers=peers) as model:
        yield Trainer(model.with_head("sequence-classification", **LABELS), adapter)


def some_texts(tokenizer: Tokenizer, rows: int, tokens: int) -> torch.Tensor:
    """(rows, tokens)"""
    token_ids = tokenizer.encode("".join(topics.values()))
    return torch.tensor(token_ids[: rows * tokens]).view(rows, tokens)


def tokens_per_s(trainers: Sequence[Trainer], texts: torch.Tensor, steps: int) -> float:
    """Tokens a second of all `trainers` together, each in a thread of its own, while all of them train."""
    ready = threading.Barrier(len(trainers))

    def train(trainer: Trainer) -> tuple[float, list[float]]:
        torch.set_num_threads(1)  # it holds for the calling thread
        ready.wait()
        began_s, stamps = time.perf_counter(), []
        for _ in range(steps):
            trainer.step(texts)
            stamps.append(time.perf_counter())
        return began_s, stamps

    with ThreadPoolExecutor(len(trainers)) as threads:
        trained = list(threads.map(train, trainers))
    since_s, until_s = max(began_s for began_s, _ in trained), min(stamps[-1] for _, stamps in trained)
    done = sum(at <= until_s for _, stamps in trained for at in stamps)
    return done * texts.numel() / (until_s - since_s)
