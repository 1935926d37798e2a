"""A session that becomes a copy of another one gets, bit for bit, what it would have got by computing all of it."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from llmnode.compute.kv import KVForm
from llmnode.core.operations import Close, Fork, Open
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError
from reference.small import (
    BLOCKS,
    CONFIGS,
    OF_EACH_KIND,
    OTHER_KV,
    VOCABULARY,
    Cut,
    cut,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from llmnode.core.ids import SessionId

pytestmark = pytest.mark.reference

CASES = [case for case in CONFIGS if "-" not in case] + ["qwen3-window"]
CHUNKS = (7, 7, 1, 1, 5)
"""Beyond a window of eight positions, and not by whole windows."""
PROMPT = torch.randint(VOCABULARY, (sum(CHUNKS),), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = torch.randint(VOCABULARY, (30,), generator=torch.Generator().manual_seed(6)).tolist()
NEW = [3, 1, 4, 1, 5]
SOURCE, COPY, FRESH = session(0), session(1), session(2)


@pytest.fixture(
    scope="module", params=[(case, KVForm()) for case in CASES] + list(product(OF_EACH_KIND, OTHER_KV)), ids=str
)
def sliced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    case, kv = request.param
    path = tmp_path_factory.mktemp(case)
    save_model(path, case, tied=False)
    return cut(open_saved(path), (0, 2, BLOCKS), kv=kv)


@pytest.fixture
def through(sliced: Cut) -> Iterator[Cut]:
    yield sliced
    sliced.close()


def run(through: Cut, name: SessionId, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """(tokens, hidden_size), of forwards with nobody else's tokens."""
    outputs, at = [], 0
    for length in chunks:
        outputs.append(through.forward({name: tokens[at : at + length]})[name])
        at += length
    return torch.cat(outputs)


def run_singly(through: Cut, name: SessionId, tokens: Sequence[int]) -> torch.Tensor:
    return run(through, name, tokens, [1] * len(tokens))


@torch.inference_mode()
def test_a_copy_goes_on_as_one_that_computed_it_all(through: Cut) -> None:
    run(through, SOURCE, PROMPT, CHUNKS)
    run(through, COPY, OTHER, [30])  # longer, and of other tokens
    through.fork(COPY, SOURCE, 0, len(PROMPT))
    run(through, FRESH, PROMPT, CHUNKS)
    expected = run_singly(through, FRESH, NEW)
    assert torch.equal(run_singly(through, COPY, NEW), expected)
    assert torch.equal(run_singly(through, SOURCE, NEW), expected), "the source is as it was"
    assert not torch.equal(run_singly(through, COPY, NEW), run_singly(through, SOURCE, OTHER[:5])), "each by itself"


@torch.inference_mode()
def test_a_copy_of_a_part_is_its_source_cut_back(through: Cut) -> None:
    run(through, SOURCE, PROMPT, CHUNKS)
    run_singly(through, FRESH, PROMPT[:1])
    for length in (20, 14, 13, 3, 1):
        through.fork(FRESH, SOURCE, 0, length)
        through.truncate(SOURCE, length)
        assert torch.equal(run_singly(through, FRESH, NEW), run_singly(through, SOURCE, NEW))
        through.truncate(SOURCE, length)


@torch.inference_mode()
def test_what_is_shared_is_not_copied_again_and_is_there(through: Cut) -> None:
    run(through, SOURCE, PROMPT, CHUNKS)
    run_singly(through, COPY, OTHER[:1])
    through.fork(COPY, SOURCE, 0, 10)
    run_singly(through, COPY, NEW)
    through.fork(COPY, SOURCE, 10, len(PROMPT))
    assert torch.equal(run_singly(through, COPY, NEW), run_singly(through, SOURCE, NEW))


def test_a_copy_of_more_than_there_is_or_of_other_blocks_is_our_bug(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    through = cut(open_saved(tmp_path), (0, BLOCKS))
    (executor,) = through.executors
    run_singly(through, SOURCE, PROMPT[:3])
    run_singly(through, COPY, PROMPT[:2])
    assert executor.apply(Open(FRESH, Span(0, 1), 10))
    for name, shared, length in [(COPY, 0, 4), (COPY, 3, 3), (COPY, 2, 1), (FRESH, 0, 1)]:
        with pytest.raises(LocalProtocolError):
            executor.apply(Fork(name, SOURCE, shared, length))
    through.fork(COPY, SOURCE, 2, 3)
    executor.apply(Close(FRESH))
    through.close()
