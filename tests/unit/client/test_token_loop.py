"""The async token loop: what it yields, when it ends, and that its session ends with it."""

from __future__ import annotations

import gc
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio
import trio.testing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.stopping_criteria import StopStringCriteria

from llmnode import Sampling
from llmnode.client.generate import Answer
from llmnode.client.sampling import ChoiceTerms
from llmnode.client.stopping import FinishReason
from llmnode.errors import ConfigError, SessionLost
from unit.canned import CONTEXT_TOKENS, END, FAIL, REFUSED, CannedClient, canned_tokenizer
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from llmnode.client.generate import Token
    from llmnode.models.text.tokenizer import Tokenizer

SAYS = "one, two, three"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return canned_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def all_of(answer: Answer) -> list[Token]:
    return [token async for token in answer]


def is_open(client: CannedClient) -> list[bool]:
    return [session.is_open for session in client.canned_router.sessions]


@in_trio
async def test_tokens_come_one_by_one_and_the_last_one_says_how_it_ended(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, "é 好")
    prompt = tokenizer.encode("hi")
    tokens = await all_of(client.generate(prompt))
    assert [token.id for token in tokens] == [*tokenizer.encode("é 好"), END]
    assert [token.text for token in tokens] == ["", "é", " ", "", "", "好", ""]
    assert [token.finish for token in tokens[:-1]] == [None] * 6
    finish = tokens[-1].finish
    assert finish is not None and finish.reason is FinishReason.END
    assert (finish.usage.prompt_tokens, finish.usage.new_tokens) == (2, 7)
    assert 0 < finish.usage.first_token_s <= finish.usage.total_s
    whole = await client.generate(prompt)
    assert (whole.text, whole.token_ids) == ("é 好", tuple(token.id for token in tokens))
    assert whole.finish.reason == "end"
    assert is_open(client) == [False, False]


@pytest.mark.parametrize(
    ("asked", "options", "settings", "tokens", "reason"),
    [
        (3, {}, {}, 3, FinishReason.LENGTH),
        (15, {}, {}, 15, FinishReason.LENGTH),
        (16, {}, {}, 16, FinishReason.END),
        (None, {"stop_at_eos": False}, {}, CONTEXT_TOKENS - 2, FinishReason.CONTEXT),
        (20, {"stop_at_eos": False}, {}, 20, FinishReason.LENGTH),
        (20, {}, {"stop_strings": "two"}, 8, FinishReason.STOP),
        (20, {}, {"max_time": 0.0}, 1, FinishReason.TIME),
        (8, {}, {"stop_strings": ["two"]}, 8, FinishReason.STOP),
        (20, {}, {"eos_token_id": 13}, 4, FinishReason.END),
    ],
)
def test_why_a_text_ends(
    asked: int | None, options: dict[str, Any], settings: Any, tokens: int, reason: FinishReason, tokenizer: Tokenizer
) -> None:
    if "eos_token_id" in settings:
        settings = {"eos_token_id": tokenizer.encode(",")[0]}
    client = CannedClient(tokenizer, SAYS)

    async def generate() -> list[Token]:
        sampling = Sampling(settings=settings)
        return await all_of(client.generate(tokenizer.encode("hi"), asked, sampling=sampling, **options))

    made = trio.run(generate)
    assert (len(made), made[-1].finish and made[-1].finish.reason) == (tokens, reason)


@pytest.mark.parametrize(
    "stops", [["two"], ["o, t"], ["zwei", "e, "], ["e", "ne"], [", three"], ["ione"], ["four"], ["é"]]
)
@pytest.mark.parametrize("prompt", ["hi", "Zion", "two", "Ti"])
def test_stop_strings_end_a_text_where_transformers_ends_it(
    prompt: str, stops: list[str], tokenizer: Tokenizer
) -> None:
    """The text has nothing of them."""
    client = CannedClient(tokenizer, SAYS)
    token_ids = tokenizer.encode(prompt)
    sampling = Sampling(settings={"stop_strings": stops})

    async def generate() -> list[Token]:
        return await all_of(client.generate(token_ids, 20, sampling=sampling))

    tokens = trio.run(generate)
    criteria: Any = StopStringCriteria(tokenizer.loaded, stops)
    said = [*tokenizer.encode(SAYS), END]
    expected = next(
        (count for count in range(1, len(said)) if criteria(torch.tensor([[*token_ids, *said[:count]]]), None)),
        len(said),
    )
    assert [token.id for token in tokens] == said[:expected]
    text = "".join(token.text for token in tokens)
    assert SAYS.startswith(text) and not any(stop in text for stop in stops)
    found = [at for stop in stops if (at := (prompt + SAYS).find(stop, max(0, len(prompt) - len(stop) + 1))) >= 0]
    assert text == SAYS[: max(0, min(found) - len(prompt))] if found else text == SAYS


@in_trio
async def test_log_probabilities_are_the_model_s_own(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    sampling = Sampling(temperature=0.5, seed=1)
    token, *_ = await all_of(client.generate(tokenizer.encode("hi"), 2, sampling=sampling, logprobs=3))
    assert token.logprob == pytest.approx(0.0, abs=1e-6)
    assert len(token.top) == 3 and token.top[0] == (token.id, token.logprob)
    token, *_ = await all_of(client.generate(tokenizer.encode("hi"), 2, logprobs=0))
    assert token.logprob is not None and token.top == ()
    token, *_ = await all_of(client.generate(tokenizer.encode("hi"), 2))
    assert token.logprob is None


@in_trio
async def test_what_does_not_fit_is_refused_at_once(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer)
    prompt = tokenizer.encode("hi")
    for options in ({"max_new_tokens": CONTEXT_TOKENS}, {"max_new_tokens": 0}, {"logprobs": 21}, {"logprobs": -1}):
        with pytest.raises(ConfigError):
            client.generate(prompt, **options)
    with pytest.raises(ConfigError, match="not one of the model's"):
        client.generate([5, 1 << 20])
    with pytest.raises(ConfigError, match="no such settings: tempo"):
        client.generate(prompt, sampling=Sampling(settings={"tempo": 3}))
    with pytest.raises(ConfigError, match="guidance_scale"):
        client.generate(prompt, sampling=Sampling(settings={"guidance_scale": 3.0}))
    async with client.inference_session(8) as session:
        await client.generate(prompt, 3, session=session)
        with pytest.raises(ConfigError, match="the session holds 4 tokens"):
            client.generate(prompt, 3, session=session)
        for length, asked in ((5, 5), (9, None)):
            with pytest.raises(ConfigError, match="exceed the session's 8 positions"):
                client.generate(tokenizer.encode("x" * length), asked, session=session)


@in_trio
async def test_a_text_without_a_length_fills_the_session_that_it_is_given(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    async with client.inference_session(8) as session:
        text = await client.generate(tokenizer.encode("hi"), session=session)
        assert (text.text, text.finish.reason) == (SAYS[:7], FinishReason.CONTEXT)
        assert session.position == 8


@in_trio
async def test_an_answer_is_generated_once(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    answer = client.generate(tokenizer.encode("hi"))
    assert (await answer).text == SAYS
    with pytest.raises(RuntimeError, match="has been generated"):
        await answer
    with pytest.raises(RuntimeError, match="has been generated"):
        await all_of(answer)


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("temperature", 1e9), ("top_p", 0.0), ("top_p", 2)])
def test_a_temperature_or_top_p_that_cannot_be_drawn_with_is_refused(name: str, value: float) -> None:
    asked: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name} "):
        Sampling(**asked)


# A session ends with its text, however the text ends


@in_trio
async def test_who_leaves_the_loop_ends_the_session_at_once(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    async with client.generate(tokenizer.encode("hi")) as answer:
        async for _ in answer:
            assert is_open(client) == [True]
            break
    assert is_open(client) == [False]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@in_trio
async def test_an_iterator_that_is_forgotten_ends_its_session(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    async for _ in client.generate(tokenizer.encode("hi")):
        break
    gc.collect()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert is_open(client) == [False]


@in_trio
async def test_a_timeout_ends_the_session(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    with trio.CancelScope() as scope:
        async with aclosing(client.generate(tokenizer.encode("hi")).__aiter__()) as tokens:
            async for _ in tokens:
                scope.cancel()
    assert scope.cancelled_caught
    assert is_open(client) == [False]
    assert not client.ends._task_requests


@pytest.mark.parametrize("checkpoints", range(0, 40, 3))
def test_a_text_that_is_cancelled_at_any_point_leaves_nothing(checkpoints: int, tokenizer: Tokenizer) -> None:
    """The texts beside it are whole."""
    client = CannedClient(tokenizer, SAYS)
    texts: list[str] = []

    async def generate(scope: trio.CancelScope) -> None:
        with scope:
            async with client.generate(tokenizer.encode("hi")) as answer:
                texts.append("".join([token.text async for token in answer]))

    async def use() -> None:
        scopes = [trio.CancelScope() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(generate, scope)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            scopes[1].cancel()
        assert texts == [SAYS] * (3 if not scopes[1].cancelled_caught else 2)

    trio.run(use)
    assert not any(is_open(client))
    assert not client.ends._task_requests and client.ends._leader is None


@pytest.mark.parametrize(("prompt", "error"), [(FAIL, SessionLost), (REFUSED, ConfigError)])
def test_an_error_of_the_swarm_is_raised_after_the_tokens_before_it(
    prompt: str, error: type[Exception], tokenizer: Tokenizer
) -> None:
    client = CannedClient(tokenizer, SAYS)
    came: list[int] = []

    async def generate() -> None:
        async for token in client.generate(tokenizer.encode(prompt)):
            came.append(token.id)

    with pytest.raises(error):
        trio.run(generate)
    assert came == (tokenizer.encode(SAYS)[:1] if prompt == FAIL else [])
    assert is_open(client) == [False]


@in_trio
async def test_a_session_of_the_caller_goes_on_and_stays_open(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    prompt = tokenizer.encode("hi there")
    async with client.inference_session(CONTEXT_TOKENS) as session:
        held: Any = session
        first = await client.generate(prompt, 3, session=session)
        assert held.token_ids == [*prompt, *first.token_ids[:-1]]
        longer = [*prompt, *first.token_ids, *tokenizer.encode(" more")]
        second = await client.generate(longer, 3, session=session)
        assert held.token_ids == [*longer, *second.token_ids[:-1]]
        assert is_open(client) == [True]


@in_trio
async def test_texts_beside_each_other_are_scored_together_and_each_is_its_own(tokenizer: Tokenizer) -> None:
    client = CannedClient(tokenizer, SAYS)
    texts: dict[int, str] = {}

    async def generate(number: int) -> None:
        texts[number] = (await client.generate(tokenizer.encode("x" * (number + 1)))).text

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(generate, number)
    assert texts == dict.fromkeys(range(8), SAYS)
    assert sum(client.canned_ends.scored) == 8 * (len(SAYS) + 1)
    assert max(client.canned_ends.scored) > 1


# Tokens are chosen as transformers chooses them

VOCABULARY, PROMPT, NEW = 40, [3, 7, 7, 9, 3], 24


@pytest.fixture(scope="module")
def small() -> Any:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.4, **shape)).eval()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[4], [5, 6]], "suppress_tokens": [8], "begin_suppress_tokens": [9, 10]},
    {"min_new_tokens": 12},
    {"min_length": 15, "exponential_decay_length_penalty": (4, 1.4)},
    {"forced_eos_token_id": 2, "remove_invalid_values": True, "renormalize_logits": True},
    {"sequence_bias": [[[11], 3.0], [[3, 7], -4.0]]},
    {"encoder_repetition_penalty": 1.2, "repetition_penalty": 0.8},
]
WARPED: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 0, "min_p": 0.05},
    {"typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    {"top_k": 5, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 3},
]


def config_of(settings: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(**{"eos_token_id": [2, 30], "pad_token_id": 0, **settings})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_tokens_are_those_of_transformers_with_every_processor(settings: dict[str, Any], small: Any) -> None:
    config = config_of(settings)
    ids = torch.tensor([PROMPT])
    expected = small.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, max_new_tokens=NEW)
    chooser = Sampling().of(config).chooser(PROMPT, NEW, ChoiceTerms(VOCABULARY))
    text = list(PROMPT)
    while len(text) < len(PROMPT) + NEW:
        text.append(chooser(small(torch.tensor([text])).logits[0, -1].detach()).id)
        if text[-1] in (2, 30):
            break
    assert text == expected[0].tolist()


@pytest.mark.parametrize("settings", WARPED, ids=str)
def test_tokens_are_drawn_of_the_scores_that_transformers_draws_of(settings: dict[str, Any], small: Any) -> None:
    """They are equal to the bit. Here transformers' own warper applies top_p; `test_sampling.py` tests ours."""
    from transformers.generation.logits_process import TopPLogitsWarper

    config = config_of({"do_sample": True, **settings})
    ids = torch.tensor([PROMPT])
    theirs = small.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, max_new_tokens=NEW,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    text = theirs.sequences[0].tolist()
    processors = list(Sampling().of(config).chooser(PROMPT, NEW, ChoiceTerms(VOCABULARY)).processors)
    if settings.get("top_p", 1) < 1:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    for step, (logits, scores) in enumerate(zip(theirs.logits, theirs.scores, strict=True)):
        left, seen = logits.clone(), torch.tensor([text[: len(PROMPT) + step]])
        for processor in processors:
            left = processor(seen, left)
        assert torch.equal(left, scores)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.5, top_p=0.8, seed=2)], ids=["greedy", "drawn"]
)
def test_log_probabilities_are_the_log_softmax_of_the_logits_of_transformers(sampling: Sampling, small: Any) -> None:
    """Processors and warpers do not change them."""
    config = config_of({"repetition_penalty": 1.3})
    chooser = sampling.of(config).chooser(PROMPT, NEW, ChoiceTerms(VOCABULARY, logprobs=4))
    text = list(PROMPT)
    for _ in range(NEW):
        logits = small(torch.tensor([text])).logits[0, -1].detach()
        choice = chooser(logits)
        expected = logits.log_softmax(-1)
        assert choice.logprob == expected[choice.id]
        values, ids = expected.sort(descending=True)
        assert choice.top == tuple(zip(ids[:4].tolist(), values[:4].tolist(), strict=True))
        text.append(choice.id)
