"""Part of `tests/bench/run codec`: packing of real hidden states without loss, and the link speeds at which it pays.

The states are SmolLM2-135M's after block 10, for a text that comes with Python: all 512 positions, as a chunk of a
prompt, and the last one, as a token. `float32 of bfloat16` is what a server in bfloat16 sends as raw.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from transformers import AutoModel

from bench.kit.report import Row, at_least, spread
from llmnode import _native
from llmnode.core.policy import PackPolicy
from llmnode.models.embedded import open_embedded
from llmnode.models.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.kit.report import Aim

POSITIONS = 512
BLOCKS = 10
CALLS = 7  # the fastest counts
SLOW_MB_S = 10.0
"""On a link of this speed packing must pay."""


@dataclass(slots=True)
class Packing:
    """One payload, and the time to pack it in each round."""

    values: str
    positions: int
    payload: bytes
    width: int
    packed: bytes = b""
    pack_s: list[float] = field(default_factory=list)
    unpack_s: list[float] = field(default_factory=list)

    def measure(self, *, keep: bool) -> None:
        self.packed = _native.pack(self.payload, self.width)
        assert _native.unpack(self.packed, len(self.payload)) == self.payload
        pack_s = _fastest(lambda: _native.pack(self.payload, self.width))
        unpack_s = _fastest(lambda: _native.unpack(self.packed, len(self.payload)))
        if keep:
            self.pack_s.append(pack_s)
            self.unpack_s.append(unpack_s)

    def row(self) -> Row:
        size, least = len(self.payload), PackPolicy().margin
        return {
            "values": self.values,
            "operation": f"pack {self.positions} position{'s' if self.positions > 1 else ''}",
            "of the bytes": len(self.packed) / size,
            "pack, MB/s": spread([size / seconds / 1e6 for seconds in self.pack_s]),
            "unpack, MB/s": spread([size / seconds / 1e6 for seconds in self.unpack_s]),
            "pays below, MB/s": spread(self.worth_mb_s()),
            "is done below, MB/s": statistics.median(self.worth_mb_s()) / least,
        }

    def worth_mb_s(self) -> list[float]:
        """The speed of a link on which packing takes the time that it saves."""
        saved_mb = (len(self.payload) - len(self.packed)) / 1e6
        return [saved_mb / (packing + unpacking) for packing, unpacking in zip(self.pack_s, self.unpack_s, strict=True)]


def packings() -> Iterator[Packing]:
    """Load the model, which takes seconds, and make the payloads."""
    states = _hidden_states()  # (positions, hidden_size)
    kinds = {
        "float32": states,
        "float32 of bfloat16": states.bfloat16().float(),
        "float16": states.half(),
        "bfloat16": states.bfloat16(),
    }
    for name, values in kinds.items():
        for part in (values, values[-1:]):
            payload = part.contiguous().view(torch.uint8).numpy().tobytes()
            yield Packing(name, len(part), payload, values.element_size())


def aims(measured: Sequence[Packing]) -> list[Aim]:
    worst = min(statistics.median(each.worth_mb_s()) for each in measured if each.positions == POSITIONS)
    worst /= PackPolicy().margin
    name = f"packing {POSITIONS} positions is done below, MB/s, worst values"
    return [at_least(name, worst, SLOW_MB_S)]


def _hidden_states() -> torch.Tensor:
    folder = open_embedded()
    ids = load_tokenizer(folder).encode(topics["types"])[:POSITIONS]
    model = AutoModel.from_pretrained(folder.path, local_files_only=True).eval()
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[BLOCKS][0]
    return states


def _fastest(call: Callable[[], object]) -> float:
    def took_s() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return min(took_s() for _ in range(CALLS))
