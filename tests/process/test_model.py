"""`llmnode.connect`: a transformers model whose blocks are elsewhere does what the whole model does."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import trio.testing
from transformers import AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TextStreamer

import llmnode
from llmnode.client import generate as generate_module
from llmnode.client import rows as rows_module
from llmnode.client.connect import aconnect
from llmnode.client.portal import open_portal
from llmnode.client.sampling import Sampling
from llmnode.client.versions import CACHE, cache_of
from llmnode.errors import ConfigError, SessionClosed
from llmnode.node.chat import Chat, StopFlag
from llmnode.node.connect_options import OpenClient

pytestmark = [pytest.mark.process, pytest.mark.slow]

NEW_TOKENS = 16
TEXTS = ["Hello, my name is", "Once upon a time there was a king who", "1 2 3"]


def test_greedy_generation_of_a_batch_with_padding(model: Any, transformers_model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    chosen = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = transformers_model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert chosen.tolist() == expected.tolist()


def test_sampling_with_processors_and_several_answers(model: Any, transformers_model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS[:2], return_tensors="pt", padding=True)
    options = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "num_return_sequences": 2,
    }
    torch.manual_seed(1)
    chosen = model.generate(**inputs, **options)
    torch.manual_seed(1)
    expected = transformers_model.generate(**inputs, **options)
    assert chosen.tolist() == expected.tolist()


def test_scores_of_every_position(model: Any, transformers_model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    scores, expected = model(**inputs).logits, transformers_model(**inputs).logits
    assert scores.shape == expected.shape
    real = inputs.attention_mask.bool()
    torch.testing.assert_close(scores[real], expected[real], atol=1e-3, rtol=1e-4)


def test_streamers_and_stopping_criteria_are_those_of_transformers(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> Any:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= prompt_tokens + 3)

    inputs = tokenizer("The capital of France is", return_tensors="pt")
    prompt_tokens = inputs.input_ids.shape[1]
    output = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        stopping_criteria=StoppingCriteriaList([AfterThree()]),
    )
    assert output.shape[1] == prompt_tokens + 3
    assert capsys.readouterr().out.startswith("Paris") or "Paris" in tokenizer.decode(output[0])


def test_a_cache_lasts_over_calls_and_can_be_cropped(model: Any, transformers_model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    expected = transformers_model.generate(**inputs, max_new_tokens=10, do_sample=False)
    with model.open_cache(64) as cache:
        first = model.generate(**inputs, max_new_tokens=5, do_sample=False, cache=cache)
        assert cache.get_seq_length() == first.shape[1] - 1, "the last token has not been run yet"
        second = model.generate(first, max_new_tokens=5, do_sample=False, cache=cache)
        assert second.tolist() == expected.tolist()
        cache.truncate(4)
        again = model.generate(**inputs, max_new_tokens=10, do_sample=False, cache=cache)
        assert again.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_may_have_the_old_name_and_the_new_one(model: Any, tokenizer: Any, name: str) -> None:
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    is_old = name not in ("cache", CACHE)
    with model.open_cache(32) as cache:
        with pytest.warns(FutureWarning, match="Use `cache`") if is_old else nullcontext():
            output = model(**inputs, **{name: cache}, logits_to_keep=1)
        assert cache_of(output) is cache
        assert cache.get_seq_length() == inputs.input_ids.shape[1]


def test_an_inference_session_steps_and_rolls_back(model: Any, tokenizer: Any) -> None:
    hidden = model.get_input_embeddings()(tokenizer(TEXTS[1], return_tensors="pt").input_ids)
    with model.inference_session(max_length=32) as session:
        first = session.step(hidden[:, :4])
        rest = session.step(hidden[:, 4:])
        assert session.position == hidden.shape[1]
        session.position = 2
        again = session.step(hidden[:, 2:])
    torch.testing.assert_close(again, torch.cat([first, rest], dim=1)[:, 2:], atol=1e-3, rtol=1e-4)


def test_what_does_not_fit_is_refused_before_any_work(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="do not fit the model's context"):
        model.generate(**tokenizer("one two", return_tensors="pt"), do_sample=False, max_new_tokens=9000)


def test_padding_on_the_right_is_left_out(model: Any, transformers_model: Any, folder: Any) -> None:
    right = AutoTokenizer.from_pretrained(folder.path, padding_side="right")
    inputs = right(TEXTS, return_tensors="pt", padding=True)
    real = inputs.attention_mask.bool()
    scores, expected = model(**inputs).logits, transformers_model(**inputs).logits
    torch.testing.assert_close(scores[real], expected[real], atol=1e-3, rtol=1e-4)
    assert not scores[~real].any(), "nothing comes of padding"


@pytest.mark.parametrize("token", [-1, 49152])
def test_a_token_that_the_model_does_not_have_is_refused_before_a_session_is_opened(
    model: Any, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmnode.client.causal_lm.SessionCache", None)
    ids = torch.tensor([[5, token]])
    for use in (model, model.generate):
        with pytest.raises(
            ConfigError, match=f"token {token} is not one of the model's 49152: give ids from 0 to 49151"
        ):
            use(ids)


def test_position_ids_may_begin_anywhere_and_go_on_from_there(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    usual = (inputs.attention_mask.cumsum(-1) - 1).clamp(min=0)
    scores = model(**inputs, position_ids=usual).logits
    for shift in (0, 5):
        torch.testing.assert_close(
            scores, model(**inputs, position_ids=usual + shift).logits, atol=1e-3, rtol=1e-4
        )  # rotary embeddings see distances alone, and rows share forwards as they come
    with pytest.raises(ConfigError, match="position_ids"):
        model(**inputs, position_ids=2 * usual)


def test_a_turn_of_a_dialogue_runs_only_what_is_new(peers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run_blocks = generate_module.run_blocks

    async def counted(session: Any, hidden: Any) -> Any:
        ran.append(len(hidden))
        return await run_blocks(session, hidden)

    monkeypatch.setattr(generate_module, "run_blocks", counted)
    with open_portal() as portal, portal.enter(aconnect(peers)) as client:
        dialogue = Chat(OpenClient(portal, client), Sampling(), max_new_tokens=6, max_length=256)
        dialogue.answer("Name three fruits, please, and tell me which of them grows in the north.", StopFlag())
        first_prompt, ran[:] = ran[0], []
        dialogue.answer("And now?", StopFlag())
        whole_prompt = len(client.tokenizer.encode_dialogue(dialogue.turns[:-1]))
        dialogue.reset()
    assert ran[0] < first_prompt < whole_prompt, "the first turn was not run again"


def test_of_a_batch_of_long_rows_few_are_under_way_together(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, long = 4, rows_module.POSITIONS_PER_HOP
    under_way, most = 0, 0

    async def counted(_session: Any, states: torch.Tensor) -> torch.Tensor:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await trio.testing.wait_all_tasks_blocked()
        under_way -= 1
        return states

    monkeypatch.setattr(rows_module, "run_blocks", counted)
    with model.open_cache(1, rows) as opened:
        for positions, at_once in ((long, len(model.route)), (10 * long, 1), (1, rows)):
            most = 0
            hidden = torch.randn(rows, positions, 1)
            outputs = opened.run_rows(list(hidden))
            assert torch.equal(torch.stack(outputs), hidden)
            assert most == at_once


def test_a_token_looks_at_the_parameters_of_the_ends_and_not_at_those_of_the_blocks(model: Any) -> None:
    blocks = {id(each) for each in model.remote_blocks.parameters()}
    looked_at = {number for number, *_ in model._ends_now()}
    assert blocks and looked_at == {id(each) for each in model.parameters()} - blocks


def test_it_works_in_a_notebook_and_closes_for_good(peers: list[str], tokenizer: Any) -> None:
    """A notebook's cell runs inside a running event loop."""
    inputs = tokenizer("1 2 3", return_tensors="pt")

    async def cell() -> Any:
        other = llmnode.AutoDistributedModelForCausalLM.from_pretrained(initial_peers=peers)
        assert other.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1] == inputs.input_ids.shape[1] + 2
        other.close()
        return other

    closed = asyncio.run(cell())
    with pytest.raises(SessionClosed):
        closed.generate(**inputs, max_new_tokens=2, do_sample=False)
