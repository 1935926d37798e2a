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
from llmnode.core.span import Span
from llmnode.models.lora import Lora
from llmnode.session.passes import PassGradients

if TYPE_CHECKING:
    from llmnode.core.operations import Buffer


class _Crossed:
    """Stands for a microbatch with what went into its blocks."""


class _Passes:
    """Blocks that change nothing."""

    model = SimpleNamespace(hidden_size=4, context_tokens=100, context_text="100 positions")

    def __init__(self) -> None:
        self.crossed: list[weakref.ref[_Crossed]] = []

    async def outputs(
        self, _span: Span, _lengths: Any, hidden: Buffer, *_more: Any, deterministic: bool
    ) -> tuple[Buffer, list[_Crossed]]:
        assert not deterministic
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
