"""Blocks and sessions of `llmnode.petals`, as Petals' own tests use them (`PETALS_TESTS.md`), and beyond."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import transformers

from llmnode import petals
from llmnode.client.cache import SessionCache
from llmnode.errors import ConfigError
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.wire.frame import Frame, FrameType
from process.pairs import open_pair
from process.petals_models import PLAIN, TEXT, petals_model
from process.test_training import FURTHEST, _error
from reference.small import BLOCKS, HIDDEN_SIZE, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from process.pairs import Pair

pytestmark = [pytest.mark.process, pytest.mark.slow]

LENGTH = 7


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair("llama", tmp_path_factory.mktemp("llama")) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(pair: Pair) -> Iterator[petals.DistributedModelForCausalLM]:
    with petals_model(pair) as opened:
        yield opened


def _states(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(1, length, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))


def _alone(pair: Pair, first: int, end: int, states: torch.Tensor) -> torch.Tensor:
    """The output of these blocks of transformers' own model."""
    part = copy.deepcopy(pair.alone.model)
    part.layers, part.norm = part.layers[first:end], torch.nn.Identity()
    output: torch.Tensor = part(inputs_embeds=states, use_cache=False).last_hidden_state
    return output


def _through(blocks: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a module, and the gradient of a product with other states."""
    given = states.clone().requires_grad_()
    output = blocks(given)
    (output * _states(9)).sum().backward()
    assert given.grad is not None
    return output.detach(), given.grad


def test_each_block_alone_and_a_chain_across_servers_are_those_of_transformers(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    blocks, states = petals.RemoteSequential(model), _states(1)
    for number, block in enumerate(blocks):
        assert _error(block(states), _alone(pair, number, number + 1, states)) < FURTHEST
    assert number == BLOCKS - 1
    theirs = _through(lambda given: _alone(pair, 1, 4, given), states)
    for one, other in zip(_through(petals.RemoteSequential(model, 1, 4), states), theirs, strict=True):
        assert _error(one, other) < FURTHEST


def test_two_halves_have_the_output_and_the_gradient_of_the_whole(model: petals.DistributedModelForCausalLM) -> None:
    whole, states = petals.RemoteSequential(model), _states(2)
    halves = torch.nn.Sequential(whole[: BLOCKS // 2], whole[BLOCKS // 2 :])
    assert [len(half) for half in halves] == [2, 3]
    assert "[0, 2)" in repr(halves)
    for one, other in zip(_through(halves, states), _through(whole, states), strict=True):
        assert _error(one, other) < FURTHEST


@pytest.mark.parametrize(("codec", "share", "most"), [("fp16", 1 / 2, 5e-3), ("int8", 1 / 4, 0.2)])
def test_lossy_codecs_shrink_what_crosses_both_ways_and_hardly_change_outputs_and_gradients(
    codec: str, share: float, most: float, pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    states, found = _states(3), []
    crossed: list[tuple[FrameType, int, int]] = []
    ask = PeerConnection.ask_pass

    async def noting(connection: PeerConnection, question: FrameType, *more: Any) -> Frame:
        answer = await ask(connection, question, *more)
        crossed.append((question, len(more[3]), len(answer.payload)))
        return answer

    with petals_model(pair, codec=codec) as lossy, patch.object(PeerConnection, "ask_pass", noting):
        for each in (model, lossy):
            found.append(_through(petals.RemoteSequential(each), states))
    for one, other in zip(found[1], found[0], strict=True):
        assert FURTHEST < _error(one, other) < most
    raw, ours = crossed[:4], crossed[4:]
    for (question, *sizes), (same, *wholes) in zip(ours, raw, strict=True):
        assert question == same
        assert all(size < 1.1 * share * whole for size, whole in zip(sizes, wholes, strict=True)), "both ways"
    assert [question for question, _, _ in raw] == [FrameType.EVALUATE] * 2 + [FrameType.BACKWARD] * 2


def test_a_session_rolls_back_to_what_two_texts_share_and_goes_on_with_the_other(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    """A draft that was wrong from position 2 on."""
    draft, other = _states(4), _states(5)
    other[:, :2] = draft[:, :2]
    with torch.no_grad(), model.inference_session(max_length=LENGTH) as session:
        drafted = session.step(draft)
        session.position = 2
        found = torch.cat([drafted[:, :2], session.step(other[:, 2:])], dim=1)
        assert session.position == LENGTH
        with pytest.raises(ConfigError, match=f"do not fit the cache, which holds {LENGTH}"):
            session.step(other[:, :1])
        assert _error(drafted, _alone(pair, 0, BLOCKS, draft)) < FURTHEST
        assert _error(found, _alone(pair, 0, BLOCKS, other)) < FURTHEST


def test_a_step_of_no_positions_changes_nothing(pair: Pair, model: petals.DistributedModelForCausalLM) -> None:
    states, none = _states(6), torch.empty(1, 0, HIDDEN_SIZE)
    pieces = [none, states[:, :1], states[:, 1:3], none, none, states[:, 3:6], states[:, 6:]]
    with torch.no_grad(), model.inference_session(max_length=LENGTH) as session:
        found = torch.cat([session.step(piece) for piece in pieces], dim=1)
        assert session.position == LENGTH
        assert _error(found, _alone(pair, 0, BLOCKS, states)) < FURTHEST


def test_a_noisy_draft_is_corrected_by_rollbacks_and_changes_no_token(
    pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    noisy, generator = copy.deepcopy(pair.alone), torch.Generator().manual_seed(1)
    head = noisy.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(torch.randn(head.shape, generator=generator) * head.std() / 4)
    expected = pair.alone.generate(TEXT, max_new_tokens=24, **PLAIN)
    rolled_back: list[int] = []
    truncate = SessionCache.truncate

    def noting(cache: SessionCache, columns: int) -> None:
        rolled_back.append(cache.columns - columns)
        truncate(cache, columns)

    with patch.object(SessionCache, "truncate", noting):
        found = model.generate(TEXT, assistant_model=noisy, max_new_tokens=24, **PLAIN)
    assert found.tolist() == expected.tolist()
    assert any(rolled_back), "the draft is to be wrong now and then"
    assert len(rolled_back) < 20, "and right now and then: a forward has several of its tokens"


@pytest.mark.parametrize("rows", [1, 2])
def test_sampling_goes_on_over_the_calls_of_a_session_as_in_one_call_of_transformers(
    rows: int, pair: Pair, model: petals.DistributedModelForCausalLM
) -> None:
    ids = torch.randint(1, VOCABULARY, (rows, 4), generator=torch.Generator().manual_seed(7))
    for more in ({"top_k": 5, "top_p": 0.9}, {"repetition_penalty": 1.2}):
        options = {"do_sample": True, "temperature": 0.5, "pad_token_id": 0, **more}
        torch.manual_seed(0)
        expected = pair.alone.generate(ids, max_new_tokens=6, **options)
        torch.manual_seed(0)
        with model.inference_session(max_length=12) as session:
            parts = [model.generate(ids, session=session, max_new_tokens=1, **options)]
            parts += [model.generate(None, max_new_tokens=count, **options) for count in (4, 1)]
        assert torch.cat(parts, dim=1).tolist() == expected.tolist()


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
    with petals_model(pair) as other, model.inference_session(max_length=16) as session:
        assert other.active_session is None
        assert other.generate(TEXT, max_new_tokens=2, **PLAIN).tolist() == whole.tolist()
        for use in (other.use_session(session).__enter__, lambda: other.generate(TEXT, session=session, **PLAIN)):
            with pytest.raises(ConfigError, match="of another model"):
                use()
        with other.inference_session(max_length=16) as inner:
            assert (model.active_session, other.active_session) == (session, inner)
            assert model.generate(TEXT, max_new_tokens=2, **PLAIN).tolist() == whole.tolist()
            assert (session.position, inner.position) == (6, 0)


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
