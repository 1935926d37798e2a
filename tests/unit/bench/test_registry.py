"""The command line of the benchmarks. Each declares its options; a wrong one is told before anything is measured."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.registry import BENCHES, Bench
from llmnode.errors import ConfigError
from llmnode.node.commands import bench

PLACE = Path(bench.__file__).resolve().parents[2] / "tests" / "bench"


@pytest.mark.parametrize("name", BENCHES)
def test_each_benchmark_says_what_it_measures_and_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"usage: tests/bench/run {name}" in said
    assert f"Measures {BENCHES[name].about}." in said
    assert ("positional arguments:" in said) == bool(BENCHES[name].needs), "the examples have them"
    usual = " ".join(["tests/bench/run", name, *BENCHES[name].needs])
    assert said.partition("examples:")[2].split() == f"{usual} {usual} --json".split()


def test_every_file_of_a_benchmark_is_in_the_registry() -> None:
    modules = {path.stem for path in PLACE.glob("*.py")} - {"__init__", "__main__", "registry"}
    folders = {path.parent.name for path in PLACE.glob("*/__init__.py")} - {"kit"}
    assert {each.module.partition(".")[0] for each in BENCHES.values()} == modules | folders


def test_the_table_of_the_readme_has_a_row_for_each_whose_link_leads_to_its_figures() -> None:
    rows = re.findall(r"^\| \[(\S+)\]\(([^)#]+)#?([^)]*)\) \|", (PLACE / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(BENCHES)
    for name, page, heading in rows:
        headings = re.findall(r"^#+ (.*)$", (PLACE / page).read_text(), re.MULTILINE)
        assert (heading or name) in {each.partition(":")[0].lower().replace(" ", "-") for each in headings}


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, each in BENCHES.items():
        assert [line for line in lines if line.split() == [name, *each.about.split()]]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (["nope"], "invalid choice: 'nope'"),
        (["codec", "--repeats", "0"], "--repeats: 0: give 1 to"),
        (["codec", "--thin"], "unrecognized arguments: --thin"),
        (["soak", "--minutes", "nan"], "--minutes: nan: give more than 0"),
        (["failures", "--only", "nope"], "--only 'nope': no cell is called so; they are as kill open 0"),
        (["pipeline", "--plot", "/tmp/x.nope"], "--plot /tmp/x.nope: end its name in one of"),
        (["pipeline", "--plot", "/nowhere/x.svg"], "--plot /nowhere/x.svg: there is no folder /nowhere"),
        (["transformers-tests", "/nowhere"], "/nowhere is no checkout of transformers"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(line: list[str], fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(line)
    assert fix in str(caught.value)


def test_llmnode_bench_starts_them_in_a_checkout() -> None:
    command = [sys.executable, "-P", "-m", "llmnode.node", "bench", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llmnode: argument NAME: invalid choice: 'nope'")


def test_a_benchmark_without_its_libraries_says_how_to_set_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`llmnode bench` runs in the environment of `llmnode demo`, which has no PEFT."""
    for name, library in (("hungry", "no_such_library"), ("faulty", "bench.no_such_part")):
        (tmp_path / f"{name}.py").write_text(f"import {library}\n")
    package = sys.modules["bench"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    with pytest.raises(ConfigError, match=r"needs no_such_library: tests/bench/run sets up what is missing"):
        Bench("hungry", "").declare(argparse.ArgumentParser())
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        Bench("faulty", "").declare(argparse.ArgumentParser())


def test_an_installed_llmnode_says_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmnode.node import cli

    monkeypatch.setattr(bench, "TESTS", tmp_path)
    with pytest.raises(ConfigError, match="the benchmarks are in the repository, in tests/bench"):
        cli._run(["bench", "codec"])
