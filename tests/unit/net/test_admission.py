"""The connections that a host admits. An address that is refused is not remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from libp2p.network.exceptions import SwarmException

from llmnode.core.policy import BudgetPolicy
from llmnode.net.admission import ConnectionAdmission
from unit.links import POLICY

if TYPE_CHECKING:
    from collections.abc import Callable


class Raw:
    """A connection from an address, without a socket."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get_remote_address(self) -> tuple[str, int]:
        return self.address, 4001


def begin(admission: ConnectionAdmission, address: str, end: Callable[[], None] = lambda: None) -> Any:  # Any: a scope
    raw: Any = Raw(address)
    return admission.begin(raw, end)


def test_addresses_that_are_refused_leave_nothing_behind() -> None:
    admission = ConnectionAdmission(replace(POLICY, budget=BudgetPolicy(connections=0)))
    for number in range(100):
        with pytest.raises(SwarmException):
            begin(admission, f"198.51.100.{number}")
    assert not admission._begun


def test_half_open_connections_leave_nothing_behind_and_the_oldest_makes_way() -> None:
    admission = ConnectionAdmission(replace(POLICY, budget=BudgetPolicy(half_open_per_host=2)))
    ended: list[int] = []
    scopes = [begin(admission, "198.51.100.1", lambda number=number: ended.append(number)) for number in range(3)]
    begin_elsewhere = begin(admission, "198.51.100.2")
    assert ended == [0]
    for each in (*scopes, begin_elsewhere):
        admission.end(each)
    assert not admission._begun
    assert not +admission.budget.process.held
