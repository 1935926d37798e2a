"""An amount of one resource that somebody holds in a scope of the budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.budget import Resource, Scope


@dataclass(slots=True)
class Account:
    """An amount of one resource in a scope, which rises and falls."""

    scope: Scope
    resource: Resource
    amount: int = field(default=0, init=False)

    def resize(self, amount: int, *, has_waited: bool = False) -> bool:
        """Hold `amount` from now on. False if it exceeds a limit: it then holds what it held.

        `has_waited` is that of `Scope.take`.
        """
        more = amount - self.amount
        if more > 0 and not self.scope.take(self.resource, more, has_waited=has_waited):
            return False
        if more < 0:
            self.scope.release(self.resource, -more)
        self.amount = amount
        return True

    def move(self, scope: Scope) -> bool:
        """Hold the amount in another scope from now on. False if it exceeds a limit: it then holds nothing."""
        self.scope.release(self.resource, self.amount)
        self.scope = scope
        if scope.take(self.resource, self.amount):
            return True
        self.amount = 0
        return False
