"""Outputs that a config asks for beside the scores, layers of a cache, and failed calls whose exceptions are kept."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessorList, StaticCache

import llmnode
from llmnode.client.forward import WithServers
from llmnode.client.versions import CACHE, CHOOSES_STATES, cache_of
from llmnode.errors import ConfigError
from llmnode.node import Node
from process.pairs import TOLERANCE, Pair, open_pair
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

IDS = torch.tensor([[1, 2, 3]])
SESSIONS = 64
"""Sessions that a server has for each link."""
CHOICE: Any = [0, -1] if CHOOSES_STATES else True
CHOICES: list[Any] = [[0], [0, -1], [9], (0, 2)] if CHOOSES_STATES else []
CONFIGS: list[dict[str, Any]] = [
    {"output_attentions": True},
    {"attn_implementation": "eager", "output_attentions": True},
    {"output_hidden_states": True},
    {"output_hidden_states": 1},
    {"output_hidden_states": CHOICE},
    {"output_router_logits": True},
    {"return_dict": False},
    {"return_dict": None},
    {"use_cache": False},
    {"output_hidden_states": True, "return_dict": None, "use_cache": False},
]
GENERATION_CONFIGS: list[dict[str, Any]] = [
    {"output_attentions": True},
    {"output_hidden_states": CHOICE, "return_dict_in_generate": True},
    {"output_hidden_states": 2, "return_dict_in_generate": True},
    {"use_cache": False, "return_dict_in_generate": True},
    {"output_logits": True, "output_scores": True, "return_dict_in_generate": True},
    {"eos_token_id": [[7]]},
    {"eos_token_id": [7.0, 8]},
    {"eos_token_id": 8.0},
    {"eos_token_id": []},
    {"eos_token_id": -1},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair("llama", tmp_path_factory.mktemp("served")) as opened:
        yield opened


def assert_same(ours: Any, theirs: Any) -> None:
    """Tensors are equal, or with the servers: using one of those says so."""
    if isinstance(ours, WithServers):
        with pytest.raises(ConfigError, match="with the servers"):
            torch.add(ours, 1)  # type: ignore[call-overload]  # it is none
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    elif isinstance(theirs, (tuple, list)):
        # Without code for it in its attention, transformers gives an empty tuple of weights.
        assert len(ours) == len(theirs) or (not theirs and all(isinstance(each, WithServers) for each in ours))
        for our, their in zip(ours, theirs, strict=False):
            assert_same(our, their)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    else:
        assert ours is None if theirs is None else ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mixtral", "bloom"])
def test_outputs_that_the_files_ask_for_are_given_or_with_the_servers(family: str, tmp_path: Path) -> None:
    """The two families have a router, and attention that gives its weights always."""
    torch.set_num_threads(1)
    make_model(family, tied=False).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    options = {"max_new_tokens": 2, "pad_token_id": 0}
    with ExitStack() as stack:
        node = stack.enter_context(Node(str(tmp_path), blocks=f"0:{BLOCKS}", worker="thread", threads=1))
        for config in CONFIGS:
            (tmp_path / "config.json").write_text(json.dumps({**written, **config}))
            alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            with llmnode.connect(str(tmp_path), peers=node.addresses) as served, torch.no_grad():
                try:
                    theirs = alone(IDS)
                except AttributeError:  # of many families transformers runs none whose config has return_dict false
                    assert config == {"return_dict": False}
                    assert isinstance(served(IDS), tuple)
                    continue
                assert_same(served(IDS), theirs)
                assert_same(served.generate(IDS, **options), alone.generate(IDS, **options))
        (tmp_path / "config.json").write_text(json.dumps(written))
        for config in GENERATION_CONFIGS:
            (tmp_path / "generation_config.json").write_text(json.dumps(config))
            alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            with llmnode.connect(str(tmp_path), peers=node.addresses) as served:
                assert_same(served.generate(IDS, **options), alone.generate(IDS, **options))


@pytest.mark.parametrize(
    "asked", [True, False, None, 0, 1, -1, *([[0], [0, -1], [9], (0, 2)] if CHOOSES_STATES else [])]
)
def test_hidden_states_are_chosen_as_with_transformers(pair: Pair, asked: Any) -> None:
    ours, theirs = (model(IDS, output_hidden_states=asked).hidden_states for model in (pair.served, pair.alone))
    assert (ours is None) == (theirs is None)
    assert [each is None for each in ours or ()] == [each is None for each in theirs or ()]
    assert_same(ours or (), theirs or ())


def test_configs_that_are_changed_later_count_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for model in (pair.served, pair.alone):
            patched.setattr(model.config, "tie_last_hidden_states", False, raising=False)
        assert_same(*(model(IDS, output_hidden_states=CHOICE).hidden_states for model in (pair.served, pair.alone)))
        patched.setattr(pair.served.config, "is_causal", False, raising=False)
        with pytest.raises(ConfigError, match="is_causal"):
            pair.served(IDS)
    with pytest.raises(ConfigError, match="output_hidden_states is"):
        pair.served(IDS, output_hidden_states="all")
    with pytest.raises(ConfigError, match="output_attentions"):
        pair.served.generate(IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=1)
    with pytest.raises(ConfigError, match="assistant_early_exit"):
        pair.served.generate(IDS, assistant_early_exit=2, max_new_tokens=1)


@pytest.mark.parametrize(
    "made", [lambda _config: None, lambda _config: DynamicCache(), lambda c: DynamicCache(config=c)]
)
def test_a_cache_tells_lengths_and_refuses_contents(pair: Pair, made: Any) -> None:
    ours, theirs = (
        cache_of(model(IDS, use_cache=True, **{CACHE: made(pair.alone.config)})) for model in (pair.served, pair.alone)
    )

    def told(cache: Any) -> tuple[Any, ...]:
        lengths = [layer.get_seq_length() for layer in cache.layers]
        return len(cache), len(cache.layers), lengths, cache.get_seq_length(), cache.get_seq_length(BLOCKS - 1)

    assert told(ours) == told(theirs)
    for use in (
        lambda: list(ours),
        lambda: next(iter(ours)),
        lambda: ours.layers[0].keys,
        lambda: ours.layers[-1].values,
        lambda: ours.update(None, None, 0),
    ):
        with pytest.raises(ConfigError, match="keys and values are with the servers"):
            use()
    for cache in (ours, theirs):
        for layer in cache.layers:
            layer.crop(-1)
    assert told(ours) == told(theirs)
    ours.batch_repeat_interleave(2)
    assert ours.batch_size == 2
    assert ours.get_seq_length() == theirs.get_seq_length()
    pair.caches = (theirs, ours)
    pair.forget()


class Failing:
    """A processor of the caller's own that runs a model, keeps the cache, and fails."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kept: Any = None

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        self.kept = self.model(input_ids, use_cache=True)
        raise RuntimeError("it fails")


def _packed(model: Any) -> None:
    model(IDS, cache=DynamicCache(), position_ids=torch.tensor([[0, 1, 9]]))


def _too_long(model: Any) -> None:
    model(IDS, cache=StaticCache(config=model.config, max_cache_len=2))


def _refused_later(model: Any) -> None:
    model(IDS[:, :1], cache=cache_of(model(IDS, use_cache=True)), position_ids=torch.tensor([[9]]))


def _failing_processor(model: Any) -> None:
    model.generate(IDS, cache=DynamicCache(), logits_processor=LogitsProcessorList([Failing(model)]), max_new_tokens=2)


def _failing_loop(model: Any) -> None:
    def loop(model: Any, input_ids: torch.Tensor, **_options: Any) -> None:
        kept = [model(input_ids, use_cache=True) for _ in range(2)]
        raise RuntimeError(f"it fails with {len(kept)}")

    model.generate(IDS, custom_generate=loop, max_new_tokens=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [_packed, _too_long, _refused_later, _failing_processor, _failing_loop])
def test_exceptions_that_are_kept_keep_no_sessions(pair: Pair, fails: Any) -> None:
    kept = []
    for _ in range(SESSIONS + 1):
        with pytest.raises((ConfigError, RuntimeError)) as raised:
            fails(pair.served)
        kept.append(raised)
    assert cache_of(pair.served(IDS, use_cache=True)).get_seq_length() == IDS.shape[1]
    assert len(kept) == SESSIONS + 1


def test_a_cache_of_the_callers_is_as_it_was_after_a_failed_call(pair: Pair) -> None:
    own = DynamicCache()
    with pytest.raises(ConfigError):
        pair.served(IDS, cache=own, position_ids=torch.tensor([[0, 1, 9]]))
    with pytest.raises(RuntimeError):
        pair.served.generate(
            IDS, cache=own, logits_processor=LogitsProcessorList([Failing(pair.served)]), max_new_tokens=2
        )
    assert own.get_seq_length() == 0
    ours = pair.served.generate(IDS, cache=own, max_new_tokens=2, pad_token_id=0)
    assert ours.tolist() == pair.alone.generate(IDS, max_new_tokens=2, pad_token_id=0).tolist()
    assert own.get_seq_length() == IDS.shape[1] + 1
