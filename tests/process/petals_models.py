"""Models of `llmnode.petals` at the servers of a pair, and a text for them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from llmnode import petals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from process.pairs import Pair

PLAIN = {"do_sample": False, "pad_token_id": 0}
TEXT = torch.tensor([[5, 17, 99, 3, 42]])


@contextmanager
def petals_model(pair: Pair, **options: Any) -> Iterator[petals.DistributedModelForCausalLM]:
    """A model that ends with the context. `options` are those of `from_pretrained`."""
    kind = petals.AutoDistributedModelForCausalLM
    with kind.from_pretrained(pair.folder, initial_peers=pair.peers, **options) as opened:
        yield opened
