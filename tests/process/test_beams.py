"""Beam search through real servers gives the sequences and scores of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmnode.client.cache import SessionCache
from llmnode.errors import PeerRefused
from llmnode.wire.messages import RefusalCode

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

NEW_TOKENS = 12
TEXTS = ["Once upon a time there was a king who", "The capital of France is"]
"""The texts have unequal lengths."""


def check_beams(ours: Any, theirs: Any) -> None:
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=1e-4)
    for scores, expected in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-4)


def both(model: Any, transformers_model: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True, **options}
    answers = []
    for each in (model, transformers_model):
        torch.manual_seed(1)
        answers.append(each.generate(**inputs, **options))
    return answers[0], answers[1]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "do_sample": False},
        {"num_beams": 3, "do_sample": False, "num_return_sequences": 3, "length_penalty": 0.5},
        {"num_beams": 4, "do_sample": False, "num_return_sequences": 2, "early_stopping": True},
        {"num_beams": 4, "do_sample": False, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        {"num_beams": 3, "do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 2},
    ],
    ids=["two", "three-all-returned", "four-early", "four-processed", "three-sampled"],
)
def test_beams_of_a_batch_with_padding(
    model: Any, transformers_model: Any, tokenizer: Any, options: dict[str, Any]
) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    ours, theirs = both(model, transformers_model, inputs, **options)
    check_beams(ours, theirs)
    rows = theirs.beam_indices
    assert len({int(row) for row in rows.flatten() if row >= 0}) > 2, "beams crossed"


def test_a_prompt_is_run_once_for_all_its_beams_or_answers(
    model: Any, transformers_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    run_rows = SessionCache.run_rows

    def counted(cache: SessionCache, hidden: Any) -> Any:
        ran.append(sum(len(row) for row in hidden if row is not None))
        return run_rows(cache, hidden)

    monkeypatch.setattr(SessionCache, "run_rows", counted)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    for options in ({"num_beams": 3, "do_sample": False}, {"num_return_sequences": 3, "do_sample": True}):
        ran.clear()
        ours, theirs = both(model, transformers_model, inputs, **options)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert ran == [int(inputs.attention_mask.sum())] + [6] * (len(ran) - 1)


def test_a_cache_of_ones_own_is_filled_with_the_beams(model: Any, transformers_model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    options = {"max_new_tokens": NEW_TOKENS, "num_beams": 3, "do_sample": False}
    with model.open_cache(64, rows=3) as cache:
        assert len({each.rows for each in cache._sessions}) == 1, (
            "they wait for each other, be their texts alike or not"
        )
        chosen = model.generate(**inputs, **options, cache=cache)
    assert chosen.tolist() == transformers_model.generate(**inputs, **options).tolist()


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        # 64 sessions may be open over one link; one of an earlier test may be ending yet.
        ({"num_beams": 65, "max_new_tokens": 1}, RefusalCode.BUSY, "only 6[34] of 65 rows fit"),
        ({"num_beams": 5, "max_new_tokens": 8000}, RefusalCode.NO_ROOM, "only 4 of 5 rows fit"),
    ],
)
def test_beams_for_which_there_is_no_kv_are_refused_before_any_work(
    model: Any,
    tokenizer: Any,
    options: dict[str, Any],
    code: RefusalCode,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SessionCache, "run_rows", lambda *_arguments: pytest.fail("it worked"))
    with pytest.raises(PeerRefused, match=reason) as refused:
        model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), do_sample=False, **options)
    assert refused.value.code == code
