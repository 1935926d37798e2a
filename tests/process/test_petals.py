"""`llmnode.petals`: every row of the page that maps Petals' names to ours."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers

import llmnode
from llmnode import petals
from llmnode.errors import ConfigError, NoRoute
from process.pairs import open_pair, prompted
from process.test_training import FURTHEST, _error
from process.tuned import greedy, weights_of
from reference.small import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from process.pairs import Pair

pytestmark = [pytest.mark.process, pytest.mark.slow]

PAGE = (Path(llmnode.__file__).parent / "client/PETALS.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
PLAIN = {"do_sample": False, "pad_token_id": 0}
TEXT = torch.tensor([[5, 17, 99, 3, 42]])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair("llama", tmp_path_factory.mktemp("llama")) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(pair: Pair) -> Iterator[petals.DistributedModelForCausalLM]:
    with _opened(pair) as opened:
        yield opened


@contextmanager
def _opened(pair: Pair, **options: Any) -> Iterator[petals.DistributedModelForCausalLM]:
    kind = petals.AutoDistributedModelForCausalLM
    with kind.from_pretrained(pair.folder, initial_peers=pair.peers, **options) as opened:
        yield opened


def test_a_text_goes_on_in_a_session(pair: Pair, model: petals.DistributedModelForCausalLM) -> None:
    whole = pair.alone.generate(TEXT, max_new_tokens=3, **PLAIN)
    with model.inference_session(max_length=32) as session:
        assert model.active_session is session
        assert session.position == 0
        first = model.generate(TEXT, max_new_tokens=3, session=session, **PLAIN)
        assert first.tolist() == whole.tolist()
        assert session.position == whole.shape[1] - 1
        more = torch.tensor([[7, 7]])
        whole = pair.alone.generate(torch.cat([whole, more], dim=1), max_new_tokens=2, **PLAIN)
        assert model.generate(more, max_new_tokens=2, **PLAIN).tolist() == whole[:, -4:].tolist()
        assert session.output_ids is not None
        assert session.output_ids.tolist() == whole.tolist()
        again = model.generate(None, max_new_tokens=2, return_dict_in_generate=True, **PLAIN).sequences
        longer = pair.alone.generate(whole, max_new_tokens=2, **PLAIN)
        assert again.tolist() == longer[:, -2:].tolist()
        session.position = 5
        assert session.output_ids.tolist() == TEXT.tolist()
        assert model.generate(more, max_new_tokens=1, **PLAIN).shape == (1, 3)
        with pytest.raises(ConfigError, match="2 rows"):
            model.generate(TEXT.expand(2, -1), max_new_tokens=1, **PLAIN)
    assert model.active_session is None
    with model.use_session(session), pytest.raises(ConfigError, match="closed"):
        model.generate(max_new_tokens=1, **PLAIN)
    with model.inference_session(max_length=32), pytest.raises(ConfigError, match="give inputs"):
        model.generate(max_new_tokens=1, **PLAIN)
    assert model.generate(input_ids=TEXT, max_new_tokens=3, **PLAIN).tolist() == first.tolist()


def test_a_forward_within_a_session_is_refused_and_not_run_beside_it(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    blocks, hidden = petals.RemoteSequential(model), model.embed(TEXT)
    with torch.no_grad(), model.inference_session(max_length=16) as session:
        expected = pair.alone(TEXT).logits
        for call in (lambda: model(TEXT), lambda: blocks(hidden), lambda: blocks[2:3](hidden)):
            with pytest.raises(ConfigError, match=r"use_session\(None\)"):
                call()
        with model.use_session(None):
            assert model.active_session is None
            assert _error(model(TEXT).logits, expected) < FURTHEST
            assert blocks(hidden).shape == hidden.shape
        assert model.active_session is session
        assert session.position == 0


def test_each_model_has_an_active_session_of_its_own(pair: Pair, model: petals.DistributedModelForCausalLM) -> None:
    whole = pair.alone.generate(TEXT, max_new_tokens=2, **PLAIN)
    with _opened(pair) as other, model.inference_session(max_length=16) as session:
        assert other.active_session is None
        assert other.generate(TEXT, max_new_tokens=2, **PLAIN).tolist() == whole.tolist()
        for use in (other.use_session(session).__enter__, lambda: other.generate(TEXT, session=session, **PLAIN)):
            with pytest.raises(ConfigError, match="of another model"):
                use()
        with other.inference_session(max_length=16) as inner:
            assert (model.active_session, other.active_session) == (session, inner)
            assert model.generate(TEXT, max_new_tokens=2, **PLAIN).tolist() == whole.tolist()
            assert (session.position, inner.position) == (6, 0)


def test_an_open_session_is_used_again_and_again(pair: Pair, model: petals.DistributedModelForCausalLM) -> None:
    whole = pair.alone.generate(TEXT, max_new_tokens=6, **PLAIN)
    with petals.InferenceSession(model, 16) as session:
        assert model.active_session is None
        for given, length in ((TEXT, 7), (None, 9)):
            with model.use_session(session) as used:
                assert used is model.active_session is session
                model.generate(given, max_new_tokens=2, **PLAIN)
                assert session.output_ids is not None
                assert session.output_ids.tolist() == whole[:, :length].tolist()
            assert model.active_session is None
        assert model.generate(max_new_tokens=2, session=session, **PLAIN).tolist() == whole[:, 9:].tolist()


def test_a_session_has_one_text_for_each_row(model: petals.DistributedModelForCausalLM) -> None:
    several = transformers.GenerationConfig(num_beams=2, **PLAIN)
    with model.inference_session(max_length=16) as session:
        wrong: list[dict[str, Any]] = [
            {"num_beams": 2},
            {"num_return_sequences": 2, "do_sample": True},
            {"generation_config": several},
            {"inputs_embeds": model.embed(TEXT)},
        ]
        for options in wrong:
            with pytest.raises(ConfigError, match=r"session goes on"):
                model.generate(TEXT, max_new_tokens=1, **{"pad_token_id": 0, **options})
        with pytest.raises(ConfigError, match="num_beams=2"):
            model.generate(TEXT, several, max_new_tokens=1)
        usual, model.generation_config = model.generation_config, several
        with pytest.raises(ConfigError, match="num_beams=2"):
            model.generate(TEXT, transformers.GenerationConfig(max_new_tokens=1), **PLAIN)
        model.generation_config = usual
        assert session._cache is None
        with model.use_session(None):
            assert model.generate(TEXT, num_beams=2, max_new_tokens=1, **PLAIN).shape == (1, 6)


@pytest.mark.parametrize("is_masked", [True, False])
def test_rows_with_padding_go_on_with_a_mask_of_what_is_new_or_none(
    pair: Pair, model: petals.DistributedModelForCausalLM, *, is_masked: bool
) -> None:
    ids = torch.tensor([[0, 0, 5, 17, 99], [3, 42, 7, 11, 60]])
    more = torch.tensor([[8, 9], [0, 9]])
    first = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    then = torch.tensor([[1, 1], [0, 1]]) if is_masked else torch.ones_like(more)
    options = {"max_new_tokens": 3, **PLAIN}
    whole = pair.alone.generate(ids, attention_mask=first, **options)
    with model.inference_session(max_length=32) as session:
        assert model.generate(ids, attention_mask=first, **options).tolist() == whole.tolist()
        mask = torch.cat([first, torch.ones_like(whole[:, 5:]), then], dim=1)
        expected = pair.alone.generate(torch.cat([whole, more], dim=1), attention_mask=mask, **options)
        answer = model.generate(more, **({"attention_mask": then} if is_masked else {}), **options)
        assert answer.tolist() == expected[:, whole.shape[1] :].tolist()
        mask = torch.cat([mask, torch.ones_like(expected[:, mask.shape[1] :])], dim=1)
        longer = pair.alone.generate(expected, attention_mask=mask, **options)
        assert session.position == expected.shape[1] - 1
        given = {"attention_mask": mask} if is_masked else {}
        assert model.generate(None, **given, **options).tolist() == longer[:, expected.shape[1] :].tolist()


class _Interrupted:
    """A streamer that the user interrupts after some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def put(self, _tokens: torch.Tensor) -> None:
        self.calls -= 1
        if not self.calls:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_a_text_goes_on_after_interrupts_and_rollbacks_from_the_tokens_that_are_known(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    options = {"max_new_tokens": 4, **PLAIN}
    whole = pair.alone.generate(TEXT, **options)
    other = torch.tensor([[9, 8, 7]])
    with model.inference_session(max_length=32) as session:
        with pytest.raises(KeyboardInterrupt):
            model.generate(other, streamer=_Interrupted(4), **options)
        assert session.position > other.shape[1]
        assert session.output_ids is None
        assert model.generate(TEXT, **options).tolist() == whole.tolist()
        with pytest.raises(KeyboardInterrupt):
            model.generate(other, streamer=_Interrupted(4), **options)
        expected = pair.alone.generate(torch.cat([whole, TEXT], dim=1), **options)
        assert model.generate(TEXT, **options).tolist() == expected[:, whole.shape[1] :].tolist()
        session.position = 5
        assert model.generate(None, **options).tolist() == whole[:, 5:].tolist()
        assert session.output_ids is not None
        assert session.output_ids.tolist() == whole.tolist()


def test_a_session_of_hidden_states_is_none_of_tokens(pair: Pair, model: petals.DistributedModelForCausalLM) -> None:
    whole = pair.alone.generate(TEXT, max_new_tokens=4, **PLAIN)
    with model.inference_session(max_length=32) as session, torch.no_grad():
        session.step(model.embed(TEXT))
        for _ in range(2):
            with pytest.raises(ConfigError, match="hidden states from position 0"):
                model.generate(TEXT, max_new_tokens=4, **PLAIN)
        session.position = 0
        assert model.generate(TEXT, max_new_tokens=2, **PLAIN).tolist() == whole[:, :7].tolist()
        session.step(model.embed(TEXT))
        session.position = 7
        with pytest.raises(ConfigError, match="hidden states from position 6"):
            model.generate(max_new_tokens=2, **PLAIN)
        session.position = 6
        assert model.generate(whole[:, 6:7], max_new_tokens=2, **PLAIN).tolist() == whole[:, 6:].tolist()


def test_hidden_states_go_through_a_session_and_through_blocks(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    ids = torch.cat([TEXT, TEXT.flip(1)])
    hidden = model.embed(ids)
    with torch.no_grad():
        expected = pair.alone(ids, output_hidden_states=True).hidden_states[0]
        whole = model.remote_blocks(hidden)
        with model.inference_session(max_length=16) as session:
            first = session.step(hidden[:, :3])
            swapped = session.step(hidden.flip(0)[:, 3:], hypo_ids=torch.tensor([1, 0]))
            with pytest.raises(ConfigError, match="tune_prompts"):
                session.step(hidden, prompts=hidden)
            assert session.position == 5
    assert _error(hidden, expected) < FURTHEST
    assert _error(torch.cat([first, swapped.flip(0)], dim=1), whole) < FURTHEST
    blocks = petals.RemoteSequential(model)
    assert len(blocks) == BLOCKS
    assert len(blocks[1:3]) == len(petals.RemoteSequential(model, 1, 3)) == 2
    prompts = torch.randn(BLOCKS, 2, 3, hidden.shape[2], generator=torch.Generator().manual_seed(1))
    with prompted(pair.alone, prompts):
        theirs = pair.alone(ids).logits
    assert _error(model.score(blocks(hidden, prompts)), theirs) < FURTHEST
    assert _error(blocks[3:](blocks[:3](hidden)), whole) < FURTHEST
    with pytest.raises(ConfigError, match=r"use model\.inference_session"):
        blocks.inference_session(max_length=3)
    with pytest.raises(ConfigError, match="takes a model"):
        petals.RemoteSequential(pair.alone.config)


def test_prompts_are_tuned_under_the_names_of_petals(pair: Pair) -> None:
    for mode in ("ptune", "deep_ptune"):
        with _opened(pair, tuning_mode=mode, pre_seq_len=4) as model:
            trained = {name.split(".")[-2] for name, each in model.named_parameters() if each.requires_grad}
            deep = {"intermediate_prompt_embeddings"} if mode == "deep_ptune" else set()
            assert trained == {"prompt_embeddings"} | deep
            assert model.config.pre_seq_len == model.decoder.prompt_embeddings.num_embeddings == 4
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(20) if each.requires_grad else None
            text = greedy(pair.alone, TEXT[0].tolist(), 4, *weights_of(model))
            with model.inference_session(max_length=16) as session:
                assert model.generate(TEXT, max_new_tokens=4, session=session, **PLAIN)[0, 5:].tolist() == text
                assert session.position == 8
                with pytest.raises(ConfigError, match="use generate"):
                    session.step(model.embed(TEXT))


def test_a_head_for_sequences_has_its_options_and_prompts(pair: Pair) -> None:
    kind = petals.AutoDistributedModelForSequenceClassification
    options = {"num_labels": 3, "tuning_mode": "deep_ptune", "pre_seq_len": 2, "pad_token_id": 0}
    with kind.from_pretrained(pair.folder, initial_peers=pair.peers, **options) as model:
        model(TEXT, labels=torch.tensor([1])).loss.backward()
        assert model.decoder.intermediate_prompt_embeddings.weight.grad.norm() > 0
        assert model.score.weight.grad.shape[0] == 3
    with pytest.raises(ConfigError, match="no colour"):
        kind.from_pretrained(pair.folder, initial_peers=pair.peers, colour="red")


def test_servers_are_chosen_and_limits_are_ours(pair: Pair, model: petals.DistributedModelForCausalLM) -> None:
    peers = [hop.peer for hop in model.route]
    limits: dict[str, Any] = {
        "max_retries": 3,
        "request_timeout": 20,
        "connect_timeout": 5.0,
        "ban_timeout": 1.5,
        "use_server_to_server": False,
        "torch_dtype": torch.float32,
    }
    with _opened(pair, allowed_servers=peers, **limits) as other:
        assert other(TEXT).logits.shape[1] == 5
        policy = other._client.router.finder.policy
        assert (policy.recovery.replacements, policy.step_timeout_s, policy.passes.longest_s) == (3, 20, 20)
        assert (policy.route.connect_timeout_s, policy.route.ban_s, policy.push.enabled) == (5.0, 1.5, False)
    for wrong in ({"allowed_servers": peers[:1]}, {"blocked_servers": peers[1:]}):
        with pytest.raises(NoRoute, match="told to leave out"):
            _opened(pair, **wrong).__enter__()


def test_an_active_adapter_is_computed_by_servers_whatever_the_head(pair: Pair, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(pair.alone), config).eval()
    theirs.save_pretrained(tmp_path)
    with _opened(pair, active_adapter=str(tmp_path)) as model, torch.no_grad():
        assert _error(model(TEXT).logits, theirs(TEXT).logits) < FURTHEST
    kind = petals.AutoDistributedModelForSequenceClassification
    options = {"active_adapter": str(tmp_path), "tuning_mode": "ptune", "pre_seq_len": 2, "pad_token_id": 0}
    with kind.from_pretrained(pair.folder, initial_peers=pair.peers, num_labels=3, **options) as classifier:
        trained = {name for name, each in classifier.named_parameters() if each.requires_grad}
        assert trained == {"score.weight", "model.prompt_embeddings.weight"}
        classifier.tune_prompts(None)
        with torch.no_grad():
            states = theirs(TEXT, output_hidden_states=True).hidden_states[-1]
            assert _error(classifier(TEXT).logits, classifier.score(states[:, -1])) < FURTHEST


def test_what_has_no_counterpart_says_what_there_is(pair: Pair) -> None:
    kind = petals.AutoDistributedModelForCausalLM
    for name, instead in petals.ELSEWHERE.items():
        with pytest.raises(ConfigError, match=re.escape(instead)):
            kind.from_pretrained(pair.folder, initial_peers=pair.peers, **{name: "something"})
    for absent in (petals.AutoDistributedModel, petals.AutoDistributedSpeculativeModel):
        with pytest.raises(ConfigError, match="use AutoDistributedModelForCausalLM"):
            absent.from_pretrained(pair.folder, initial_peers=pair.peers)
    wrong: list[dict[str, Any]] = [
        {"max_retries": -1},
        {"request_timeout": 0},
        {"connect_timeout": "soon"},
        {"allowed_servers": "one"},
        {"allowed_servers": ["one"]},
        {"blocked_servers": pair.peers},
        {"torch_dtype": "float32", "dtype": "float32"},
        {"tuning_mode": "lora", "pre_seq_len": 3},
        {"tuning_mode": "ptune"},
        {"colour": "red"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError):
            kind.from_pretrained(pair.folder, initial_peers=pair.peers, **options)


TESTS = {
    test_what_has_no_counterpart_says_what_there_is: [
        "`AutoDistributedModelForCausalLM.from_pretrained`",
        "`AutoDistributedModel`",
        "`AutoDistributedSpeculativeModel`",
        "`initial_peers`",
    ],
    test_a_head_for_sequences_has_its_options_and_prompts: [
        "`AutoDistributedModelForSequenceClassification.from_pretrained`",
    ],
    test_servers_are_chosen_and_limits_are_ours: [
        "`allowed_servers`",
        "`blocked_servers`",
        "`max_retries`",
        "`request_timeout`",
        "`connect_timeout`",
        "`ban_timeout`",
        "`use_server_to_server`",
        "`torch_dtype`",
    ],
    test_an_active_adapter_is_computed_by_servers_whatever_the_head: ["`active_adapter`"],
    test_prompts_are_tuned_under_the_names_of_petals: [
        "`tuning_mode`",
        "`pre_seq_len`",
        "`prompt_embeddings`",
        "`intermediate_prompt_embeddings`",
    ],
    test_a_text_goes_on_in_a_session: [
        "`model.inference_session`",
        "`model.active_session`",
        "`model.generate(session=)`",
        "`session.position`",
        "`session.output_ids`",
    ],
    test_an_open_session_is_used_again_and_again: ["`model.use_session`"],
    test_hidden_states_go_through_a_session_and_through_blocks: [
        "`session.step`",
        "`session.step(prompts=)`",
        "`session.step(hypo_ids=)`",
        "`RemoteSequential`",
        "`RemoteSequential.forward(inputs, prompts)`",
        "`RemoteSequential.inference_session`",
    ],
}


def test_every_row_is_tested() -> None:
    """By a test that names all of it."""
    assert sorted(row for rows in TESTS.values() for row in rows) == sorted(ROWS)
    for test, rows in TESTS.items():
        source = inspect.getsource(test)
        for row in rows:
            words = {*re.findall(r"\w+", row)} - {"forward", "inputs"}  # a module is called
            assert words <= {*re.findall(r"\w+", source)}, row
