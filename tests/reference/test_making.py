"""Models are made in a thread of a program whose other threads make modules and models of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SessionId
from llmnode.core.operations import Open, Slice
from llmnode.core.span import Span
from llmnode.models.families import family_of
from llmnode.models.load import load_ends
from llmnode.models.meta_model import without_weights
from llmnode.models.open_model import open_model
from llmnode.models.tensors import from_bytes, to_bytes
from reference.small import BLOCKS, save_model

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.models.sources.folder import ModelFolder

pytestmark = pytest.mark.reference


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    save_model(tmp_path / "small", "llama", tied=False)
    return open_model(str(tmp_path / "small"))


def test_modules_that_other_threads_make_meanwhile_have_their_weights(folder: ModelFolder) -> None:
    made: list[torch.nn.Linear] = []

    class Kind:
        """Has another thread make a module while the model is made."""

        @staticmethod
        def from_config(*arguments: Any, **options: Any) -> Any:  # Any: as transformers types it
            thread = Thread(target=lambda: made.append(torch.nn.Linear(2, 2)))
            thread.start()
            thread.join()
            return AutoModelForCausalLM.from_config(*arguments, **options)

    model = without_weights(folder, family_of(folder.config), "eager", torch.float32, Kind)
    assert all(each.is_meta for each in model.parameters())
    assert not any(each.is_meta for each in [*made[0].parameters(), *torch.nn.Linear(2, 2).parameters()])


def test_threads_that_load_at_once_have_whole_models(folder: ModelFolder) -> None:
    with ThreadPoolExecutor(4) as threads:
        ends = [*threads.map(lambda dtype: load_ends(folder, dtype), 4 * [torch.float32, torch.bfloat16])]
    scores = [each.logits(each.embed([1, 2, 3], 0)) for each in ends]
    assert all(torch.equal(each, scores[0]) for each in scores[::2])
    assert torch.get_default_dtype() == torch.float32
    assert not torch.nn.Linear(2, 2).weight.is_meta


def _scores(folder: ModelFolder, precision: dict[str, Any]) -> torch.Tensor:
    """Those after some tokens, through a worker's executor and a client's ends."""
    ends, span = load_ends(folder), Span(0, BLOCKS)
    executor = load_executor(folder, span, 16, torch.float32, **precision)
    session = SessionId(bytes(16))
    assert executor.apply(Open(session, span, 8))
    (output,) = executor.forward([Slice(session, 0, 3, to_bytes(ends.embed([1, 2, 3], 0)))])
    return ends.logits(from_bytes(output, folder.info.hidden_size))


@pytest.mark.parametrize(
    ("case", "quant"),
    [("llama", "none"), ("llama", "int8"), ("bloom", "nf4"), ("gemma2", "none"), ("mixtral", "none")],
)
def test_a_program_may_have_set_another_dtype_for_its_own_tensors(case: str, quant: str, tmp_path: Path) -> None:
    save_model(tmp_path / case, case, tied=False)
    folder = open_model(str(tmp_path / case))
    expected = _scores(folder, {"quant": quant})
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = _scores(folder, {"quant": quant})
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
