"""The script `tests/run`: all groups of tests are run, each once; or it fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tests" / "run"
FUNCTIONS = SCRIPT.read_text().partition("\nset_up\n")[0]
GROUPS = re.findall(r"^(\w+)\(\) \{ .*--durations=20", FUNCTIONS, re.MULTILINE)


def all_tests(mktemp: str, failing: str = "") -> subprocess.CompletedProcess[str]:
    """The script's own loop, over groups that print their names. `mktemp` answers for the folder of what is taken."""
    groups = "\n".join(f"{each}() {{ echo ran {each}; {'false' if each == failing else 'true'}; }}" for each in GROUPS)
    instead = f'mktemp() {{ if [ "${{1-}}" = -d ]; then {mktemp}; else command mktemp; fi; }}'
    script = f"{FUNCTIONS}\n{groups}\n{instead}\nall_tests || exit 3\n"
    return subprocess.run(["bash", "-c", script, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=60)


def ran(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"^ran (\w+)$", done.stdout, re.MULTILINE))


def test_each_group_is_run_once() -> None:
    done = all_tests("command mktemp -d")
    assert done.returncode == 0, done.stderr
    assert ran(done) == sorted(GROUPS)
    assert len(GROUPS) == 8


def test_a_group_that_fails_fails_all_and_the_others_run() -> None:
    done = all_tests("command mktemp -d", failing=GROUPS[0])
    assert done.returncode == 3
    assert ran(done) == sorted(GROUPS)


@pytest.mark.parametrize(
    "mktemp", ["return 1", "echo /dev/null/taken"], ids=["no folder", "a folder that cannot be written"]
)
def test_groups_that_cannot_be_taken_are_no_success(mktemp: str) -> None:
    done = all_tests(mktemp)
    assert done.returncode == 3
    assert ran(done) == []


def test_pytest_ends_with_its_status_and_what_it_has_printed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    status = []
    for chosen in ("good", "bad"):
        run = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 pytest -p no:cacheprovider {tmp_path} -k {chosen}"
        script = f"{FUNCTIONS}\nvenv={sys.prefix}\n{run}\n"
        done = subprocess.run(
            ["bash", "-c", script, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=60
        )
        status.append(done.returncode)
        assert re.search(r"\d (passed|failed).* in ", done.stdout.splitlines()[-1])
    assert status == [0, 1]
