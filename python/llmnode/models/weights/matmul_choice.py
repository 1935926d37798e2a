"""Products with the weights of linear layers on a CPU, for a few rows at a time: decodes of several sessions, and parts
of prefills beside them.

For one row BLAS reads the weight and is done. For a few it first lays the weight out anew, which takes longer than the
product itself: 8 rows cost 2.4 times one. The same product in another form, over the weight as it is stored, does
without much of that: 1.5 times. The fastest form for a number of rows depends on shape, dtype, threads and machine, so
it is measured when the weights have been read. The numbers are the same but for the order of sums.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """A function of rows (..., inputs), a weight (outputs, inputs) and perhaps a bias (outputs), to (..., outputs)."""
    Kind = tuple[torch.Size, torch.dtype]
    """The kind of weights that are alike."""

LEAST_BYTES = 1 << 18
"""Smaller weights stay in a cache, and all forms are alike."""
MOST_PART = 128
"""Outputs of a part: enough for a call to BLAS, few enough for its copy of them to stay in a cache."""
LEAST_PART = 32
LEAST_BITS, MOST_BITS = 3, 5
"""The bit lengths of the numbers of rows that have a choice of forms: 4 to 31. Fewer and more are best as they are."""
ROUNDS = 2
"""Each form is measured this many times for a number of rows."""
PASS_BYTES = 64 << 20
"""The bytes of weights in a round: more than a cache keeps until the next one."""
GAIN = 0.9
"""Another form must take less than this part of the time of the usual one."""


def turned(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight times the rows as columns."""
    columns = rows.reshape(-1, rows.shape[-1]).t()
    product = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
    return product.t().contiguous().view(*rows.shape[:-1], -1)  # attention is slow with transposed rows


def in_parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Some outputs after the other, all in one call. Not for weights that have no `part_of`."""
    size = part_of(len(weight))
    assert size is not None
    parts = weight.view(-1, size, weight.shape[1]).transpose(1, 2)
    flat = rows.reshape(-1, rows.shape[-1])
    product = torch.bmm(flat.expand(len(parts), *flat.shape), parts).transpose(0, 1).reshape(*rows.shape[:-1], -1)
    return product if bias is None else product.add_(bias)


@cache
def part_of(outputs: int) -> int | None:
    """The size of a part, out of `outputs` outputs, if they can be divided."""
    return next((size for size in range(MOST_PART, LEAST_PART - 1, -1) if outputs % size == 0), None)


def use_fastest(blocks: torch.nn.Module, clock: Callable[[], float] = time.thread_time) -> None:
    """Have all linear layers in `blocks` multiply in the forms that are fastest here. Takes some tenths of a second."""
    layers = [each for each in blocks.modules() if isinstance(each, torch.nn.Linear) and _has_choice(each.weight)]
    if layers:
        forms = fastest([layer.weight for layer in layers], clock)
        for layer in layers:
            layer.forward = LinearProduct(layer, forms[_kind(layer.weight)])  # type: ignore[method-assign]


class LinearProduct:
    """A linear layer's product, in the form for the number of rows: `forms` are by the bit length of that number."""

    __slots__ = ("_bias", "_forms", "_weight")

    def __init__(self, layer: torch.nn.Linear, forms: Sequence[Form]) -> None:
        self._weight, self._bias, self._forms = layer.weight, layer.bias, forms

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # as torch names it
        bits = (input.numel() // input.shape[-1]).bit_length()
        form = self._forms[bits] if bits <= MOST_BITS else linear
        return form(input, self._weight, self._bias)


@torch.inference_mode()
def fastest(weights: Sequence[torch.Tensor], clock: Callable[[], float]) -> Mapping[Kind, Sequence[Form]]:
    """The forms of products for each kind of `weights`, by the bit length of the number of rows.

    All are multiplied in turn, as in a forward: one that was just used is still in a cache.
    """
    ends = [*itertools.accumulate(weight.nbytes for weight in weights)]
    passed = weights[: bisect.bisect_left(ends, PASS_BYTES) + 1]
    chosen: dict[Kind, list[Form]] = {_kind(weight): [linear] * LEAST_BITS for weight in weights}
    for bits in range(LEAST_BITS, MOST_BITS + 1):
        took_s = _measured(passed, 3 << bits - 2, clock)  # in the middle of those with this bit length
        for kind, forms in chosen.items():
            of_kind = {form: took_s[kind, form] for form in _forms() if (kind, form) in took_s}
            best = min(of_kind, key=lambda form: of_kind[form], default=linear)
            forms.append(best if of_kind and of_kind[best] < GAIN * of_kind[linear] else linear)
    return chosen


def _measured(
    weights: Sequence[torch.Tensor], rows: int, clock: Callable[[], float]
) -> Mapping[tuple[Kind, Form], float]:
    """The least time that all of a kind took in one pass."""
    inputs = {_kind(weight): weight.new_ones(rows, weight.shape[1]) for weight in weights}
    took_s: dict[tuple[Kind, Form], float] = {}
    for _, form in itertools.product(range(ROUNDS), _forms()):
        of_pass: dict[Kind, float] = defaultdict(float)
        for weight in weights:
            if form is in_parts and part_of(len(weight)) is None:
                continue
            since_s = clock()
            form(inputs[_kind(weight)], weight, None)
            of_pass[_kind(weight)] += clock() - since_s
        for kind, seconds in of_pass.items():
            took_s[kind, form] = min(took_s.get((kind, form), math.inf), seconds)
    return took_s


def _forms() -> Sequence[Form]:
    return linear, turned, in_parts


def _kind(weight: torch.Tensor) -> Kind:
    return weight.shape, weight.dtype


def _has_choice(weight: torch.Tensor) -> bool:
    return weight.is_cpu and weight.is_floating_point() and weight.is_contiguous() and weight.nbytes >= LEAST_BYTES
