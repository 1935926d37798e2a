"""Real hidden states are packed to the shares that forecasts count on."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModel

from llmnode import _native
from llmnode.core.links.packing import PACKED_SHARES, usual_share
from llmnode.models.embedded import open_embedded
from llmnode.models.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.reference
POSITIONS = 96
SLOW = 1e6
"""Bytes/s of a link on which all is packed."""


def test_hidden_states_are_packed_to_the_share_that_forecasts_count_on() -> None:
    folder = open_embedded()
    ids = load_tokenizer(folder).encode(topics["types"])[:POSITIONS]
    model = AutoModel.from_pretrained(folder.path, local_files_only=True).eval()
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for after in (1, 10, 20, 29):
        for dtype in PACKED_SHARES:
            rounded = states[after][0].to(getattr(torch, dtype)).float()
            for part in (rounded, rounded[-1:]):
                size = part.numel() * part.element_size()
                packed = _native.pack(part.contiguous().view(torch.uint8).numpy().tobytes(), part.element_size())
                assert len(packed) / size == pytest.approx(usual_share(dtype, len(part), SLOW), abs=0.01), (
                    after,
                    dtype,
                )
