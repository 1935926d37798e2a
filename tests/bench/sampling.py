"""The time to choose a token, against transformers' own sampling of the same scores: SmolLM2-135M on one thread.

Both choose from the scores of each token of one text. They take turns, and turns at being first. The times of the parts
of transformers' sampling are printed too: nearly all of it is sorting, and the exponential noise of `multinomial`.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from bench.kit.options import add_tokens
from bench.kit.report import Report, Row, quartiles
from llmnode.client.sampling import ChoiceTerms, Sampling
from llmnode.models.embedded import open_embedded
from llmnode.models.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from bench.kit.options import Options
    from llmnode.client.sampling import Chooser
    from llmnode.models.sources.folder import ModelFolder

PROMPT = "Write a story about the sea."
CHOICES = ((0.7, 0.9), (1.0, 0.95), (1.5, 0.9), (0.7, 1.0), (1.0, 0.1))
"""Pairs of temperature and --top-p."""
NO_TOKENS: Any = None  # Any: neither warper looks at the tokens before


def scores_of_text(folder: ModelFolder, tokens: int) -> torch.Tensor:
    """Scores (tokens, vocabulary) for each token of a sampled text."""
    model = AutoModelForCausalLM.from_pretrained(folder.path)
    prompt = torch.tensor([load_tokenizer(folder).encode_dialogue([("user", PROMPT)])])
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_new_tokens": tokens, "max_new_tokens": tokens}
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    scores: torch.Tensor = model(text).logits[0, prompt.shape[1] - 1 : -1]
    return scores


def theirs_ms(temperature: float, top_p: float, scores: torch.Tensor) -> list[float]:
    """The times of transformers' own sampling: until the warpers are done, and until the draw is."""
    began_s = time.perf_counter()
    warm = LogitsProcessorList([TemperatureLogitsWarper(temperature)])(NO_TOKENS, scores)
    warmed_s = time.perf_counter()
    left = LogitsProcessorList([TopPLogitsWarper(top_p)])(NO_TOKENS, warm) if top_p < 1 else warm
    left_s = time.perf_counter()
    torch.multinomial(left.softmax(-1), num_samples=1).squeeze(1)
    return [1e3 * part_s for part_s in (warmed_s - began_s, left_s - warmed_s, time.perf_counter() - left_s)]


def ours_ms(chooser: Chooser, scores: torch.Tensor) -> float:
    """The time of the client's token loop."""
    began_s = time.perf_counter()
    chooser(scores[0])
    return 1e3 * (time.perf_counter() - began_s)


def pairs(temperature: float, top_p: float, scores: torch.Tensor) -> Iterator[tuple[list[float], float]]:
    sampler = Sampling(temperature, top_p, seed=1).of(GenerationConfig())
    chooser = sampler.chooser([], len(scores), ChoiceTerms(scores.shape[1]))
    for number, row in enumerate(scores):
        if number % 2:
            ours = ours_ms(chooser, row[None].clone())
            yield theirs_ms(temperature, top_p, row[None].clone()), ours
        else:
            yield theirs_ms(temperature, top_p, row[None].clone()), ours_ms(chooser, row[None].clone())


def add(parser: argparse.ArgumentParser) -> None:
    add_tokens(parser, 200, "tokens of the text")


@torch.inference_mode()
def run(options: Options) -> Report:
    scores = scores_of_text(open_embedded(), options.tokens)
    rows: list[Row] = []
    for temperature, top_p in CHOICES:
        found = list(pairs(temperature, top_p, scores))[2:]  # the first two warm up
        warper, top, draw = (statistics.median(part) for part in zip(*(theirs for theirs, _ in found), strict=True))
        rows.append(
            {
                "temperature": temperature,
                "top-p": top_p,
                "its warper, ms": warper,
                "that of top-p": top,
                "softmax, draw": draw,
                "in all": statistics.median(sum(theirs) for theirs, _ in found),
                "ours": statistics.median(ours for _, ours in found),
                "of theirs": quartiles([ours / sum(theirs) for theirs, ours in found]),
            }
        )
    return Report(rows, legend="medians; ratios: median (quartiles)")
