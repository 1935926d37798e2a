"""The quality that the lossy codecs cost: tokens and likelihood of real text through three servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import llmnode
from llmnode.client.connect import load_parts
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable

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
