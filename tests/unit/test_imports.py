"""Imports load few modules, in a fresh process: `llmnode --help` and a script's first line stay quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

import llmnode

HEAVY = ("libp2p", "torch", "transformers", "trio")

LIGHT = [
    "llmnode",
    "llmnode.errors",
    "llmnode.core.ids",
    "llmnode.core.model",
    "llmnode.core.policy",
    "llmnode.core.route",
    "llmnode.models.names",
    "llmnode.models.sources.online",
    "llmnode.core.span",
    "llmnode.wire.frame",
    "llmnode.wire.messages",
    "llmnode.wire.payload",
    "llmnode.wire.stage",
    "llmnode.ports",
    "llmnode.node.cli",
]


def loaded_by(code: str) -> list[str]:
    """The heavy packages that a fresh process has loaded after `code`."""
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    # In the caller's folder python would find packages that only a checkout has.
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_the_check_sees_what_is_loaded() -> None:
    assert loaded_by("import trio") == ["trio"]


def test_importing_them_loads_nothing_heavy() -> None:
    each = "".join(f"import {name}\nassert not {set(HEAVY)!r} & set(sys.modules), {name!r}\n" for name in LIGHT)
    assert loaded_by(f"import sys\n{each}") == []


def test_listing_what_llmnode_has_loads_nothing_heavy() -> None:
    assert loaded_by("import llmnode\nassert set(llmnode.__all__) <= set(dir(llmnode))") == []


def test_a_name_that_llmnode_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'aconect'"):
        _ = llmnode.aconect
