"""Steps over pages on a GPU that is not there: tensors have a device, a shape and a dtype, but no numbers.

Tensors on the wrong device are found, and operations that a CUDA graph cannot record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from llmnode.compute.attention import ATTENTION, Segment, segments_of_forward
from llmnode.compute.cuda_graphs import RecordedForwards
from llmnode.compute.kv import KVForm, SequenceKV
from llmnode.compute.own_attention import replace_own_attention
from llmnode.compute.pages import PagePool, lay_out
from llmnode.core.span import Span
from llmnode.models.load import load_span
from reference.paged import BY_THEMSELVES, AsInCapture, without_numbers
from reference.small import CPU, HIDDEN_SIZE, KV_TOKENS, OF_EACH_KIND, open_saved, save_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.reference

EACH_KIND_OF_LAYER = 3
"""Among this many blocks is one of each kind that the model has: with a window, and without."""


@pytest.mark.parametrize(
    "form", ["flash", "pages", KVForm(), KVForm("int8"), KVForm(device=CPU), KVForm("int8", CPU)], ids=str
)
@pytest.mark.parametrize("case", OF_EACH_KIND)
def test_all_that_a_forward_reads_is_on_the_gpu(
    case: str, form: KVForm | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that have a device, a shape and a dtype, but no numbers, go through all of it as on a GPU."""
    save_model(tmp_path, case, tied=False)
    folder = open_saved(tmp_path)
    no_numbers = without_numbers(folder, monkeypatch)
    whole, gpu = Span(0, EACH_KIND_OF_LAYER), torch.device("cuda")
    with no_numbers, torch.inference_mode():
        model = load_span(folder, whole, ATTENTION, torch.bfloat16, "cuda")
        replace_own_attention(model)
        pool = PagePool(KV_TOKENS, gpu, flash=form == "flash")
        kvs = [SequenceKV(400, form) if isinstance(form, KVForm) else pool.take(400) for _ in range(2)]
        for lengths in ((5, 300), (1, 1)):
            segments = [Segment(kv, kv.length, length) for kv, length in zip(kvs, lengths, strict=True)]
            hidden = torch.zeros(sum(lengths), HIDDEN_SIZE)
            if not isinstance(form, KVForm):
                row = [(kv, kv.length, length) for kv, length in zip(kvs, lengths, strict=True)]
                made = RecordedForwards(model, pool).run(whole, row, hidden)
            else:
                token = segments_of_forward.set(segments)
                made = model(whole, hidden.to(gpu), torch.arange(sum(lengths), device=gpu)).cpu()
                segments_of_forward.reset(token)
            assert (made.dtype, made.shape) == (torch.float32, hidden.shape)
            for kv, length in zip(kvs, lengths, strict=True):
                kv.length += length


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "gathered"])
@pytest.mark.parametrize("case", sorted({*OF_EACH_KIND, "opt"} - BY_THEMSELVES))
def test_a_step_on_a_gpu_has_nothing_that_cannot_be_recorded(
    case: str, flash: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, case, tied=False)
    folder, whole = open_saved(tmp_path), Span(0, EACH_KIND_OF_LAYER)
    with without_numbers(folder, monkeypatch), torch.inference_mode():
        model = load_span(folder, whole, ATTENTION, torch.bfloat16, "cuda")
        replace_own_attention(model)
        pool = PagePool(KV_TOKENS, torch.device("cuda"), flash=flash)
        shape, numbers = lay_out([(pool.take(400), 7, 1), (pool.take(400), 300, 1)])
        step = torch.zeros(2, HIDDEN_SIZE, device="cuda"), numbers.to("cuda")
        with AsInCapture():
            made = RecordedForwards(model, pool)._run(whole, shape, (), *step)
        assert made.shape == (2, HIDDEN_SIZE)
