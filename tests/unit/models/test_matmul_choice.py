"""Products in other forms are those of the linear layer, and the fastest form is found."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import linear

from llmnode.models.weights.matmul_choice import LEAST_BYTES, fastest, in_parts, part_of, turned, use_fastest

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.weights.matmul_choice import Form

FORMS: list[Form] = [turned, in_parts]
ROWS = [1, 2, 4, 7, 8, 15, 16, 40, 300]
USUAL, OTHERS = [1, 2, 3, 32, 40, 300], [4, 5, 7, 8, 12, 15, 16, 31]


def layer(inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(inputs + outputs)
    return torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (64, 32), (33, 127)])
def test_each_form_computes_the_linear_layer(
    form: Form, dtype: torch.dtype, tolerance: float, bias: bool, inputs: int, outputs: int
) -> None:
    one = layer(inputs, outputs, bias=bias, dtype=dtype)
    for shape in [(rows,) for rows in ROWS] + [(1, rows) for rows in ROWS] + [(2, 3)]:
        rows = torch.randn(*shape, inputs, dtype=dtype)
        product = form(rows, one.weight, one.bias)
        expected = one(rows)
        assert product.shape == expected.shape
        assert product.dtype == dtype
        assert product.is_contiguous()
        torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("outputs", "part"), [(960, 120), (576, 96), (4096, 128), (11008, 128), (49152, 128), (127, 127)]
)
def test_parts_are_large_and_none_is_smaller_than_the_others(outputs: int, part: int) -> None:
    assert part_of(outputs) == part


def test_what_cannot_be_divided_has_no_parts_and_other_forms() -> None:
    assert part_of(131 * 137) is None
    ticks = itertools.count()
    (forms,) = fastest([torch.ones(131 * 137, 8)], lambda: float(next(ticks))).values()
    assert in_parts not in forms


class Stopwatch:
    """A clock: each look costs a second, and each product the cost of its form."""

    def __init__(self, costs_s: dict[Form, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for form, cost_s in costs_s.items():
            monkeypatch.setattr(f"llmnode.models.weights.matmul_choice.{form.__name__}", self._charged(form, cost_s))

    def __call__(self) -> float:
        return self.now_s

    def _charged(self, form: Form, cost_s: float) -> Form:
        def charged(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.now_s += cost_s
            return form(rows, weight, bias)

        charged.__name__ = form.__name__
        return charged


@pytest.mark.parametrize(
    ("costs_s", "chosen"),
    [
        ({linear: 0.02, turned: 0.01, in_parts: 0.015}, "turned"),
        ({linear: 0.02, turned: 0.015, in_parts: 0.01}, "in_parts"),
        ({linear: 0.02, turned: 0.0195, in_parts: 0.03}, "linear"),
    ],
)
def test_the_fastest_form_is_chosen_for_a_few_rows_if_it_gains_anything(
    costs_s: dict[Form, float], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [torch.ones(64, 8), torch.ones(64, 8)]
    (forms,) = fastest(weights, Stopwatch(costs_s, monkeypatch)).values()
    names = [form.__name__ for form in forms]
    assert [names[rows.bit_length()] for rows in OTHERS] == [chosen] * len(OTHERS)
    assert [names[rows.bit_length()] for rows in USUAL if rows.bit_length() < len(names)] == ["linear"] * 3


def counted(form: Form, counts: list[int]) -> Callable[..., torch.Tensor]:
    def count(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        counts.append(len(rows))
        return form(rows, weight, bias)

    return count


def test_layers_use_the_form_for_as_many_rows_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    ticks = itertools.count()
    large, small = layer(256, LEAST_BYTES // 1024, bias=True), layer(8, 8)
    forms = {(large.weight.shape, large.weight.dtype): [linear] * 3 + [counted(turned, counts)] * 3}
    monkeypatch.setattr("llmnode.models.weights.matmul_choice.fastest", lambda _weights, _clock: forms)
    use_fastest(torch.nn.Sequential(large, small), lambda: float(next(ticks)))
    assert "forward" not in vars(small), "it stays in a cache"
    for rows in USUAL + OTHERS:
        hidden = torch.randn(rows, 256)
        torch.testing.assert_close(large(hidden), linear(hidden, large.weight, large.bias), rtol=1e-5, atol=1e-5)
    assert counts == OTHERS
