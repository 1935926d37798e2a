"""Weights that need fewer than 32 bits have no more in memory, and compute the same as in 32 bits."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import linear

from llmnode.compute.attention import ATTENTION
from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.core.span import Span
from llmnode.models.embedded import open_embedded
from llmnode.models.load import found_block_bytes, load_ends, load_span, tensor_bytes
from llmnode.models.native import MOST_POSITIONS
from llmnode.models.packed_ends import NarrowEmbedding, NarrowHead
from llmnode.models.size import measure_size
from llmnode.models.weights.packed_linear import HALVES, HalfLinear, Q4Linear, Q8Linear, found_narrow
from reference.small import BLOCKS, HIDDEN_SIZE, VOCABULARY, Cut, cut, make_model, open_saved, session

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.models.sources.folder import ModelFolder
    from llmnode.models.weights.packed_linear import Narrow

pytestmark = pytest.mark.reference


def saved(model: torch.nn.Module, path: Path) -> ModelFolder:
    model.save_pretrained(path)  # type: ignore[operator]  # a model of transformers
    return open_saved(path)


def outputs(model: Cut) -> torch.Tensor:
    """The outputs for few positions, which go through Rust, and for many, which go through torch."""
    tokens = torch.randint(VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(1)).tolist()
    made = []
    for end, length in ((40, 40), (41, 1), (42, 1), (60, 18)):
        chunks = {session(row): tokens[row][end - length : end] for row in range(3)}
        made += model.forward(chunks).values()
    return torch.cat(made)


@torch.no_grad()
def rounded_to_4_bits(model: Any, *, centred: bool) -> Any:  # Any: transformers types its models so
    """The model with blocks rounded to GGUF's Q4_1, or to Q4_0 if `centred`, and widened again."""
    for parameter in model.model.layers.parameters():
        if parameter.ndim > 1:
            groups = parameter.view(-1, 32)
            if centred:
                least = groups.gather(1, groups.abs().argmax(1, keepdim=True)).half().float()
                step = (least / -8).half().float()
                least = -8 * step
            else:
                least = groups.amin(1, keepdim=True).half().float()
                step = ((groups.amax(1, keepdim=True) - least) / 15).half().float()
            groups.copy_(((groups - least) / step).round_().clamp_(0, 15) * step + least)
    return model


def widths(model: Cut) -> set[torch.dtype]:
    span = model.executors[0].model
    return {each.dtype for each in (*span.parameters(), *span.buffers()) if each.ndim > 1}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_they_compute_the_same_bits_in_half_the_memory(case: str, half: torch.dtype, tmp_path: Path) -> None:
    model = make_model(case, tied=False).to(half)
    narrow, wide = saved(model, tmp_path / "16"), saved(model.float(), tmp_path / "32")
    ours, theirs = cut(narrow, (0, 2, BLOCKS)), cut(wide, (0, 2, BLOCKS))
    assert ours.executors[0].model.native is not None
    assert widths(ours) == {half} and widths(theirs) == {torch.float32}
    assert torch.equal(outputs(ours), outputs(theirs))
    size = measure_size(narrow)
    assert [each.tensor_bytes for each in ours.executors] == [2 * size.block_bytes, 3 * size.block_bytes]
    assert size.block_bytes < 0.52 * measure_size(wide).block_bytes, "all but norms and biases"


def test_products_that_files_have_in_parts_of_several_kinds_are_joined(tmp_path: Path) -> None:
    model = make_model("llama", tied=False).to(torch.bfloat16)
    model.model.layers[1].self_attn.v_proj.float()
    narrow, wide = saved(model, tmp_path / "16"), saved(model.float(), tmp_path / "32")
    ours, theirs = cut(narrow, (0, BLOCKS)), cut(wide, (0, BLOCKS))
    assert widths(ours) == {torch.bfloat16, torch.float32}
    assert torch.equal(outputs(ours), outputs(theirs))
    assert ours.executors[0].tensor_bytes < BLOCKS * measure_size(narrow).block_bytes, "that of the largest block"


@pytest.mark.parametrize("centred", [False, True], ids=["Q4_1", "Q4_0"])
@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_what_was_widened_from_4_bits_is_4_bits_again(
    case: str, centred: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(rounded_to_4_bits(make_model(case, tied=False), centred=centred), tmp_path)
    ours = cut(folder, (0, 2, BLOCKS))
    assert ours.executors[0].model.native is not None and widths(ours) == {torch.uint8, torch.float32}
    size = measure_size(folder)
    assert ours.executors[0].tensor_bytes == 2 * size.block_bytes, "all blocks are alike"
    monkeypatch.setattr(Q4Linear, "found", lambda _plain: None)
    monkeypatch.setattr(Q8Linear, "found", lambda _plain: None)
    theirs = cut(folder, (0, 2, BLOCKS))
    assert theirs.executors[0].tensor_bytes == 2 * measure_size(folder).block_bytes > 4 * 2 * size.block_bytes
    assert torch.equal(outputs(ours), outputs(theirs))


def test_the_embedded_model_is_of_4_bits() -> None:
    folder = open_embedded()
    span = load_span(folder, Span(29, 30), ATTENTION, in_rust=True)
    assert span.native is not None
    assert tensor_bytes(span) == measure_size(folder).block_bytes == found_block_bytes(folder)
    assert tensor_bytes(span) < 0.38 * measure_size(folder, torch.bfloat16).block_bytes


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ({}, "float32"),  # 8 bits would take more memory, and give other numbers
        ({"kv_dtype": "int8"}, "float32+kv-int8"),
        ({"dtype": "bfloat16"}, "bfloat16+int8"),
    ],
    ids=["as it is", "KV in int8", "computed in bf16"],
)
def test_auto_quantizes_a_model_of_4_bits_where_it_is_not_kept_so(
    asked: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmnode.models.weights.quantized._has_fast_int8", lambda: True)
    loader = SpanLoader(Wanted(quant="auto", device="cpu", **asked), print)
    assert loader.open_model().precision.name == dtype


def rounded_to_8_bits(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to GGUF's Q8_0, and widened again."""
    groups = weight.detach().unflatten(1, (-1, 32))
    step = (groups.abs().amax(2, keepdim=True) / 127).half().float()
    return ((groups / step).round_() * step).flatten(1)


@pytest.mark.parametrize("form", [*HALVES, "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@torch.inference_mode()
def test_the_ends_too_have_as_few_bits_as_they_need(
    form: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tied=tied)
    for parameter in dict.fromkeys([model.model.embed_tokens.weight, model.lm_head.weight]):
        if form == "Q4_1":
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * 7 % 16 * 0.25 - 1.5)
        elif form == "Q8_0":
            parameter.copy_(rounded_to_8_bits(parameter))
        else:
            parameter.copy_(parameter.to(HALVES[form]).float())
    folder = saved(model, tmp_path)
    ours = load_ends(folder)
    with monkeypatch.context() as patched:
        patched.setattr("llmnode.models.load.keep_ends_narrow", lambda *_ends: None)
        theirs = load_ends(folder)
    embedding, head = ours.embedding.embed_tokens, ours.scoring.lm_head
    assert torch.equal(embedding.weight, theirs.embedding.embed_tokens.weight)
    assert torch.equal(head.weight, theirs.scoring.lm_head.weight)
    assert isinstance(embedding, NarrowEmbedding) and isinstance(head, NarrowHead)
    assert (embedding.layer is head.layer) == tied
    assert tensor_bytes(head) <= {"Q8_0": 0.29, "Q4_1": 0.19}.get(form, 0.5) * 4 * VOCABULARY * HIDDEN_SIZE
    assert torch.equal(ours.embed([3, 210, 0], 0), theirs.embed([3, 210, 0], 0))
    for rows in (1, 5, MOST_POSITIONS + 1):
        hidden = torch.randn(rows, HIDDEN_SIZE)
        torch.testing.assert_close(ours.logits(hidden), theirs.logits(hidden), atol=1e-5, rtol=1e-5)


def test_ends_that_need_all_bits_or_are_rounded_anyway_stay_as_they_are(tmp_path: Path) -> None:
    folder = saved(make_model("llama", tied=True), tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        ends = load_ends(folder, dtype)
        assert ends.scoring.lm_head.weight is ends.embedding.embed_tokens.weight
        assert ends.scoring.lm_head.weight.dtype == dtype


@torch.inference_mode()
def test_a_head_with_a_bias_adds_it() -> None:
    plain = torch.nn.Linear(64, 50).bfloat16().float()
    narrow = NarrowHead(HalfLinear(plain.weight.bfloat16(), plain.bias))
    for rows in (1, MOST_POSITIONS + 1):
        hidden = torch.randn(rows, 64)
        torch.testing.assert_close(narrow(hidden), plain(hidden))


def test_a_token_that_there_is_not_is_refused() -> None:
    embedding = NarrowEmbedding(HalfLinear(torch.randn(50, 64).bfloat16(), None))
    for token in (-1, -100, 50):
        with pytest.raises(IndexError):
            embedding(torch.tensor([3, token]))
    assert embedding(torch.tensor([], dtype=torch.long)).shape == (0, 64)


def test_a_gradient_goes_through_whatever_else_is_widened_meanwhile() -> None:
    head, other = (NarrowHead(HalfLinear(torch.randn(50, 64).bfloat16(), None)) for _ in range(2))
    for rows in (1, MOST_POSITIONS + 1):
        hidden = torch.ones(rows, 64, requires_grad=True)
        scores = head(hidden)
        other(torch.ones(MOST_POSITIONS + 1, 64))
        (gradient,) = torch.autograd.grad(scores.sum(), hidden)
        torch.testing.assert_close(gradient, head.weight.sum(0).expand(rows, -1))


def test_ends_are_copied_as_any_module() -> None:
    head = NarrowHead(HalfLinear(torch.randn(50, 64).bfloat16(), None))
    hidden = torch.randn(3, 64)
    expected = head(hidden)
    for copied in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(copied(hidden), expected)


@pytest.mark.parametrize("kind", [HalfLinear, Q4Linear, Q8Linear])
def test_gradients_of_everything_are_those_of_weights_and_not_of_codes(kind: type[Narrow]) -> None:
    plain = torch.nn.Linear(64, 50, bias=False)
    whole_numbers = torch.arange(3200.0).view(50, 64)
    plain.weight.data = rounded_to_8_bits(whole_numbers) if kind is Q8Linear else whole_numbers % 16
    layer = HalfLinear(plain.weight.bfloat16(), None) if kind is HalfLinear else found_narrow(plain)
    assert type(layer) is kind
    model = torch.nn.ModuleDict({"tokens": NarrowEmbedding(layer), "head": NarrowHead(layer)}).requires_grad_(True)
    model["head"](model["tokens"](torch.tensor([1, 49]))).square().sum().backward()
    ((name, weight),) = model.named_parameters()
    assert name == "tokens.weight" and weight.grad is not None


@pytest.mark.parametrize("is_copied", [False, True])
def test_tied_ends_that_are_trained_become_one_parameter_of_fp32(is_copied: bool) -> None:
    layer = HalfLinear(torch.randn(50, 64).bfloat16(), None)
    model = torch.nn.ModuleDict({"tokens": NarrowEmbedding(layer), "head": NarrowHead(layer)})
    plain = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(50, 64), "head": torch.nn.Linear(64, 50, bias=False)})
    plain["head"].weight = plain["tokens"].weight
    plain.load_state_dict({f"{name}.weight": layer.rows(torch.arange(50)) for name in ("tokens", "head")})
    model = copy.deepcopy(model) if is_copied else model
    plain.requires_grad_(False)
    assert not [each for each in model.parameters() if each.requires_grad]
    ids = torch.tensor([[1, 49, 7]])
    for each in (model, plain):
        tokens, head = each["tokens"], each["head"]
        assert isinstance(tokens, torch.nn.Embedding) and isinstance(head, torch.nn.Linear)
        assert (tokens.embedding_dim, head.in_features, head.out_features, head.bias) == (64, 64, 50, None)
        assert dict(each.named_parameters(remove_duplicate=False)).keys() >= {"tokens.weight", "head.weight"}
        head.requires_grad_(True)
        assert [name for name, one in each.named_parameters() if one.requires_grad] == ["tokens.weight"]
        head(tokens(ids)).square().sum().backward()
    assert model["head"].weight is model["tokens"].weight
    torch.testing.assert_close(model["tokens"].weight.grad, plain["tokens"].weight.grad)


def test_a_weight_that_is_loaded_is_of_fp32_and_a_narrow_one_is_in_no_state_dict() -> None:
    head = NarrowHead(HalfLinear(torch.zeros(50, 64).bfloat16(), None))
    state = head.state_dict()
    assert "weight" not in state
    head.load_state_dict(state)
    numbers = torch.randn(50, 64)
    head.load_state_dict({**state, "weight": numbers})
    assert torch.equal(head(torch.eye(64)), numbers.T)
    assert torch.equal(head.state_dict()["weight"], numbers)


def test_a_head_is_used_in_inference_mode_and_out_of_it() -> None:
    narrow = NarrowHead(HalfLinear(torch.randn(50, 64).bfloat16(), None))
    with torch.inference_mode():
        inside = narrow(torch.ones(MOST_POSITIONS + 1, 64))
    torch.testing.assert_close(narrow(torch.ones(MOST_POSITIONS + 1, 64)), inside)
    torch.testing.assert_close(narrow(torch.ones(1, 64)), inside[:1])


def test_what_a_folder_would_have_to_obtain_is_not_looked_at(tmp_path: Path) -> None:
    folder = saved(rounded_to_4_bits(make_model("llama", tied=False), centred=False), tmp_path)
    assert found_block_bytes(folder) is not None
    assert found_block_bytes(replace(folder, obtain=lambda _files: pytest.fail("it is downloaded"))) is None


def test_models_that_are_not_of_few_bits_throughout_are_counted_as_files_have_them(tmp_path: Path) -> None:
    model = rounded_to_4_bits(make_model("llama", tied=False), centred=False)
    model.model.layers[-1].mlp.down_proj.weight.normal_()
    mixed = saved(model, tmp_path / "mixed")
    assert found_block_bytes(mixed) is None
    halves = saved(model.bfloat16(), tmp_path / "16")
    assert found_block_bytes(halves) is None, "they stay of 16 bits"


@pytest.mark.parametrize(
    ("dtype", "quant", "widest"),
    [
        (torch.bfloat16, "none", torch.bfloat16),
        (torch.float32, "int8", torch.int8),
    ],
    ids=["computed in bf16", "quantized"],
)
def test_what_torch_computes_alone_is_as_wide_as_it_computes(
    dtype: torch.dtype, quant: str, widest: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(make_model("llama", tied=False).to(torch.float16), tmp_path)
    model = cut(folder, (0, BLOCKS), dtype, quant=quant)
    assert widths(model) == {widest}
    size = measure_size(folder, dtype, quant)
    assert model.executors[0].tensor_bytes == BLOCKS * size.block_bytes
    assert torch.isfinite(outputs(model)).all()


def test_without_vectors_they_are_widened_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(make_model("llama", tied=False).to(torch.bfloat16), tmp_path)
    monkeypatch.setattr("llmnode.models.native.LlamaBlocks.is_fast", lambda: False)
    model = cut(folder, (0, BLOCKS))
    assert widths(model) == {torch.float32} and model.executors[0].model.native is None
    assert model.executors[0].tensor_bytes == BLOCKS * measure_size(folder).block_bytes


def test_sizes_that_vectors_do_not_fit_go_through_torch_as_wide_as_it_computes(tmp_path: Path) -> None:
    folder = saved(make_model("llama", tied=False, head_dim=24).to(torch.bfloat16), tmp_path)
    model = cut(folder, (0, BLOCKS))
    assert model.executors[0].model.native is None and widths(model) == {torch.float32}
    assert model.executors[0].tensor_bytes == BLOCKS * measure_size(folder).block_bytes


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@torch.inference_mode()
def test_a_product_of_several_parts_is_that_of_the_whole(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmnode.models.weights.packed_linear._MOST_WIDENED", 700)
    weight, bias = torch.randn(40, 96).bfloat16(), torch.randn(40) if has_bias else None
    rows = torch.randn(2, 5, 96)
    ours = HalfLinear(weight, bias)(rows)
    torch.testing.assert_close(ours, linear(rows, weight.float(), bias))
    of_4_bits = torch.nn.Linear(96, 40, bias=has_bias).requires_grad_(False)
    of_4_bits.weight.copy_(torch.arange(40 * 96).view(40, 96) * 7 % 16 * 0.25 - 1.5)
    found = Q4Linear.found(of_4_bits)
    assert found is not None
    torch.testing.assert_close(found(rows), of_4_bits(rows))


def test_of_4_bits_is_only_what_is_in_whole_groups() -> None:
    linear = torch.nn.Linear(64, 3)
    assert Q4Linear.found(linear) is None
    torch.nn.init.constant_(linear.weight, 0.5)
    assert Q4Linear.found(linear) is not None
    assert Q4Linear.found(linear.bfloat16()) is None
    odd = torch.nn.Linear(48, 2)
    torch.nn.init.constant_(odd.weight, 0.5)
    assert Q4Linear.found(odd) is None
