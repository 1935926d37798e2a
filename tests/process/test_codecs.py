"""The quality that the lossy codecs cost: tokens, likelihood and gradients of real text through three servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode.client.connect import load_parts
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

TEXTS = [
    path.read_text(encoding="utf-8")[:2500]
    for path in (Path(__file__).parents[2] / name for name in (".github/STYLE.md", ".github/SECURITY.md", "LICENSE"))
]


@pytest.fixture(scope="module")
def peers(start_servers: Callable[..., list[Any]]) -> list[str]:
    return [node.address for node in start_servers([Span(0, 10), Span(10, 20), Span(20, 30)])]


@pytest.fixture(scope="module")
def expected_scores(transformers_model: Any, folder: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each text's token ids, (1, length), and what transformers scores after each, (length, vocabulary)."""
    tokenizer = load_parts(folder).tokenizer
    with torch.inference_mode():
        texts = [torch.tensor([tokenizer.encode(text)]) for text in TEXTS]
        return [(ids, transformers_model(ids).logits[0]) for ids in texts]


# The bounds are some three times what was measured (tests/bench/FIGURES.md).
@pytest.mark.parametrize(
    ("codec", "least_agreement", "most_nll_change"),
    [("raw", 0.999, 1e-4), ("fp16", 0.99, 1e-3), ("bf16", 0.97, 0.01), ("int8", 0.95, 0.02)],
)
def test_a_codec_keeps_tokens_and_likelihood(
    peers: list[str],
    expected_scores: list[tuple[torch.Tensor, torch.Tensor]],
    codec: str,
    least_agreement: float,
    most_nll_change: float,
    record_property: Callable[[str, object], None],
) -> None:
    same = positions = 0
    nll = expected_nll = 0.0
    with llmnode.connect(peers=peers, codec=codec) as model, torch.inference_mode():
        for ids, expected in expected_scores:
            scores = model(ids).logits[0]
            same += int((scores.argmax(-1) == expected.argmax(-1)).sum())
            positions += ids.shape[1]
            nll += torch.nn.functional.cross_entropy(scores[:-1], ids[0, 1:], reduction="sum").item()
            expected_nll += torch.nn.functional.cross_entropy(expected[:-1], ids[0, 1:], reduction="sum").item()
    agreement, nll_change = same / positions, (nll - expected_nll) / (positions - len(TEXTS))
    record_property("agreement", agreement)
    record_property("nll_change", nll_change)
    print(f"{codec}: same next token at {agreement:.4f} of {positions} positions, NLL {nll_change:+.2e} a token")
    assert agreement >= least_agreement
    assert abs(nll_change) <= most_nll_change


SMALL = 1e-6
"""A loss times this has gradients as small as the mean over thousands of positions."""


def gradients_in(codec: str, peers: list[str], sizes: Sequence[float]) -> list[list[torch.Tensor]]:
    """Those of the loss of a text, times each of `sizes`: for what goes in, for deep prompts, and for an adapter."""
    with llmnode.connect(peers=peers, codec=codec) as model:
        ids = torch.tensor([model.tokenizer.encode(TEXTS[0])[:20]])
        config = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        trained = [each for each in peft.get_peft_model(model, config).parameters() if each.requires_grad]
        hidden = model.embed(ids).detach().requires_grad_()
        prompts = (0.1 * torch.randn(30, 1, 4, hidden.shape[2])).requires_grad_()
        scores = model.score(model.remote_blocks(hidden, None, prompts))
        loss = torch.nn.functional.cross_entropy(scores[0, :-1], ids[0, 1:])
        found = []
        for size in sizes:
            of_hidden, of_prompts, *of_adapter = torch.autograd.grad(
                size * loss, [hidden, prompts, *trained], retain_graph=True
            )
            found.append([of_hidden, of_prompts, torch.cat([each.flatten() for each in of_adapter])])
        return found


@pytest.fixture(scope="module")
def exact_gradients(peers: list[str]) -> list[torch.Tensor]:
    return gradients_in("raw", peers, [1.0])[0]


# The bounds are some three times what was measured (tests/bench/FIGURES.md).
@pytest.mark.parametrize(("codec", "furthest"), [("fp16", 0.006), ("bf16", 0.05), ("int8", 0.3)])
def test_a_codec_keeps_gradients_and_those_of_a_small_loss_alike(
    peers: list[str], exact_gradients: list[torch.Tensor], codec: str, furthest: float
) -> None:
    found, small = gradients_in(codec, peers, [1.0, SMALL])
    for what, exact, usual, scaled in zip(("inputs", "prompts", "adapter"), exact_gradients, found, small, strict=True):
        errors = [((each - exact).norm() / exact.norm()).item() for each in (usual, scaled / SMALL)]
        print(f"{codec}: gradients of {what} are off by {errors[0]:.2e}, of a small loss by {errors[1]:.2e}")
        assert max(errors) <= furthest
        assert errors[1] <= 2 * errors[0], "it is rounded at other places"
