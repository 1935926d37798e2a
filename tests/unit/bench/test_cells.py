"""The kill matrix: what its cells cover, and when each strikes."""

from __future__ import annotations

from itertools import product

import pytest

from bench.failures.cells import ALL, EACH, FULL, SPANS, THIN, TWO, Cell, Fault, Moment, choose


def test_every_fault_is_played_at_every_moment() -> None:
    assert {(cell.fault, cell.moment) for cell in FULL} == set(product(Fault, Moment)) - {
        (Fault.RESTART, Moment.RECOVERY)  # which is SIGKILL's
    }


@pytest.mark.parametrize("fault", set(Fault) - {Fault.CUT_OFF}, ids=lambda fault: fault.name)
def test_every_fault_strikes_every_span_and_two_at_once(fault: Fault) -> None:
    assert {cell.spans for cell in FULL if cell.fault is fault} == {*EACH, TWO}


def test_sigkill_strikes_every_span_at_every_moment() -> None:
    assert {(cell.moment, cell.spans) for cell in FULL if cell.fault is Fault.KILL} == set(
        product(Moment, [*EACH, TWO])
    )


def test_no_cell_is_played_twice() -> None:
    assert len(set(FULL)) == len(FULL)
    assert len(set(THIN)) == len(THIN)
    assert {(cell.fault, cell.moment) for cell in THIN} <= {(cell.fault, cell.moment) for cell in FULL}


def test_cells_are_chosen_by_the_beginning_of_their_names() -> None:
    assert choose(thin=False, only="") == FULL
    assert choose(thin=True, only="") == THIN
    assert [str(cell) for cell in choose(thin=False, only="kill open 0")] == ["kill open 0", "kill open 0+2"]


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name)
@pytest.mark.parametrize("spans", [*EACH, TWO, ALL], ids=str)
def test_it_strikes_within_the_act(moment: Moment, spans: tuple[int, ...]) -> None:
    assert 0 <= Cell(Fault.KILL, moment, spans).delay_s(1.0) <= 1


def test_later_hops_are_struck_later() -> None:
    for moment in (Moment.PREFILL, Moment.DECODE, Moment.PUSH):
        delays_s = [Cell(Fault.KILL, moment, (span,)).delay_s(1.0) for span in range(SPANS)]
        assert delays_s == sorted(set(delays_s))
