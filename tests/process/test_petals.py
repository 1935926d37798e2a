"""`llmnode.petals`: every row of the page that maps Petals' names to ours."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode import petals
from llmnode.client.petals_options import ELSEWHERE
from llmnode.errors import ConfigError, NoRoute
from process.pairs import open_pair, prompted
from process.petals_models import PLAIN, TEXT, petals_model
from process.test_training import FURTHEST, _error
from process.tuned import greedy, weights_of
from reference.small import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from process.pairs import Pair

pytestmark = [pytest.mark.process, pytest.mark.slow]

PAGE = (Path(llmnode.__file__).parent / "client/PETALS.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair("llama", tmp_path_factory.mktemp("llama")) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(pair: Pair) -> Iterator[petals.DistributedModelForCausalLM]:
    with petals_model(pair) as opened:
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


def test_remote_sequential_has_the_session_of_its_model_and_needs_one(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    blocks, hidden = petals.RemoteSequential(model), model.embed(TEXT)
    with torch.no_grad(), blocks.inference_session(max_length=8) as session:
        assert model.active_session is session
        stepped = session.step(hidden)
    assert _error(stepped, blocks(hidden)) < FURTHEST
    with pytest.raises(ConfigError, match=r"through all blocks: use model\.inference_session"):
        blocks[:2].inference_session(max_length=3)
    with pytest.raises(ConfigError, match=r"use RemoteSequential\(model\)"):
        petals.RemoteSequential(model.remote_blocks).inference_session(max_length=3)
    with pytest.raises(ConfigError, match=r"takes a model .* open one by AutoDistributedModelForCausalLM"):
        petals.RemoteSequential(pair.alone.config, dht=None)
    with pytest.raises(ConfigError, match="dht of RemoteSequential: its model is connected"):
        petals.RemoteSequential(model, dht=None)


def test_the_first_step_of_a_session_takes_prompts_for_all_rows(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    ids = torch.cat([TEXT, TEXT.flip(1)])
    hidden = model.embed(ids)
    prompts = torch.randn(BLOCKS, 1, 2, hidden.shape[2], generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.no_grad():
        with prompted(pair.alone, prompts):
            theirs = pair.alone(ids).logits
        plain = model.remote_blocks(hidden)
        with model.inference_session(max_length=16) as session:
            session.step(hidden, prompts=prompts.expand(-1, 2, -1, -1).flip(0))
            session.position = 0
            first = session.step(hidden[:, :3], prompts=prompts.expand(-1, 2, -1, -1))
            assert _error(model.score(torch.cat([first, session.step(hidden[:, 3:])], dim=1)), theirs) < FURTHEST
            session.position = 2
            assert _error(model.score(session.step(hidden[:, 2:])), theirs[:, 2:]) < FURTHEST
            with pytest.raises(ConfigError, match="the first step of a session takes them"):
                session.step(hidden, prompts=prompts)
            with pytest.raises(ConfigError, match="among 2 deep prompts: go to 0"):
                session.position = 1
            assert session.position == 5
            session.position = 0
            wrong = [
                (prompts[1:], "prompts of shape"),
                (prompts.expand(-1, 3, -1, -1), "expected 1 or 2 rows"),
                (prompts.repeat(1, 1, 3, 1), "of 1 to 5 prompts"),
                (prompts * torch.tensor([1.0, 2.0])[:, None, None], "have the same prompts"),
            ]
            for each, why in wrong:
                with pytest.raises(ConfigError, match=why):
                    session.step(hidden, prompts=each)
            assert _error(session.step(hidden), plain) < FURTHEST
    with (
        petals_model(pair, tuning_mode="ptune", pre_seq_len=2) as tuned,
        tuned.inference_session(max_length=16) as session,
        pytest.raises(ConfigError, match="trained prompts"),
    ):
        session.step(hidden, prompts=prompts)


def test_prompts_are_tuned_under_the_names_of_petals(pair: Pair) -> None:
    for mode in ("ptune", "deep_ptune"):
        with petals_model(pair, tuning_mode=mode, pre_seq_len=4) as model:
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
    with petals_model(pair, allowed_servers=peers, **limits) as other:
        assert other(TEXT).logits.shape[1] == 5
        policy = other._client.router.finder.policy
        assert (policy.recovery.replacements, policy.step_timeout_s, policy.passes.longest_s) == (3, 20, 20)
        assert (policy.route.connect_timeout_s, policy.route.ban_s, policy.push.enabled) == (5.0, 1.5, False)
    for wrong in ({"allowed_servers": peers[:1]}, {"blocked_servers": peers[1:]}):
        with pytest.raises(NoRoute, match="told to leave out"):
            petals_model(pair, **wrong).__enter__()


def test_an_active_adapter_is_computed_by_servers_whatever_the_head(pair: Pair, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(pair.alone), config).eval()
    theirs.save_pretrained(tmp_path)
    with petals_model(pair, active_adapter=str(tmp_path)) as model, torch.no_grad():
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
    for name, instead in ELSEWHERE.items():
        with pytest.raises(ConfigError, match=re.escape(instead)):
            kind.from_pretrained(pair.folder, initial_peers=pair.peers, **{name: "something"})
    for absent in (petals.AutoDistributedConfig, petals.AutoDistributedModel, petals.AutoDistributedSpeculativeModel):
        with pytest.raises(ConfigError, match="use AutoDistributedModelForCausalLM"):
            absent.from_pretrained(pair.folder, initial_peers=pair.peers)
    for name in {"ClientConfig", "RemoteSequenceManager", *petals.ABSENT}:
        with pytest.raises(ConfigError, match=f"there is no {name}: {re.escape(petals.ABSENT[name])}"):
            getattr(petals, name)
    assert getattr(petals, "DistributedLlamaForCausalLM") is kind  # noqa: B009  # type checkers do not know it
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        getattr(petals, "colour")  # noqa: B009
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
        "`AutoDistributedConfig`",
        "`AutoDistributedModel`",
        "`AutoDistributedSpeculativeModel`",
        "`ClientConfig`",
        "`DistributedLlamaForCausalLM`",
        "`RemoteSequenceManager`",
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
        "`session.step(hypo_ids=)`",
        "`RemoteSequential`",
        "`RemoteSequential.forward(inputs, prompts)`",
    ],
    test_the_first_step_of_a_session_takes_prompts_for_all_rows: ["`session.step(prompts=)`"],
    test_remote_sequential_has_the_session_of_its_model_and_needs_one: [
        "`RemoteSequential.inference_session`",
        "`RemoteSequential(config, dht=)`",
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
