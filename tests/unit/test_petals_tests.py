"""The page that maps Petals' own tests to ours: every one has a test of ours that is there, or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "process" / "PETALS_TESTS.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w:]+)` \| (.+) \|$", PAGE, re.MULTILINE)
OURS = re.compile(r"`([\w/]+\.py)::(\w+)`")
OF_PETALS = {
    "test_aux_functions": 3,
    "test_block_exact_match": 1,
    "test_cache": 3,
    "test_chained_calls": 2,
    "test_dtype": 1,
    "test_full_model": 5,
    "test_optimized_layers": 1,
    "test_peft": 5,
    "test_priority_pool": 1,
    "test_remote_sequential": 2,
    "test_sequence_manager": 1,
    "test_server_stats": 1,
    "test_speculative_generation": 2,
    "test_tensor_parallel": 1,
}
"""Petals' files, and the number of tests in each, at the commit that the page names."""


def test_every_test_of_petals_has_a_row() -> None:
    names = [name for name, _ in ROWS]
    assert len(set(names)) == len(names) == PAGE.count("\n| `")
    found = [name.split("::")[0] for name in names]
    assert {file: found.count(file) for file in found} == OF_PETALS


def test_every_row_names_tests_that_are_there_or_a_reason() -> None:
    for name, ours in ROWS:
        tests = OURS.findall(ours)
        assert tests or ours.startswith("does not apply: "), f"{name}: by which test of ours?"
        assert ours.count("::") == len(tests), f"{name}: write FILE.py::NAME"
        for file, test in tests:
            assert test in _tests_of(file), f"{name}: {file} has no {test}"


def _tests_of(file: str) -> set[str]:
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    return {each.name for each in body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
