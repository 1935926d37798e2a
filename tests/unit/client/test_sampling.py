"""How a token is drawn: the tokens that transformers' warper leaves, in proportion to their softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from llmnode.client.sampling import WARPERS, ChoiceTerms, Sampling, draw, likelier_than, stays
from llmnode.errors import ConfigError

PLAIN = GenerationConfig()
VOCABULARY = 49_152
ROUNDING = 1e-6
"""A token whose tail is this near to 1 - top_p may be kept or not: a softmax of sorted scores is rounded otherwise."""


def drawn(sampling: Sampling, scores: torch.Tensor, number: int = 0, config: GenerationConfig = PLAIN) -> list[int]:
    """The tokens that are drawn by `scores` (tokens, vocabulary), one after another."""
    chooser = sampling.of(config).chooser([0], len(scores), ChoiceTerms(scores.shape[1], number))
    return [chooser(row).id for row in scores]


scores_of_few = st.lists(st.floats(-30, 30, width=32) | st.just(-math.inf), min_size=1, max_size=40).filter(
    lambda scores: max(scores) > -math.inf
)
top_ps = st.floats(0.001, 0.999)


def is_kept(token: int, shares: torch.Tensor, top_p: float) -> bool:
    total = shares.sum(dtype=torch.float64).item()
    return stays(total - likelier_than(token, shares).sum(dtype=torch.float64).item(), total, top_p)


def kept_by_transformers(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """A bool for each of `scores` (vocabulary)."""
    kept: torch.Tensor = TopPLogitsWarper(top_p)(None, scores[None])[0] > -math.inf
    return kept


def tails(scores: torch.Tensor) -> torch.Tensor:
    """The share of each token plus those of all less likely ones."""
    shares, order = scores.double().softmax(0).sort(stable=True)
    return torch.empty_like(shares).scatter(0, order, shares.cumsum(0))


def are_apart(shares: torch.Tensor) -> bool:
    """Whether no shares are equal, even after rounding. transformers' sort may keep any of equal ones."""
    ordered = shares.double().sort().values
    return bool((ordered[1:] > (1 + ROUNDING) * ordered[:-1]).all())


@given(given_scores=scores_of_few, top_p=top_ps)
def test_what_may_be_drawn_is_what_transformers_leaves(given_scores: list[float], top_p: float) -> None:
    scores = torch.tensor(given_scores)
    shares, kept, tail = scores.softmax(0), kept_by_transformers(scores, top_p), tails(scores)
    possible = [token for token, share in enumerate(shares.tolist()) if share > 0]
    assert any(is_kept(token, shares, top_p) for token in possible)
    if are_apart(shares[possible]):
        sure = [token for token in possible if abs(tail[token] - (1 - top_p)) > ROUNDING]
        assert [is_kept(token, shares, top_p) for token in sure] == kept[sure].tolist()
    as_many = sum(is_kept(token, shares, top_p) for token in possible)
    assert as_many == kept.sum() or (tail - (1 - top_p)).abs().min() < ROUNDING


@given(tokens=st.integers(1, 200), part=st.floats(0, 1))
def test_of_equal_tokens_as_many_stay_as_in_transformers_to_the_very_boundary(tokens: int, part: float) -> None:
    top_p = max(1, round(part * tokens)) / tokens
    scores = torch.zeros(tokens)
    kept = [is_kept(token, scores.softmax(0), top_p) for token in range(tokens)]
    assert sum(kept) == kept_by_transformers(scores, top_p).sum()
    assert kept == sorted(kept), "the last of them, as a stable sort leaves them"


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 10.0], ids=lambda spread: f"spread-{spread}")
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99])
def test_of_a_whole_vocabulary_the_same_tokens_stay(spread: float, top_p: float) -> None:
    scores = spread * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5))
    scores[::3] = -math.inf
    shares, kept, tail = scores.softmax(0), kept_by_transformers(scores, top_p), tails(scores)
    order = scores.argsort(descending=True).tolist()
    boundary = int(kept.sum())
    asked = [*order[:3], *order[max(0, boundary - 20) : boundary + 20]]
    sure = [token for token in asked if abs(tail[token] - (1 - top_p)) > ROUNDING]
    assert len(sure) > 10
    assert [is_kept(token, shares, top_p) for token in sure] == kept[sure].tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 0.1])
@pytest.mark.parametrize(
    "scores",
    [[0.0] * 8, [9.0, 2.0, 1.5, -4.0, 1.5, 0.0], [-math.inf, 1.0, 0.5, -math.inf, 0.0, 2.0, -math.inf]],
    ids=["flat", "peaked", "some impossible"],
)
def test_tokens_come_as_often_as_the_softmax_of_what_is_left_says(scores: list[float], top_p: float) -> None:
    rows, temperature = 4000, 1.3
    given_scores = torch.tensor(scores)
    left: Any = TemperatureLogitsWarper(temperature)(None, given_scores[None])
    left = TopPLogitsWarper(top_p)(None, left)[0].softmax(0)
    tokens = drawn(Sampling(temperature, top_p, seed=2), given_scores.repeat(rows, 1))
    found = torch.bincount(torch.tensor(tokens), minlength=len(scores)) / rows
    if scores == [0.0] * 8:  # any choice of that number of tokens may be left
        left, found = left.sort().values, found.sort().values
    assert (found[left == 0] == 0).all()
    assert ((found - left).abs() <= 5 * (left * (1 - left) / rows).sqrt() + 1e-6).all(), "five standard deviations"


@given(given_scores=scores_of_few, top_p=top_ps | st.just(1.0), seed=st.integers(0, 99))
def test_what_is_drawn_may_be(given_scores: list[float], top_p: float, seed: int) -> None:
    shares = torch.tensor(given_scores).softmax(0)
    token = draw(shares, top_p, torch.Generator().manual_seed(seed))
    assert shares[token] > 0
    assert top_p == 1 or is_kept(token, shares, top_p)


def test_tokens_are_drawn_from_the_softmax_of_what_top_p_leaves() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
    rows = 20_000
    found = torch.bincount(torch.tensor(drawn(sampling, shares.log().repeat(rows, 1))), minlength=4) / rows
    left = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert found[3] == 0
    assert (found - left).abs().max() < 5 * 0.5 / rows**0.5, "five standard deviations"


def test_each_text_is_drawn_with_a_seed_of_its_own_and_repeats() -> None:
    sampling = Sampling(temperature=0.7, top_p=1.0, seed=11)
    scores = torch.zeros(64, 1000)
    first, second = drawn(sampling, scores), drawn(sampling, scores, number=1)
    assert first == drawn(sampling, scores)
    assert first != second
    assert drawn(Sampling(0.7, 1.0), scores) != drawn(Sampling(0.7, 1.0), scores)


def test_a_row_is_drawn_of_its_own_scores() -> None:
    scores = torch.full((3, 5), -math.inf)
    scores[0, 4] = scores[1, 0] = scores[2, 3] = -7.0
    for top_p in (0.5, 1.0):
        assert drawn(Sampling(0.8, top_p, seed=1), scores) == [4, 0, 3]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_that_have_no_softmax_give_some_token(score: float) -> None:
    assert draw(torch.full((4,), score).softmax(0), 0.9, torch.Generator()) == 0


# Settings by flags, by the model, by neither


@pytest.fixture(scope="module")
def small() -> Any:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"do_sample": True, "temperature": 2, "top_k": 0, "min_p": 0.05},
        {"do_sample": True, "typical_p": 0.7, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    ],
)
def test_without_flags_a_model_is_sampled_as_transformers_would(config: dict[str, Any], small: Any) -> None:
    small.generation_config = GenerationConfig(**config)
    theirs, _ = small._prepare_generation_config(None)
    ours = Sampling().of(small.generation_config)
    assert ours.is_greedy == (not theirs.do_sample)
    if ours.settings is not None:
        assert ours.settings == {name: getattr(theirs, name) for name in WARPERS}
        theirs.temperature = float(theirs.temperature)  # transformers refuses an int
        expected = [type(each) for each in small._get_logits_processor(theirs)]
        warpers = ours.chooser([0], 1, ChoiceTerms(16)).processors
        assert [type(each) for each in warpers] == [each for each in expected if each is not TopPLogitsWarper]


DIALOGUE = 0.7
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("flags", "config", "told"),
    [
        ({}, {}, {"do_sample": False}),
        ({}, {"repetition_penalty": 1.2}, {"do_sample": False, "repetition_penalty": 1.2}),
        ({"temperature": 0.8}, {}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}),
        ({"top_p": 0.5}, {}, {"do_sample": True, "temperature": 1.0, "top_p": 0.5}),
        ({"temperature": 0.8}, {"top_p": 0.3}, {"do_sample": True, "temperature": 0.8, "top_p": 0.3}),
        ({"temperature": 0.0}, SAMPLED, {"do_sample": False}),
        ({"temperature": 0.0, "top_p": 0.5}, SAMPLED, {"do_sample": False}),
        ({"temperature": 0.8}, SAMPLED, {"do_sample": True, "temperature": 0.8, "top_k": 20}),
        ({"top_p": 0.5}, SAMPLED, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.5}),
        ({"otherwise": DIALOGUE}, {}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
        ({"otherwise": DIALOGUE}, {"do_sample": False}, {"do_sample": False}),
        ({"otherwise": DIALOGUE}, SAMPLED, {"do_sample": True, "temperature": 0.6, "top_k": 20}),
        ({"otherwise": DIALOGUE, "temperature": 0.0}, {}, {"do_sample": False}),
    ],
)
def test_flags_go_before_the_model(flags: dict[str, Any], config: dict[str, Any], told: dict[str, Any]) -> None:
    sampler = Sampling(**flags, seed=5).of(GenerationConfig(**config))
    assert sampler.as_json() == told | {"seed": 5}
    assert sampler.line().startswith("tokens are drawn (temperature" if told["do_sample"] else "the likeliest tokens")


def test_the_likeliest_of_one_is_taken_however_it_is_drawn() -> None:
    """A model whose top_k is 1 is deterministic, as with transformers."""
    config = GenerationConfig(do_sample=True, top_k=1, temperature=5.0)
    scores = torch.randn(40, 30)
    assert drawn(Sampling(), scores, config=config) == scores.argmax(-1).tolist()


@pytest.mark.parametrize(
    "config", [{"temperature": 0}, {"temperature": -1.0}, {"top_k": -3}, {"top_p": 3.0, "min_p": 7.0}]
)
def test_a_generation_config_that_transformers_refuses_is_an_error_of_one_line(config: dict[str, Any]) -> None:
    sampler = Sampling().of(GenerationConfig(do_sample=True, **config))
    with pytest.raises(
        ConfigError, match=r"^transformers refuses the model's generation_config\.json, or the flags: "
    ) as e:
        sampler.chooser([0], 1, ChoiceTerms(16))
    assert "\n" not in str(e.value)
