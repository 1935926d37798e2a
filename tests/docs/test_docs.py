"""Every public name has a page that says what it takes and raises; they are made without a warning."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import TYPE_CHECKING

import pytest
from pdoc.doc import Class, Function, Module

from docs.build import PUBLIC, build, public_modules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# pdoc cannot read every type of the methods that a model of ours has from transformers.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pdoc")


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return [Module(module) for module in public_modules()]


def test_pages_are_made_without_a_warning_and_have_every_public_name(tmp_path: Path) -> None:
    pages, warnings = build(tmp_path)
    assert not warnings
    for name, page in zip(PUBLIC, pages, strict=True):
        text = page.read_text(encoding="utf-8")
        public = getattr(importlib.import_module(name), "__all__", [])
        assert not [each for each in public if f'id="{each}"' not in text]
        assert "View Source" in text


def test_every_public_name_has_a_docstring(modules: list[Module]) -> None:
    assert not [each.fullname for each in named(modules) if not each.docstring]


def test_a_docstring_names_every_argument(modules: list[Module]) -> None:
    missing = [
        f"{function.fullname}: {argument}"
        for function in functions(modules)
        for argument in function.signature.parameters
        if not argument.startswith("_")
        and argument not in ("self", "cls")
        and f"`{argument}`" not in function.docstring
    ]
    assert not missing


def test_a_docstring_names_the_errors_that_its_function_raises_itself(modules: list[Module]) -> None:
    missing = [
        f"{function.fullname}: {error}"
        for function in functions(modules)
        for error in raised(function)
        if error not in function.docstring
    ]
    assert not missing


def named(modules: list[Module]) -> Iterator[Class | Function]:
    """Our own public classes and functions, and the public methods that a class has itself."""
    for module in modules:
        for each in module.members.values():
            if isinstance(each, Class):
                yield each
                yield from (
                    method
                    for method in each.own_members
                    if isinstance(method, Function) and not method.name.startswith("_")
                )
            elif isinstance(each, Function) and not each.name.startswith("_"):
                yield each


def functions(modules: list[Module]) -> Iterator[Function]:
    return (each for each in named(modules) if isinstance(each, Function))


def raised(function: Function) -> set[str]:
    """The names of errors in its `raise` statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function.obj))))
    calls = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
