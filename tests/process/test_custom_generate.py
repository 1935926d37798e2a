"""Ways of decoding that are code of their own, in a folder or as a function, and texts that begin as embeddings.

The code calls a model as that of the hub's `transformers-community` repositories does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from llmnode.client.versions import CACHE
from llmnode.errors import ConfigError
from process.pairs import TOLERANCE, Pair, open_pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
GROUPS = '''
import torch
from transformers import DynamicCache


def _decode(model, input_ids, generation_config, **model_kwargs):
    """Two groups of beams: each takes its best continuation, less what the group before it took at this step."""
    beams, attention_mask, cache = generation_config.num_beams, model_kwargs["attention_mask"], model_kwargs["cache"]
    for _ in range(generation_config.max_new_tokens):
        given = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 if cache.get_seq_length() else None, cache=cache,
            attention_mask=attention_mask, use_cache=True, is_first_iteration=not cache.get_seq_length(),
        )
        outputs = model(**given, return_dict=True, output_hidden_states=True)
        scores = outputs.logits[:, -1].log_softmax(-1).view(-1, beams, outputs.logits.shape[-1])
        tokens, sources = [], []
        for text, its_scores in enumerate(scores):
            taken = torch.zeros(scores.shape[-1])
            for group in range(2):
                own = its_scores.chunk(2)[group] - taken
                best = own.flatten().topk(beams // 2).indices
                taken = taken + torch.nn.functional.one_hot(best % scores.shape[-1], scores.shape[-1]).sum(0)
                tokens.append(best % scores.shape[-1])
                sources.append(text * beams + group * beams // 2 + best // scores.shape[-1])
        tokens, sources = torch.cat(tokens), torch.cat(sources)
        outputs.cache.reorder_cache(sources)
        input_ids = torch.cat((input_ids[sources], tokens[:, None]), dim=1)
        attention_mask = torch.cat((attention_mask[sources], torch.ones_like(tokens[:, None])), dim=1)
    return input_ids


def generate(model, inputs=None, num_beams=4, max_new_tokens=3, own_cache=False, **kwargs):
    options = {"cache": DynamicCache()} if own_cache else {}
    return model.generate(
        inputs, num_beams=num_beams, max_new_tokens=max_new_tokens, custom_generate=_decode, **options, **kwargs
    )
'''
CONTRASTIVE = '''
import copy
import torch
from transformers import DynamicCache


def generate(model, inputs=None, attention_mask=None, top_k=3, penalty_alpha=0.6, max_new_tokens=3, sequential=False,
             layer=-1, **kwargs):
    """Of the `top_k` next tokens, the one whose hidden state is least like those before it."""
    ids, mask, rows = inputs, attention_mask, len(inputs)
    first = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    outputs = model(ids, use_cache=True, output_hidden_states=True, **first)
    cache, states, scores = outputs.cache, outputs.hidden_states[layer], outputs.logits[:, -1]
    for _ in range(max_new_tokens):
        chances, tokens = scores.softmax(-1).topk(top_k)
        grown = torch.cat((mask, torch.ones(rows, 1, dtype=torch.long)), dim=1)
        places = grown.cumsum(-1)[:, -1:] - 1
        if sequential:
            tried = [
                model(tokens[:, [each]], cache=copy.deepcopy(cache), attention_mask=grown, position_ids=places,
                      use_cache=True, output_hidden_states=True)
                for each in range(top_k)
            ]
            new = torch.stack([each.hidden_states[layer][:, 0] for each in tried], dim=1)
            next_scores = torch.stack([each.logits[:, 0] for each in tried], dim=1)
        else:
            cache.batch_repeat_interleave(top_k)
            tried = model(
                tokens.view(-1, 1), cache=cache, attention_mask=grown.repeat_interleave(top_k, 0),
                position_ids=places.repeat_interleave(top_k, 0), use_cache=True, output_hidden_states=True,
            )
            new = tried.hidden_states[layer].view(rows, top_k, -1)
            next_scores = tried.logits[:, 0].view(rows, top_k, -1)
        likeness = torch.nn.functional.cosine_similarity(states[:, None], new[:, :, None], dim=-1)
        worst = likeness.masked_fill(mask[:, None] == 0, -2.0).amax(-1)
        best = ((1 - penalty_alpha) * chances - penalty_alpha * worst).argmax(-1)
        every = torch.arange(rows)
        if sequential:
            cache = model(tokens[every, best][:, None], cache=cache, attention_mask=grown, position_ids=places).cache
        else:
            cache.batch_select_indices(every * top_k + best)
        ids = torch.cat((ids, tokens[every, best][:, None]), dim=1)
        states = torch.cat((states, new[every, best][:, None]), dim=1)
        scores, mask = next_scores[every, best], grown
    return ids
'''
DRAFTED = '''
import torch


def generate(model, inputs=None, max_new_tokens=4, **kwargs):
    """Guesses that the last token comes again, twice, and crops what was not right; the best tokens all the same."""
    ids, cache = inputs[:1], None
    length = ids.shape[1] + max_new_tokens
    while ids.shape[1] < length:
        guess = torch.cat((ids, ids[:, -1:].repeat(1, 2)), dim=1)
        done = 0 if cache is None else cache.get_seq_length()
        outputs = model(guess[:, done:], cache=cache, use_cache=True, logits_to_keep=3)
        cache, best = outputs.cache, outputs.logits.argmax(-1)
        right = int((best[:, :2] == guess[:, -2:]).cumprod(-1).sum())
        cache.crop(right - 2)
        ids = torch.cat((ids, best[:, : right + 1]), dim=1)
    return ids[:, :length]
'''
LAYERS = '''
def generate(model, inputs=None, **kwargs):
    """Scores of an early layer beside those of the last one, as DoLa has them."""
    outputs = model(inputs, output_hidden_states=True)
    early = model.get_output_embeddings()(outputs.hidden_states[2][:, -1])
    return (outputs.logits[:, -1] - early).argmax(-1)
'''


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair(request.param, tmp_path_factory.mktemp("served")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers copies the code that it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


def folder_of(path: Path, code: str) -> str:
    """A folder with this code. A cache has the name there that the installed transformers gives it."""
    (path / "custom_generate").mkdir()
    named = re.sub(r'\bcache(?==)|(?<=")cache(?=")|(?<=\.)cache\b', CACHE, code)
    (path / "custom_generate" / "generate.py").write_text(named)
    return str(path)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (GROUPS, {}),
        (GROUPS, {"own_cache": True}),
        (CONTRASTIVE, {}),
        (CONTRASTIVE, {"sequential": True}),
        (CONTRASTIVE, {"layer": 0}),
        (DRAFTED, {}),
    ],
)
def test_code_in_a_folder_decodes_as_with_transformers(
    pair: Pair, code: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, code)
    given = {"attention_mask": MASK, "pad_token_id": 0, **options}
    ours, theirs = (
        model.generate(IDS, custom_generate=folder, trust_remote_code=True, **given)
        for model in (pair.served, pair.alone)
    )
    assert ours.tolist() == theirs.tolist()
    assert ours.shape[1] > IDS.shape[1]


def test_code_that_needs_states_between_blocks_is_told_so(pair: Pair, tmp_path: Path) -> None:
    for code, options in ((LAYERS, {}), (CONTRASTIVE, {"layer": 2, "attention_mask": MASK})):
        path = tmp_path / str(len(options))
        path.mkdir()
        folder = folder_of(path, code)
        pair.alone.generate(IDS, custom_generate=folder, trust_remote_code=True, **options)
        with pytest.raises(ConfigError, match="between blocks are with the servers"):
            pair.served.generate(IDS, custom_generate=folder, trust_remote_code=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 4, "num_beam_groups": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"dola_layers": [1, 2]},
        {"force_words_ids": [[5]], "num_beams": 2},
        {"constraints": ["a"], "num_beams": 2},
        {"custom_generate": "/no/such/folder", "trust_remote_code": True},
        {"custom_generate": "/no/such/folder"},
    ],
)
def test_what_transformers_refuses_without_the_hub_is_refused_alike(pair: Pair, options: dict[str, Any]) -> None:
    errors = []
    for model in (pair.served, pair.alone):
        with pytest.raises((ValueError, OSError, TypeError, AttributeError)) as raised:
            model.generate(IDS, max_new_tokens=2, pad_token_id=0, **options)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_code_in_a_folder_is_not_run_without_trust(pair: Pair, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "raise SystemExit('it ran')")
    for model in (pair.served, pair.alone):
        with pytest.raises(ValueError, match="trust_remote_code"):
            model.generate(IDS, custom_generate=folder, trust_remote_code=False)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True, "top_k": 5},
        {CACHE: DynamicCache},
        {"use_cache": False},
    ],
    ids=str,
)
def test_texts_that_begin_as_embeddings(
    pair: Pair, options: dict[str, Any], *, with_mask: bool, with_ids: bool
) -> None:
    embeddings = pair.alone.get_input_embeddings()(IDS).detach() * 0.9
    answers: list[Any] = []
    for model in (pair.served, pair.alone):
        given = {name: value() if isinstance(value, type) else value for name, value in options.items()}
        if with_mask:
            given["attention_mask"] = MASK
        if with_ids:
            given["input_ids"] = IDS
        torch.manual_seed(0)
        try:
            output = model.generate(
                inputs_embeds=embeddings,
                max_new_tokens=3,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                **given,
            )
        except (ValueError, RuntimeError, IndexError) as error:
            answers.append((type(error), str(error)))
        else:
            answers.append(output)
    ours, theirs = answers
    if isinstance(theirs, tuple):
        assert ours == theirs
        return
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.logits, theirs.logits, **TOLERANCE)


def test_lookup_from_padded_embeddings_is_refused_where_transformers_loses_the_mask(pair: Pair) -> None:
    embeddings = pair.alone.get_input_embeddings()(IDS[:1]).detach()
    given = {"inputs_embeds": embeddings, "prompt_lookup_num_tokens": 2, "max_new_tokens": 3, "pad_token_id": 0}
    assert pair.served.generate(**given).tolist() == pair.alone.generate(**given).tolist()
    with pytest.raises(ConfigError, match="attention_mask of shape"):
        pair.served.generate(attention_mask=MASK[:1], **given)
