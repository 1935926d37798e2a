"""The program with other values in some fields of its policies, so that a test need not wait for the usual deadlines.

All else is as users have it. That the usual values do what they say is for simulations, whose clock costs nothing.
"""

from __future__ import annotations

import sys

SET = """
from dataclasses import fields
from llmnode.core import policy

for path, value in {values!r}.items():
    name, field = path.split(".")
    made = getattr(policy, name)
    names = [each.name for each in fields(made)]
    defaults = list(made.__init__.__defaults__)
    assert len(defaults) == len(names)
    defaults[names.index(field)] = value
    made.__init__.__defaults__ = tuple(defaults)
    assert getattr(made(), field) == value
"""
RUN = """
from llmnode.node.cli import run
run()
"""


def with_policies(values: dict[str, float], program: str = RUN) -> list[str]:
    """The command that runs `program`, by default `llmnode`, with these values: {"SwarmPolicy.lifetime_s": 9}."""
    return [sys.executable, "-P", "-c", SET.format(values=values) + program]
