"""A process holds the tensors of its part of the model, and no others."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmnode.core.span import Span
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.node.processes import pss_mib, with_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.sources.folder import ModelFolder

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_memory_of_servers_differs_by_the_size_of_their_tensors(
    start_as_users_do: Callable[..., list[Any]], folder: ModelFolder
) -> None:
    blueprint_of(folder)  # the process that draws it has transformers in memory
    nodes = start_as_users_do([Span(0, 5), Span(5, 15), Span(15, 30)])
    sizes = [(node.ready["tensor_bytes"] / 2**20, _pss_mib(node)) for node in nodes]
    assert sizes[0][0] == pytest.approx(5 * 2.53564, rel=0.001)
    for (tensors, memory), (more_tensors, more_memory) in pairwise(sizes):
        assert more_memory - memory == pytest.approx(more_tensors - tensors, rel=0.1)


def _pss_mib(node: Any) -> float:
    return sum(pss_mib(process.pid) for process in with_worker(node.process.pid))


def test_client_holds_the_ends_and_no_block(folder: Any) -> None:
    from llmnode.client.connect import load_parts
    from llmnode.models.load import tensor_bytes

    ends = load_parts(folder).ends
    embedding = ends.embedding.embed_tokens.layer
    assert ends.scoring.lm_head.layer is embedding, "tied embeddings are held once"
    assert embedding.codes.dtype == torch.int8, "as the file has them"
    assert ends.fused.score.__self__._head.__self__ is ends.scoring.lm_head, "no copy of its weight in fp32"
    parts = ends.embedding, ends.scoring
    stores = [each.untyped_storage() for part in parts for each in (*part.parameters(), *part.buffers())]
    held_bytes = sum({each.data_ptr(): each.nbytes() for each in stores}.values())
    least_bytes = tensor_bytes(embedding) + tensor_bytes(ends.scoring.model.norm)
    assert least_bytes <= held_bytes < least_bytes + 1024, "a stand-in for the whole weight has next to nothing"
