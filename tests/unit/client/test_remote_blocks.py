"""Remote blocks as a module of torch: what their graph keeps, and its gradients."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from llmnode.client.block_adapters import Chosen
from llmnode.client.portal import open_portal
from llmnode.client.remote_blocks import RemoteBlocks
from llmnode.core.operations import NO_DROPOUT
from llmnode.core.span import Span
from llmnode.models.lora import Lora
from llmnode.session.passes import PassGradients

if TYPE_CHECKING:
    from llmnode.core.operations import Buffer, Dropout


class _Crossed:
    """Stands for a microbatch with what went into its blocks."""


class _Passes:
    """Blocks that change nothing."""

    model = SimpleNamespace(hidden_size=4, context_tokens=100, context_text="100 positions")

    def __init__(self) -> None:
        self.crossed: list[weakref.ref[_Crossed]] = []
        self.asked: list[tuple[list[int], Dropout]] = []

    async def outputs(
        self, _span: Span, lengths: Any, hidden: Buffer, *more: Any, deterministic: bool
    ) -> tuple[Buffer, list[_Crossed]]:
        assert not deterministic
        *_, dropout = more
        self.asked.append((lengths, dropout))
        crossed = _Crossed()
        self.crossed.append(weakref.ref(crossed))
        return hidden, [crossed]

    async def all_gradients(self, _crossed: list[_Crossed], gradient: Buffer) -> PassGradients:
        return PassGradients(gradient, np.zeros(0, np.float32), np.zeros((0, 0, 0), np.float32))


def test_a_loss_that_is_kept_keeps_no_hidden_states_after_its_backward() -> None:
    passes: Any = _Passes()
    adapters: Any = SimpleNamespace(
        blocks=[torch.nn.Module(), torch.nn.Module()], chosen=lambda rows: [Chosen(range(rows), {}, None)]
    )
    hidden = torch.ones(2, 3, 4, requires_grad=True)
    with open_portal() as portal:
        loss = RemoteBlocks(portal, passes, Span(0, 2), adapters)(hidden).sum()
        (crossed,) = passes.crossed
        loss.backward(retain_graph=True)
        assert crossed() is not None
        loss.backward()
        assert crossed() is None
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, torch.full_like(hidden, 2))
        with pytest.raises(RuntimeError, match="second"):
            loss.backward()


def test_a_backward_of_a_batch_that_is_all_padding_gives_zeros_for_hidden_states_adapter_and_prompts() -> None:
    passes: Any = _Passes()
    lora = Lora(torch.ones(2, 4, requires_grad=True), torch.ones(4, 2, requires_grad=True), 1.0)
    parts = {1: {"layer": lora}}
    adapters: Any = SimpleNamespace(
        blocks=[torch.nn.Module(), torch.nn.Module()], chosen=lambda rows: [Chosen(range(rows), parts, None)]
    )
    hidden, prompts = torch.ones(2, 3, 4, requires_grad=True), torch.ones(2, 1, 1, 4, requires_grad=True)
    with open_portal() as portal:
        output = RemoteBlocks(portal, passes, Span(0, 2), adapters)(hidden, torch.zeros(2, 3), prompts)
    assert torch.equal(output, torch.zeros(2, 3, 4))
    (output.sum() * float("nan")).backward()  # as that of a mean over no tokens
    for each in (hidden, prompts, lora.a, lora.b):
        assert each.grad is not None
        assert torch.equal(each.grad, torch.zeros_like(each))
    assert not passes.crossed


def test_each_row_has_a_seed_of_its_own_that_torch_draws_and_only_where_something_is_dropped() -> None:
    passes: Any = _Passes()
    some, others, none = [0, 3], [1, 4], [2]
    chosen = [Chosen(some, {}, None, {0.1}), Chosen(others, {}, None, {0.5}), Chosen(none, {}, None, {0.0})]
    adapters: Any = SimpleNamespace(blocks=[torch.nn.Module(), torch.nn.Module()], chosen=lambda _rows: chosen)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [1, 1]])
    with open_portal() as portal:
        blocks = RemoteBlocks(portal, passes, Span(0, 2), adapters)
        for manual_seed in (1, 1, 2):
            torch.manual_seed(manual_seed)
            blocks(torch.ones(5, 2, 4), mask)
        first, again, other = (sorted(passes.asked[at : at + 3], key=str) for at in (0, 3, 6))
        state = torch.get_rng_state()
        chosen[:] = [Chosen(range(5), {}, None, {0.0})]
        blocks(torch.ones(5, 2, 4), mask)
        assert torch.get_rng_state().equal(state)
    assert first == again
    (of_others, half), (of_none, nothing), (of_some, tenth) = first
    assert (of_some, of_others, of_none) == ([2], [1, 2], [2])
    assert (tenth.probability, half.probability, nothing) == (0.1, 0.5, NO_DROPOUT)
    seeds = [seed for *_, dropout in (*first, *other) for seed in dropout.seeds]
    assert len(set(seeds)) == len(seeds) == 6
    assert passes.asked[-1] == ([2, 1, 2, 2], NO_DROPOUT)
