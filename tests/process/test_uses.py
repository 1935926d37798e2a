"""A program may use a distributed model like any transformers model, or gets the reason why not."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio
from hypothesis import HealthCheck, given, note, settings
from transformers import AutoModelForCausalLM

import llmnode
from llmnode.client import rows
from llmnode.client.versions import CACHE, cache_of
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError, NoRoute
from llmnode.node import Node
from process.pairs import TOLERANCE, Pair, open_pair
from process.uses import uses
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

FAMILIES = ("llama", "gpt2", "mistral", "bloom", "opt")
"""Blocks of ours; learned positions; windows; ALiBi; learned positions that follow the mask."""
DRAWS = int(os.environ.get("LLMNODE_USES", "100"))
"""The number of cases over all families together."""


GENERATION_CONFIGS: dict[str, Any] = {
    "several beams": {"num_beams": 3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "a length": {"max_length": 30, "eos_token_id": [7, 8]},
    "samplers": {"do_sample": True, "temperature": 0.7, "top_k": 5},
    "samplers of nothing": {"do_sample": False, "temperature": 0.7},
    "a static cache": {"cache_implementation": "static"},
    "outputs": {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "max_new_tokens": 6},
    "lookup": {"prompt_lookup_num_tokens": 2, "max_new_tokens": 6},
    "guidance": {"guidance_scale": 1.5, "max_new_tokens": 4},
    "a watermark": {"watermarking_config": {"bias": 2.0}, "max_new_tokens": 4},
    "chunks": {"prefill_chunk_size": 2, "max_new_tokens": 4},
    "code of the hub": {"penalty_alpha": 0.6, "top_k": 4},
    "stop strings without a tokenizer": {"stop_strings": ["a"]},
    "nonsense": {"cache_implementation": "nonsense"},
    "a negative number": {"max_new_tokens": -3},
    "a list": [1, 2],
    "no JSON": "{",
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair(request.param, tmp_path_factory.mktemp("served")) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore")
def test_any_use_gives_what_transformers_gives_or_is_refused(pair: Pair) -> None:
    @settings(
        max_examples=max(1, DRAWS // len(FAMILIES)),
        deadline=None,
        derandomize=DRAWS == 100,
        suppress_health_check=list(HealthCheck),
    )
    @given(uses)
    def check(drawn: list[Any]) -> None:
        pair.forget()
        pair.said.clear()
        try:
            for use in drawn:
                use.run(pair)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which Hypothesis keeps, and they have caches
            raise
        finally:
            for refusal in pair.said:
                note(refusal)

    check()


def test_equal_rows_in_other_columns_have_scores_of_their_own(pair: Pair) -> None:
    ids = torch.tensor([[0, 5, 6], [5, 6, 0]])
    mask, positions = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]])
    given = {"attention_mask": mask, "position_ids": positions}
    scores, expected = pair.served(ids, **given).logits, pair.alone(ids, **given).logits
    torch.testing.assert_close(scores[mask.bool()], expected[mask.bool()], **TOLERANCE)
    same, kept = torch.tensor([[5, 6, 7]] * 2), torch.tensor([[0], [2]])
    scores, expected = (model(same, logits_to_keep=kept).logits for model in (pair.served, pair.alone))
    torch.testing.assert_close(scores, expected, **TOLERANCE)


def test_a_decoding_loop_of_ones_own_goes_on_from_the_cache(pair: Pair) -> None:
    """`custom_generate` of transformers."""

    def twice(model: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        given = input_ids
        for _ in range(2):
            given = model(given, use_cache=True, **{CACHE: options[CACHE]}).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, given), dim=1)
        return input_ids

    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    ours, theirs = (
        model.generate(ids, custom_generate=twice, max_new_tokens=2, pad_token_id=0)
        for model in (pair.served, pair.alone)
    )
    assert ours.tolist() == theirs.tolist()


def test_a_row_that_got_on_alone_goes_back_before_the_next_forward(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    output = pair.served(ids, use_cache=True)
    run, ran, is_done = rows.run_blocks, [], trio.Event()

    async def fails_at_the_second(session: Any, states: torch.Tensor) -> torch.Tensor:
        ran.append(session)
        if len(ran) == 2:
            await is_done.wait()
            raise NoRoute([Span(0, 1)])
        outputs = await run(session, states)
        is_done.set()
        return outputs

    next_ids = torch.tensor([[7], [8]])
    with monkeypatch.context() as patched:
        patched.setattr(rows, "run_blocks", fails_at_the_second)
        with pytest.raises(NoRoute):
            pair.served(next_ids, cache=cache_of(output))
    again = pair.served(next_ids, cache=cache_of(output)).logits
    expected = pair.alone(torch.cat((ids, next_ids), dim=1)).logits[:, -1:]
    torch.testing.assert_close(again, expected, **TOLERANCE)


def test_a_cache_that_nobody_has_any_more_ends_its_sessions(pair: Pair) -> None:
    pair.forget()
    output = pair.served(torch.tensor([[1, 2, 3]]), use_cache=True)
    (entered,) = cache_of(output)._entered.values()
    del output
    entered._left.result(timeout=10)


def test_a_cache_grows_as_it_is_used(pair: Pair) -> None:
    """Past its capacity at first, which the servers copy."""
    tokens = torch.arange(1, 101)[None]
    grown = None
    for part in tokens.split((60, 30, 10), dim=1):
        output = pair.served(part, cache=grown, use_cache=True)
        grown = cache_of(output)
    expected = pair.alone(tokens).logits[:, -10:]
    torch.testing.assert_close(output.logits, expected, **TOLERANCE)
    with pytest.raises(ConfigError, match=r"context|embeddings for"):
        pair.served(torch.ones(1, pair.served.info.context_tokens, dtype=torch.long), cache=grown)
    assert grown.get_seq_length() == tokens.shape[1]


@pytest.mark.filterwarnings("ignore")
def test_generation_configs_of_any_content_mean_the_same(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_model("llama", tied=False).save_pretrained(tmp_path)

    def generated(load: Callable[[], Any]) -> tuple[object, str]:
        try:
            model = load()
            torch.manual_seed(0)
            output = model.generate(torch.tensor([[1, 2, 3, 1, 2]]), pad_token_id=0)
        except (ModelError, TypeError, ValueError) as error:
            return None, str(error).rpartition(": ")[2]
        return getattr(output, "sequences", output).tolist(), ""

    with ExitStack() as stack:
        node = stack.enter_context(Node(str(tmp_path), blocks=f"0:{BLOCKS}", worker="thread", threads=1))
        for name, content in GENERATION_CONFIGS.items():
            (tmp_path / "generation_config.json").write_text(content if name == "no JSON" else json.dumps(content))
            alone = generated(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
            served = generated(lambda: stack.enter_context(llmnode.connect(str(tmp_path), peers=node.addresses)))
            assert served == alone, name
